"""Several ranks with a plan: it changes where rows are and how they travel, never what is learned."""

import numpy as np
import pytest

from hotrow.errors import SettingsError
from hotrow.plan import Plan, Share
from hotrow.train.checkpoint import Checkpoint, Checkpoints
from hotrow.train.evaluate import Ranker
from hotrow.train.logs import RunFolder
from hotrow.train.trainer import train
from ranks import Ranks

LINK = {"bandwidth": 1e8, "latency": 0.0}
FACTS = {
    "topology": {"nodes": 2, "ranks": 2, "memory": 1 << 30, "between": LINK, "within": {"bandwidth": 1e12}},
    "memory": {"extra": 2000},
    "dedup": "rank",
    "wire": "float32",
}
SMALL = {"model": {"name": "wide_deep", "deep": [8], "dropout": 0.0}, "train__epochs": 2, "data__batch_size": 32}


@pytest.fixture(scope="module")
def pool():
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture
def trained(pool):
    """Trains a run on two nodes of two ranks; what it came to."""

    def go(run, resume=False):
        return pool.run(4, "train_work:train_run", run.to_toml(), resume, node_size=2, timeout=120)[0]

    return go


def saved(path, facts=FACTS, **shares):
    plan = Plan({"user": (Share("world"),), "item": (Share("world"),)} | shares, facts=facts)
    plan.save(path)
    return str(path)


def end_of(run):
    """Dense weights and rows of a run's last checkpoint, in one process; not the plan it ended with."""
    checkpoint = Checkpoint(Checkpoints(run.output.folder / "checkpoints").latest())
    ranker = Ranker(run)
    ranker.restore(checkpoint, checkpoint.arrays())
    found = {name: a.numpy() for name, a in checkpoint.arrays().items() if name.startswith("model/")}
    for table, store in ranker.embeddings.router.tiers["host"].stores().items():
        chunks = list(store.export())
        columns = {c: np.concatenate([chunk[c] for chunk in chunks]) for c in chunks[0]}
        order = columns["keys"].argsort()
        found |= {f"{table}/{c}": column.reshape(len(order), -1)[order] for c, column in columns.items()}
    return found


def assert_same(one, two):
    a, b = end_of(one), end_of(two)
    assert a.keys() == b.keys()
    for name in a:
        assert np.array_equal(a[name], b[name]), name


def assert_close(one, two):
    """Rows on a device are updated by other code: they differ in the last bits."""
    a, b = end_of(one), end_of(two)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(b[name], a[name], rtol=1e-3, atol=1e-4, err_msg=name)


def plans(run):
    return [line for line in RunFolder(run.output.folder).lines() if line["kind"] == "plan"]


def test_a_plan_made_anew_from_live_counts_loses_no_update(make_run, moving, tmp_path, trained):
    settings = {**SMALL, "data__path": str(moving), "data__shuffle": False}
    plain = make_run(**settings, output__folder=str(tmp_path / "plain"))
    planned = make_run(
        **settings,
        output__folder=str(tmp_path / "planned"),
        plan={"path": saved(tmp_path / "p"), "replan_every": 3},
    )
    expected, result = trained(plain), trained(planned)
    assert result == {**expected, "checkpoint": result["checkpoint"]}
    assert_same(plain, planned)
    made = plans(planned)
    assert len(made) == result["steps"] // 3
    assert any(line["rows"]["node"] + line["rows"]["replicated"] for line in made), "rows are copied"
    assert sum(line["moved"] > 0 for line in made) >= 2, "and move, for the log does"


def test_rows_of_a_plan_on_the_device_train_as_those_in_host_memory(make_run, moving, tmp_path, trained):
    settings = {**SMALL, "data__path": str(moving), "data__shuffle": False}
    plan = {"path": saved(tmp_path / "p"), "replan_every": 3}
    runs = [
        make_run(**settings, output__folder=str(tmp_path / f"{on}"), plan={**plan, "device_rows": on})
        for on in (False, True)
    ]
    here, there = (trained(run) for run in runs)
    assert here["steps"] == there["steps"]
    assert there["metrics"] == pytest.approx(here["metrics"], rel=1e-3)
    assert any(line["rows"]["node"] + line["rows"]["replicated"] for line in plans(runs[1])), "rows are copied"
    assert_close(*runs)


@pytest.mark.parametrize("device_rows", [False, True])
def test_a_resumed_run_goes_on_with_the_plan_in_force(make_run, tmp_path, trained, device_rows):
    plan = {"path": saved(tmp_path / "p"), "replan_every": 5, "device_rows": device_rows}
    whole = make_run(**SMALL, output__folder=str(tmp_path / "whole"), plan=plan)
    trained(whole)
    first = make_run(**SMALL, output__folder=str(tmp_path / "run"), plan=plan, train__steps=17)
    assert trained(first)["steps"] == 17
    arrays = Checkpoint(Checkpoints(first.output.folder / "checkpoints").latest()).arrays()
    assert any(name.startswith("feed/plan/") and len(keys) for name, keys in arrays.items())
    again = make_run(**SMALL, output__folder=str(tmp_path / "run"), plan=plan)
    assert trained(again, resume=True)["stopped"] == "end"
    # Uses are counted anew after a resume, so a later plan may have other rows on the device.
    (assert_close if device_rows else assert_same)(whole, again)


def test_a_run_travels_as_its_plan_says(make_run, tmp_path, trained):
    run = make_run(**{**SMALL, "train__epochs": 1}, plan={"path": saved(tmp_path / "p", {**FACTS, "wire": "bfloat16"})})
    plain = make_run(**{**SMALL, "train__epochs": 1}, output__folder=str(tmp_path / "plain"))
    a, b = trained(run), trained(plain)
    assert a["steps"] == b["steps"] and a["metrics"] != b["metrics"], "rows were rounded on the way"
    assert a["metrics"]["auc"] == pytest.approx(b["metrics"]["auc"], abs=0.05)
    kept = Plan.load(RunFolder(run.output.folder).plan)
    assert kept.facts["wire"] == "bfloat16" and kept.facts["dedup"] == "rank"


@pytest.mark.parametrize(
    ("facts", "plan", "said"),
    [
        ({}, {"replan_every": 5}, "does not say its topology and memory and dedup and wire"),
        ({**FACTS, "topology": {**FACTS["topology"], "nodes": 3}}, {"replan_every": 5}, "made for 3 nodes of 2 ranks"),
        (FACTS, {"mode": "hot_cold"}, "is for one process with a device"),
        ({**FACTS, "dedup": "nodes"}, {}, 'no dedup "nodes". Did you mean "node"'),
        ({**FACTS, "wire": "float"}, {}, 'no wire format "float"'),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(make_run, tmp_path, pool, facts, plan, said):
    run = make_run(**SMALL, plan={"path": saved(tmp_path / "p", facts), **plan})
    for kind, sentence, _ in pool.answers(4, "train_work:train_run", run.to_toml(), node_size=2):
        assert kind == "SettingsError" and said in sentence


def test_a_plan_for_ranks_is_refused_by_one_process(make_run, tmp_path):
    named = saved(tmp_path / "p", item=(Share("replicated", np.array([7**20])), Share("world")))
    with pytest.raises(SettingsError, match="is for ranks .*torchrun"):
        train(make_run(**SMALL, plan={"path": named}))
