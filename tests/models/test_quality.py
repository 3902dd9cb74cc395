"""Models train as well as the same model written plainly in PyTorch, within 0.003 of its AUC.

A twin gets the very batches of the run, in its order. From the same start it must come to the same AUC: that is what a
model computes. From the starts and in the form that are usual in PyTorch it must not come to more: that is what
Hotrow's own starts and scales are worth. Both train rows by Adagrad with 0.05 and all else by Adam. On a planted log
the best AUC there can be is known too; the Criteo sample is a real log with dense inputs well above 1.
"""

from pathlib import Path

import numpy as np
import plain_twins as plain
import pytest
import torch
from pairing import Pair, auc_of
from test_graph_model import with_negatives, write_pairs

from hotrow.data import DataSet, prepare
from hotrow.data.graph import Graph
from hotrow.data.synth import SynthSettings, write_log
from hotrow.run import Run
from hotrow.settings import parse
from hotrow.train.trainer import train

BAR = 0.003
TWINS: dict[str, type[plain.Twin]] = {
    "dlrm": plain.DLRM,
    "dcnv2": plain.DCNv2,
    "deepfm": plain.DeepFM,
    "wide_deep": plain.WideDeep,
    "din": plain.DIN,
    "transformer": plain.Transformer,
}
WIDE = ("deepfm", "wide_deep")


def planted_log(folder: Path, samples: int, trained_on: int) -> Path:
    """A log with known factors, prepared; what is behind `trained_on` samples is the test split."""
    settings = SynthSettings(
        samples=samples,
        users=100,
        items=60,
        contexts=2,
        slow=2,
        history_length=8,
        past=8,
        vocabulary=20,
        test=1 - trained_on / samples,
    )
    write_log(settings, folder / "log")
    prepare(folder / "log", folder / "data", split=f"samples:{trained_on}", validation=0, cluster=False, dedup=False)
    return folder / "data"


@pytest.fixture(scope="module")
def short_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_log(tmp_path_factory.mktemp("short"), 9_000, 6_000)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_log(tmp_path_factory.mktemp("planted"), 45_000, 30_000)


