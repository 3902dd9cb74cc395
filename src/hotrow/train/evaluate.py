"""`Ranker`: the tables and the model of a run as one thing that scores batches, for training and evaluation.

`evaluate` reads a split in order, once, without gradients: no row is made, none counts as used, and no random
number is drawn, so a run that is evaluated on the way computes what it would have computed anyway.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotrow import _native
from hotrow.data import DataSet, Reader
from hotrow.data.batch import Batch
from hotrow.data.growing import check_same
from hotrow.data.marks import Marks
from hotrow.data.steps import schema_after
from hotrow.embedded import Embedded
from hotrow.embeddings import Embeddings
from hotrow.errors import CheckpointError, DataError, HotrowError, NotFiniteError, SettingsError
from hotrow.models import ModelInputs, build
from hotrow.objectives import Catalogue, Objective, ObjectiveInputs
from hotrow.objectives.inputs import Inputs
from hotrow.objectives.measures import Measures, Together, on_host
from hotrow.objectives.slices import Slice, check_slices, most_frequent
from hotrow.policy import Bounded, Policy, Sync
from hotrow.run import Run
from hotrow.train.checkpoint import Checkpoint, Checkpoints
from hotrow.train.dense import DenseForward
from hotrow.train.finite import REMEDY
from hotrow.train.logs import RunFolder, find_run
from hotrow.train.phases import Phases
from hotrow.train.pipeline import Pipeline
from hotrow.train.placing import Placing, place
from hotrow.train.policies import pipeline_of
from hotrow.train.progress import Progress
from hotrow.train.ranks import Ranks
from hotrow.train.ready import Ready
from hotrow.train.step import Step
from hotrow.world import World


class Ranker:
    """Data set, tables and model of a run, freshly made from its seed.

    With `ranks`, rows live where the run has them and data is split over ranks; without, all is in this process.
    """

    def __init__(self, run: Run, ranks: Ranks | None = None, progress: Progress | None = None) -> None:
        self.run = run
        self.device = _device(run)
        self.ranks = ranks or Ranks(World(), self.device)
        self.device = self.ranks.device
        self.data = DataSet.open(run.data.path)
        schema = schema_after(run.data.steps, self.data.schema)
        self.columns = schema.dense
        features = run.features_of(schema.feature_settings())
        inputs = ObjectiveInputs.of(features, schema, run.train.seed)
        self.objective: Objective = run.objective.build(replace(inputs, rank=self.ranks.world.rank, items=self._items))
        drawn = self.objective.features()
        tables = run.tables_of(feature.table for feature in [*features, *drawn])
        dims = {table.name: table.dim for table in tables}
        placing = Placing(None, None) if ranks is None else place(run, tables, ranks, (progress or Progress()).say)
        self.embeddings = Embeddings(
            tables,
            [*features, *drawn],
            seed=run.train.seed,
            tiers=placing.tiers,
            plan=placing.plan,
            device=self.device,
            device_rows=run.plan is not None and run.plan.device_rows,
            world=self.ranks.world,
            timeout=run.cluster.timeout,
        )
        self.embeddings.optional = frozenset(feature.name for feature in drawn)
        torch.manual_seed(run.train.seed)
        given = ModelInputs(
            features, {f.name: dims[f.table] for f in features}, len(schema.dense), self.objective.outputs_per_sample
        )
        self.model = build(run.model, given).to(self.device)
        self.objective.check(self.model)
        check_slices(run.evaluate.slices, schema)
        self._slices: dict[str, list[Slice]] = {}
        self.dense = DenseForward(
            self.model,
            self.device,
            precision=run.train.precision,
            compiled=run.train.compile,
            outputs=self.objective.outputs,
        )

    def reader(self, split: str, *, shuffle: bool, only: Marks | None = None, batch_size: int | None = None) -> Reader:
        """Batches of a split, or of its marked samples."""
        data = self.run.data
        size, world = batch_size or data.batch_size, self.ranks.world
        return Reader(
            self.data,
            split,
            size,
            shuffle=shuffle,
            seed=data.seed,
            rank=world.rank,
            world=world.size,
            steps=data.steps,
            only=only,
        )

    def whole_reader(self, split: str) -> Reader:
        """All batches of a split, in order: of a size that leaves no sample over when ranks share them out."""
        size, ranks = self.run.data.batch_size, self.ranks.world.size
        samples = self.data.samples(split)
        while size > 1 and 0 < samples % (size * ranks) < ranks:
            size -= 1
        reader = self.reader(split, shuffle=False, batch_size=size)
        if reader.dropped:
            raise DataError(f'The split "{split}" has {samples} samples, too few for {ranks} ranks. Evaluate on one.')
        return reader

    def close(self) -> None:
        """Frees what tiers hold; changes that a cache still has are written back."""
        for tier in self.embeddings.router.tiers.values():
            tier.close()

    def pipeline(
        self,
        batches: Iterable[Batch],
        policy: Policy | None = None,
        phases: Phases | None = None,
        first: int | None = None,
    ) -> Pipeline:
        """Batches on their way through this run's tables, to be trained on under a policy or only to be scored.

        What an objective draws for them follows from their numbers, from `first` on; from the next step's if not given.
        """
        if policy is None:
            ahead = Sync().ahead if isinstance(self.run.policy, Bounded) else self.run.policy.ahead
            return Pipeline(batches, self.embeddings, ahead=ahead, pin=self.device.type == "cuda", phases=phases)
        return pipeline_of(
            self._prepared(batches, self.embeddings.steps if first is None else first),
            self.embeddings,
            policy,
            ranks=self.ranks,
            pin=self.device.type == "cuda",
            phases=phases,
            extras=self.objective.extras,
        )

    def _prepared(self, batches: Iterable[Batch], first: int) -> Iterator[Batch]:
        """Batches with what the objective draws for them."""
        return (self.objective.prepare(batch, number) for number, batch in enumerate(batches, start=first))

    def measures(self, split: str) -> Measures:
        """What is measured on a split, of no sample yet."""
        asked = self.run.evaluate
        if asked.slices and split not in self._slices:
            reader = Reader(
                self.data, split, 1 << 16, shuffle=False, seed=self.run.data.seed, steps=self.run.data.steps
            )
            self._slices[split] = most_frequent(asked.slices, reader, asked.values)

        return Measures(self.fresh_metrics, self._slices.get(split, ()))

    def fresh_metrics(self) -> Together:
        """The objective's metrics and the user's own, of no sample yet."""
        own = [metric.build(self.objective.inputs) for metric in self.run.evaluate.metrics]
        return Together(self.objective, own)

    def settle(self) -> None:
        """Has caches of several ranks write back: an evaluation measures what a checkpoint taken here would hold."""
        if self.ranks.world.size > 1:
            for tier in self.embeddings.router.tiers.values():
                tier.flush()
            self.ranks.decide("")  # nobody reads before all have

    def step(self, phases: Phases) -> Step:
        """What trains on a batch."""
        return Step(
            self.embeddings,
            self.model,
            self.objective,
            self.run.optimizer,
            forward=self.dense,
            ranks=self.ranks,
            phases=phases,
            columns=self.columns,
        )

    def train(self, on: bool = True) -> None:
        """Switches dropout, batch statistics and the making of rows on or off."""
        self.model.train(on)
        self.embeddings.train(on)

    def score(self, ready: Ready) -> tuple[Any, Inputs]:
        """What the model gives, and the batch's inputs, both on the device of the dense part."""
        inputs = ready.inputs.to(self.device)
        return self.dense(self.embeddings.embed(ready.lookup), inputs.dense), inputs

    def encode(self, batch: Batch, features: Sequence[str], give: Callable[[Any, Embedded], Tensor]) -> Tensor:
        """What a function makes of the model and of some features' rows of a batch, on the device of the dense part."""
        with torch.no_grad():
            return self.dense.apply(give, self.embeddings(batch, features))

    def _items(self, item: str, others: Sequence[str]) -> Catalogue:
        data = self.run.data
        return Catalogue.read(self.data, data.train, item, others, data.steps, data.seed)

    def arrays(self) -> dict[str, Tensor]:
        """A copy of the dense weights, as a checkpoint keeps them."""
        return {f"model/{name}": t.detach().cpu().clone() for name, t in self.model.state_dict().items()}

    def restore(self, checkpoint: Checkpoint, arrays: Mapping[str, Tensor]) -> None:
        """Takes over the weights and rows of a checkpoint."""
        weights = {n.removeprefix("model/"): a for n, a in arrays.items() if n.startswith("model/")}
        try:
            self.model.load_state_dict(weights)
        except RuntimeError as error:
            raise CheckpointError(f"{checkpoint.folder} does not fit the model: {error}") from None
        self.embeddings.restore(checkpoint.rows)


