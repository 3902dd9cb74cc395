"""`Predictor`: scores from a run folder, beside a training process that goes on writing to it.

    predictor = hotrow.Predictor("runs/first")
    predictor.score({"user": [7, 7], "item": ["a", "b"], "history": [[3, 5], [3, 5]]})    # a chance for each
    predictor.follow(seconds=1)                     # newer checkpoints, by itself

It needs the run folder and nothing else. A key without a row reads as it would start, so unseen keys have an answer.

Memory is the rows' values and 26 to 30 bytes a row, without optimizer state (`memory` says it), and the dense part.
A newer checkpoint that stands on the present one is taken over in place: files are checked while requests go on, then
requests wait until the changed rows are written, and each is answered by one checkpoint wholly. One that stands alone
is loaded beside the present rows, which takes their memory once more for that time, and no request waits. So a trainer
that is followed should write incremental checkpoints (`train.incremental`).
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.data.batch import Batch
from hotrow.data.fresh import Columns, request_of
from hotrow.data.schema import Schema
from hotrow.data.steps import schema_after
from hotrow.embeddings import Embeddings
from hotrow.errors import CheckpointError, HotrowError, SettingsError
from hotrow.export import DensePart, export
from hotrow.lookup import Lookup
from hotrow.models import ModelInputs, build
from hotrow.objectives import Objective, ObjectiveInputs, one_output
from hotrow.ranking import Ranked, rank, refuse_not_finite
from hotrow.run import Run
from hotrow.store.copy import Changes, after, read_only
from hotrow.store.snapshot import chain, check_tables, read_manifest
from hotrow.table import Feature, Table
from hotrow.train.checkpoint import Checkpoint, Checkpoints
from hotrow.train.dense import DenseForward
from hotrow.train.logs import find_run
from hotrow.train.pipeline import Gate

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Version:
    """What requests are answered from: the rows and the dense part of one checkpoint."""

    checkpoint: Path
    step: int
    snapshot: str
    embeddings: Embeddings
    model: nn.Module
    dense: DenseForward


class Predictor:
    """Scores samples as the checkpoint does that a run folder stands for, or as one checkpoint.

    That is the newest, or the best so far of a run that stops early.

    Any number of threads may score at once, also while it refreshes. Use it as a context, or call `close`.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        model: type[nn.Module] | None = None,
        objective: type[Objective] | None = None,
        trust_model: bool = False,
    ) -> None:
        """A run with a class that is not Hotrow's needs that class, or `trust_model`, which imports what it names."""
        folder, self._fixed = find_run(Path(path))
        self._folder, self._trust = folder, trust_model
        self._classes: dict[str, Any] = {"model": model, "objective": objective}
        self.run: Run = self._run_of_folder()
        self.schema: Schema = folder.schema(self.run)
        """What the columns of a request are."""
        after_steps = schema_after(self.run.data.steps, self.schema)
        self._features: list[Feature] = self.run.features_of(after_steps.feature_settings())
        given = ObjectiveInputs.of(self._features, after_steps, self.run.train.seed)
        self.objective: Objective = self.run.objective.build(given)
        self._tables: list[Table] = self.run.tables_of(feature.table for feature in self._features)
        dims = {table.name: table.dim for table in self._tables}
        self._inputs = ModelInputs(
            self._features,
            {f.name: dims[f.table] for f in self._features},
            len(after_steps.dense),
            self.objective.outputs_per_sample,
        )
        self.trouble = ""
        """Why the last refresh in the background failed, as a sentence; empty if it did not."""
        self._gate = Gate()
        self._refreshing = threading.Lock()
        self._ended = threading.Event()
        self._following: threading.Thread | None = None
        self._version: Version | None = None
        self.refresh()

    @property
    def step(self) -> int:
        """The training step of the checkpoint that answers now."""
        return self._now.step

    @property
    def checkpoint(self) -> Path:
        """The checkpoint that answers now."""
        return self._now.checkpoint

    def score(self, samples: Batch | Columns) -> Tensor:
        """The chance of each sample, `[B]`: of a batch, or of columns named as the data set names them."""
        batch = self.batch(samples)
        if not len(batch):
            return torch.empty(0)
        found = self.predict(batch)
        if len(found) != 1:
            raise SettingsError(f"This run predicts {', '.join(found)}: take `predict`, which gives each by name.")
        return next(iter(found.values()))

    def predict(self, samples: Batch | Columns) -> dict[str, Tensor]:
        """What the objective says of each sample, by name: `score`, or a name for each label."""
        return self.objective.predict(self.outputs(samples))

    def logits(self, samples: Batch | Columns) -> Tensor:
        """The logit of each sample, `[B]`, where the model gives one."""
        batch = self.batch(samples)
        return one_output(self.outputs(batch), "logits") if len(batch) else torch.empty(0)

    def outputs(self, samples: Batch | Columns) -> Any:
        """What the model gives for each sample; what `hotrow evaluate` takes its metrics of."""
        batch = self.batch(samples)
        with torch.no_grad():
            version, lookup = self._looked_up(batch)
            outputs = version.dense(version.embeddings.embed(lookup), batch.dense)
        refuse_not_finite(outputs, len(batch), version.checkpoint)
        return outputs

    def rank(
        self, user: Mapping[str, Any], candidates: Columns | Sequence[Any] | Tensor, k: int = 10, *, by: str = ""
    ) -> Ranked:
        """The `k` candidates with the highest scores for one user, whose columns are given once: a value in each.

        Candidates are columns, or keys of items where those are all that they have. The user is looked up once, and
        encoded once by a model with `user_vectors` that a retrieval objective trained. `by` names the prediction to
        rank by, where there are several.
        """
        return rank(self, user, candidates, k, by)

    @contextlib.contextmanager
    def answering(self) -> Iterator[Version]:
        """The checkpoint that answers now; it is not replaced within."""
        with self._gate:
            yield self._now

    def batch(self, samples: Batch | Columns) -> Batch:
        """Columns as a batch, with the run's steps done; a batch as it is, for a reader has done them."""
        if isinstance(samples, Batch):
            return samples
        data = self.run.data
        return request_of(samples, self.schema, data.steps, data.seed)

    def refresh(self) -> bool:
        """Takes over a newer checkpoint, or a better one; whether there was one. The present one stays if it cannot."""
        with self._refreshing:
            while True:
                newest = self._newest()
                try:
                    return self._take(newest)
                except (CheckpointError, OSError) as error:
                    if self._newest() != newest:
                        continue  # it was taken away while it was read
                    if isinstance(error, CheckpointError):
                        raise
                    raise CheckpointError(f"{newest} cannot be read: {error.strerror or error}.") from error

    def follow(self, seconds: float = 1.0) -> None:
        """Refreshes every so many seconds in the background, until `close`; `trouble` says what went wrong."""
        if self._fixed is not None:
            raise SettingsError(
                f"{self._fixed} is one checkpoint; open the run folder {self._folder.path} to follow it."
            )
        if seconds <= 0:
            raise SettingsError(f"A predictor can look every 0.1 seconds, say, but not every {seconds}.")
        if self._following is not None:
            raise SettingsError("This predictor follows its run already.")
        self._following = threading.Thread(target=self._follow, args=(seconds,), name="hotrow-predictor", daemon=True)
        self._following.start()

    def memory(self) -> dict[str, int]:
        """Rows, the bytes they take in this process with their index, and the bytes of the dense part."""
        version = self._now
        stats = version.embeddings.stats().values()
        weights = version.model.state_dict().values()
        return {
            "rows": sum(table["rows"] for table in stats),
            "row_bytes": sum(table["bytes"] for table in stats),
            "dense_bytes": sum(weight.numel() * weight.element_size() for weight in weights),
        }

    def inputs(self, samples: Batch | Columns) -> dict[str, Tensor]:
        """What the exported dense part takes for these samples: rows looked up, pooled and spelled out."""
        batch = self.batch(samples)
        with torch.no_grad():
            version, lookup = self._looked_up(batch)
            part = DensePart(version.model, self._inputs, self.objective)
            return part.inputs(version.embeddings.embed(lookup), batch.dense)

    def export(self, path: Path | str, *, batch_size: int | None = None) -> Path:
        """Writes the dense part as a `torch.export` program, for any batch size or for one; see `hotrow.export`."""
        return export(self._now.model, self._inputs, self.objective, Path(path), batch_size=batch_size)

    def close(self) -> None:
        """Ends following. Requests under way are answered."""
        self._ended.set()
        if self._following is not None:
            self._following.join()
            self._following = None

    def __enter__(self) -> Predictor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _now(self) -> Version:
        assert self._version is not None
        return self._version

    def _looked_up(self, batch: Batch) -> tuple[Version, Lookup]:
        """The batch's rows and the version they are of."""
        with self._gate:
            version = self._now
            return version, version.embeddings.fetch(version.embeddings.group(batch), once=True)

    def _follow(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            try:
                self.refresh()
                self.trouble = ""
            except HotrowError as error:
                self.trouble = str(error)

    def _newest(self) -> Path:
        newest = self._fixed or Checkpoints(self._folder.checkpoints).chosen()
        if newest is None:
            raise CheckpointError(f"{self._folder.path} has no complete checkpoint yet.")
        return newest

    def _take(self, folder: Path) -> bool:
        """Makes a checkpoint the one that answers; False if it is that already."""
        before = self._version
        rows = read_manifest(folder / "rows")
        if before is not None and before.snapshot == rows["id"]:
            return False
        checkpoint = Checkpoint(folder)
        check_tables(checkpoint.rows, rows, self._tables, self.run.train.seed)
        model = self._model(checkpoint)
        folders = chain(checkpoint.rows)
        since = None if before is None else after(folders, before.snapshot)
        if before is not None and since is None:
            self._refuse_another_run()
        changes = Changes(folders if since is None else since)
        embeddings = self._empty() if before is None or since is None else before.embeddings
        outputs = self.objective.outputs
        dense = DenseForward(model, _CPU, precision=self.run.train.precision, outputs=outputs)
        version = Version(folder, checkpoint.step, rows["id"], embeddings, model, dense)
        if before is None or embeddings is not before.embeddings:
            changes.apply(embeddings.router)
            embeddings.steps = rows["steps"]
            with self._gate.closed():
                self._version = version
            return True
        with self._gate.closed():
            self._version = replace(before, snapshot="")  # neither the one nor the other, if this ends half-way
            changes.apply(embeddings.router)
            embeddings.steps = rows["steps"]
            self._version = version
        return True

    def _refuse_another_run(self) -> None:
        """A run folder may be used again: what stands alone may be of a run that sees features differently."""
        now = self._run_of_folder()
        same = now.model == self.run.model and now.features == self.run.features
        if not same or now.data.steps != self.run.data.steps or self._folder.schema(now) != self.schema:
            raise self._another_run()
        served = [read_only(table) for table in now.tables_of(table.name for table in self._tables)]
        if served != [read_only(table) for table in self._tables]:  # rates may change when a run is resumed
            raise self._another_run()

    def _another_run(self) -> CheckpointError:
        return CheckpointError(
            f"{self._folder.path} holds another run than when it was opened: its model, tables, features or steps "
            f"have changed. Open it again."
        )

    def _run_of_folder(self) -> Run:
        run = self._folder.run()
        return (run.trusted() if self._trust else run).with_classes(**self._classes)

    def _model(self, checkpoint: Checkpoint) -> nn.Module:
        if self._version is not None:
            model = copy.deepcopy(self._version.model)
        else:
            with torch.random.fork_rng([]):  # its first weights are drawn, and replaced
                model = build(self.run.model, self._inputs).eval()
        arrays = checkpoint.arrays()
        try:
            model.load_state_dict({n.removeprefix("model/"): a for n, a in arrays.items() if n.startswith("model/")})
        except RuntimeError as error:
            raise CheckpointError(f"{checkpoint.folder} does not fit the model: {error}") from None
        return model

    def _empty(self) -> Embeddings:
        tables: Sequence[Table] = [read_only(table) for table in self._tables]
        embeddings = Embeddings(tables, self._features, seed=self.run.train.seed)
        return embeddings.eval()