@pytest.fixture(scope="module")
def criteo(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Criteo sample, prepared; its last 16,000 lines are the test split."""
    folder = tmp_path_factory.mktemp("criteo") / "data"
    prepare(shared_data / "criteo.tsv.zst", folder, format="criteo", split="samples:64000", validation=0, bad="missing")
    return folder


def run_of(
    folder: Path,
    data: Path,
    model: str,
    *,
    epochs: int = 1,
    batch: int = 512,
    rate: float = 0.001,
    seed: int = 0,
    optimizer: str = "rowwise_adagrad",
    **more: object,
) -> Run:
    """A run whose dense part is trained at a `rate`."""
    run = {
        "data": {"path": str(data), "batch_size": batch, "seed": seed, **more},
        "tables": {"optimizer": {"name": optimizer, "lr": 0.05}},
        "model": {"name": model},
        "optimizer": {"lr": rate},
        "train": {"epochs": epochs, "threads": 1, "seed": seed},
        "output": {"folder": str(folder / f"{model}{seed}"), "tensorboard": False},
    }
    return parse(Run, run)


@pytest.mark.parametrize("model", TWINS)
def test_a_model_comes_to_what_its_plain_twin_comes_to_from_the_same_start(
    short_log: Path, tmp_path: Path, model: str
) -> None:
    """6,000 samples, two epochs, dense rate 0.002. Where linear weights share rows with vectors, rows are trained by
    Adagrad, for which it makes no difference; all other rows by row-wise Adagrad.
    """
    wide = model in WIDE
    run = run_of(tmp_path, short_log, model, epochs=2, rate=0.002, optimizer="adagrad" if wide else "rowwise_adagrad")
    pair = Pair(run)
    twin = TWINS[model](pair.shape, scaled=True) if wide else TWINS[model](pair.shape)  # type: ignore[call-arg]
    pair.start(twin)
    theirs, ours = pair.of_twin(twin, row_wise=not wide), pair.of_run()
    print(f"{model}: {ours:.5f}, twin {theirs:.5f}")
    assert abs(ours - theirs) <= BAR / 3
    assert ours > 0.62


def in_usual_form(pair: Pair, model: str, seed: int) -> float:
    """The AUC of a twin with the run's rows and MLP, but its linear weights as usual: apart, from 0 on, unscaled."""
    torch.manual_seed(seed)
    twin = TWINS[model](pair.shape)
    pair.start(twin, without=("weights.", "dense_"))
    return pair.of_twin(twin)


@pytest.mark.parametrize("model", WIDE)
def test_linear_weights_and_products_as_hotrow_scales_them_cost_no_auc_on_a_planted_log(
    planted: Path, tmp_path: Path, model: str
) -> None:
    """30,000 samples, two epochs, dense rate 0.002, means of three seeds."""
    ours, theirs = [], []
    for seed in range(3):
        pair = Pair(run_of(tmp_path, planted, model, epochs=2, rate=0.002, seed=seed))
        theirs.append(in_usual_form(pair, model, seed))
        ours.append(pair.of_run())
    best = DataSet.open(planted).facts["best_auc"]
    print(f"{model}: {np.mean(ours):.4f}, twin {np.mean(theirs):.4f}, best {best:.4f}")
    assert np.mean(ours) > np.mean(theirs) - BAR
    assert np.mean(ours) > best - 0.03


@pytest.mark.parametrize("model", ["deepfm", pytest.param("wide_deep", marks=pytest.mark.slow)])
def test_linear_weights_and_products_as_hotrow_scales_them_cost_no_auc_on_criteos_log(
    criteo: Path, tmp_path: Path, model: str
) -> None:
    """64,000 samples, one epoch, dense rate 0.001, one seed."""
    pair = Pair(run_of(tmp_path, criteo, model))
    theirs, ours = in_usual_form(pair, model, 0), pair.of_run()
    print(f"{model}: {ours:.4f}, twin {theirs:.4f}")
    assert ours > theirs - BAR
    assert ours > 0.7675


@pytest.mark.slow
@pytest.mark.parametrize("model", [name for name in TWINS if name not in WIDE])
def test_xavier_starts_cost_no_auc_against_pytorchs_own(planted: Path, tmp_path: Path, model: str) -> None:
    """30,000 samples, two epochs, dense rate 0.002, means of six seeds; rows start alike, layers as PyTorch's do."""
    ours, theirs = [], []
    for seed in range(6):
        pair = Pair(run_of(tmp_path, planted, model, epochs=2, rate=0.002, seed=seed))
        torch.manual_seed(seed)
        twin = TWINS[model](pair.shape)
        pair.start(twin, without=tuple(name for name, _ in twin.named_children() if name != "rows"))
        theirs.append(pair.of_twin(twin))
        ours.append(pair.of_run())
    print(f"{model}: {np.mean(ours):.4f}, twin {np.mean(theirs):.4f}", np.round(ours, 4), np.round(theirs, 4))
    assert np.mean(ours) > np.mean(theirs) - BAR


class Purchases:
    """Who bought what, of users and items of some kinds; the lists of a twin are drawn from the training part."""

    def __init__(self, folder: Path, users: int = 1500, items: int = 400, kinds: int = 20) -> None:
        random = self.random = np.random.default_rng(0)
        user = np.repeat(np.arange(users), 10)
        of_kind = random.integers(0, items // kinds, len(user)) * kinds + user % kinds
        item = np.where(random.random(len(user)) < 0.85, of_kind, random.integers(0, items, len(user)))
        known = np.unique(user * (1 << 32) + item)
        tested = np.arange(len(user)) % 10 >= 8
        self.splits = {
            split: with_negatives(random, user[of], item[of], item, known)
            for split, of in (("train", ~tested), ("test", tested))
        }
        write_pairs(folder / "data", self.splits)
        self.users, self.keys = users, users + items
        self.edges = np.unique(np.stack([user[~tested], item[~tested]]), axis=1)

    def samples(self, split: str, fan_out: int) -> plain.Samples:
        """The samples of a split, with neighbours drawn anew."""
        user, item, label = self.splits[split]
        lists = {"user_hop1": self.drawn(user, item, self.edges, fan_out) + 1 + self.users}
        lists["item_hop1"] = self.drawn(item, user, self.edges[::-1], fan_out) + 1
        keys = {"user": user[:, None] + 1, "item": item[:, None] + 1 + self.users, **lists}
        return plain.Samples(
            {name: torch.from_numpy(numbers) for name, numbers in keys.items()},
            torch.zeros(len(user), 0),
            torch.from_numpy(label.astype(np.float32)),
        )

    def drawn(self, node: np.ndarray, other: np.ndarray, edges: np.ndarray, fan_out: int) -> np.ndarray:
        """Neighbours of each node but the `other` end of its sample; each node has several."""
        ends = edges[:, np.argsort(edges[0], kind="stable")]
        begins = np.searchsorted(ends[0], node)
        degrees = np.searchsorted(ends[0], node, side="right") - begins
        assert degrees.min() > 1

        def draw() -> np.ndarray:
            return ends[1][begins[:, None] + (self.random.random((len(node), fan_out)) * degrees[:, None]).astype(int)]

        found = draw()
        while (own := found == other[:, None]).any():
            found = np.where(own, draw(), found)
        return found


def test_the_graph_model_trains_as_well_as_its_plain_twin_on_planted_purchases(tmp_path: Path) -> None:
    purchases, epochs = Purchases(tmp_path), 3
    Graph.of_data_set(DataSet.open(tmp_path / "data")).save(tmp_path / "pairs.graph")
    step = {"name": "neighbours", "graph": str(tmp_path / "pairs.graph"), "fan_outs": [5]}
    torch.manual_seed(0)
    twin = plain.GraphSAGE(plain.Shape(purchases.keys, ("user", "item", "user_hop1", "item_hop1"), 0, dim=16))
    twin.apply(plain.xavier)
    drawn = (part for _ in range(epochs) for part in purchases.samples("train", 5).batches(128, shuffle=True))
    plain.trained(twin, drawn, rate=0.05, dense_rate=0.001)
    tested = purchases.samples("test", 5)
    theirs = auc_of(plain.scores(twin, tested.batches(2048, shuffle=False)), tested.labels)
    run = run_of(tmp_path, tmp_path / "data", "graph", epochs=epochs, batch=128, steps=[step])
    ours = train(run).metrics["auc"]
    print(f"graph: {ours:.4f}, twin {theirs:.4f}")
    assert ours > theirs - BAR
    assert ours > 0.8