def evaluate(
    ranker: Ranker, split: str, progress: Progress | None = None, *, samples: int | None = None
) -> dict[str, float]:
    """The metrics of a split, or of the batches that hold its first `samples`; of all ranks' samples together.

    The ranker is in training mode again afterwards if it was before.
    """
    progress = progress or Progress()
    metrics = ranker.measures(split)
    reader = ranker.whole_reader(split)
    ranker.settle()
    step = reader.batch_size * reader.world
    batches = len(reader) if samples is None else min(len(reader), -(-samples // step))
    training, unusable = ranker.model.training, 0
    ranker.train(False)
    progress.start(batches, 0, "Evaluating batch")
    try:
        ranker.objective.begin_evaluation(ranker.encode)
        with torch.no_grad(), ranker.pipeline(itertools.islice(reader, batches)) as pipeline:
            for done, fetched in enumerate(pipeline, start=1):
                batch = fetched.batch
                outputs = ranker.score(fetched)[0]
                outputs = outputs if ranker.objective.measures_on_device else on_host(outputs)
                unusable += not_finite(outputs)
                metrics.update(outputs, batch)
                progress.step(done, len(batch), None)
    finally:
        progress.stop()
        ranker.objective.end_evaluation()
        ranker.train(training)
    if unusable := int(ranker.ranks.sums(float(unusable))[0]):
        raise NotFiniteError(
            f'For {unusable:,} samples of the split "{split}" the model\'s answer is no finite number: weights or '
            f"rows are not, because training did not converge, or dense values are too large. {REMEDY}"
        )
    return ranker.ranks.merged(metrics, lambda: ranker.measures(split))


def evaluate_path(
    path: Path,
    split: str | None = None,
    data: Path | None = None,
    progress: Progress | None = None,
    *,
    slices: Sequence[str] = (),
    trust_model: bool = False,
) -> tuple[Path, str, dict[str, float]]:
    """Evaluates a checkpoint, or the one that a run folder stands for: the checkpoint, the split and its metrics.

    With `slices` by these columns, in place of those of the run.
    """
    folder, checkpoint = _find(path)
    run = folder.run().trusted() if trust_model else folder.run()
    if data is not None:
        run = run.model_copy(update={"data": run.data.model_copy(update={"path": data.resolve()})})
    if slices:
        run = run.model_copy(update={"evaluate": run.evaluate.model_copy(update={"slices": tuple(slices)})})
    check_same(DataSet.open(run.data.path).schema, folder.schema(run), str(run.data.path))
    split = split or run.data.test or run.data.train
    with host(run):
        ranker = Ranker(run)
        with contextlib.closing(ranker):
            ranker.restore(checkpoint, checkpoint.arrays())
            return checkpoint.folder, split, evaluate(ranker, split, progress)


def not_finite(outputs: Any) -> int:
    """For how many samples what a model gave is no finite number."""
    wrong: Tensor | None = None
    for value in [outputs] if isinstance(outputs, Tensor) else outputs.values():
        here = ~torch.isfinite(value.flatten(1) if value.dim() > 1 else value[:, None]).all(dim=1)
        wrong = here if wrong is None or len(wrong) != len(here) else wrong | here
    return 0 if wrong is None else int(wrong.sum())


def _find(path: Path) -> tuple[RunFolder, Checkpoint]:
    folder, checkpoint = find_run(path)
    checkpoint = checkpoint or Checkpoints(folder.checkpoints).chosen()
    if checkpoint is None:
        raise CheckpointError(f"{path} has no complete checkpoint yet.")
    return folder, Checkpoint(checkpoint)


@contextlib.contextmanager
def host(run: Run) -> Iterator[None]:
    """The process as the run wants it: so many threads, and on CPU only algorithms that repeat exactly."""
    threads = torch.get_num_threads()
    exact = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    rows = _native.threads()
    if run.train.threads is not None:
        torch.set_num_threads(run.train.threads)
        _native.set_threads(run.train.threads)
    if run.train.device == "cpu":
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _native.set_threads(rows)
        torch.use_deterministic_algorithms(exact)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@contextlib.contextmanager
def at_work(run: Run) -> Iterator[None]:
    """The process as the run wants it; a disk that fails is a sentence."""
    try:
        with host(run):
            yield
    except OSError as error:
        raise HotrowError(
            f"The run stopped at {error.filename or run.output.folder}: {error.strerror or error}."
        ) from error


def _device(run: Run) -> torch.device:
    if run.train.device == "cuda" and not torch.cuda.is_available():
        raise SettingsError('train.device is "cuda", but torch finds no GPU here; set it to "cpu".')
    return torch.device(run.train.device)
