"""What cannot be is said from run file and command line alone, before a folder is made or a process started."""

import json
import re

import pytest
from typer.testing import CliRunner

from hotrow.cli import app
from hotrow.cluster.local import LocalCluster
from hotrow.cluster.ray_cluster import RayCluster
from hotrow.data import DataSet, DataSetWriter
from hotrow.errors import SettingsError
from hotrow.train.compatibility import problems
from hotrow.train.trainer import train
from train.conftest import SCHEMA, samples
from train.test_follow import put

SHARDS = {"shards": ["tcp://127.0.0.1:7700"]}
PLAN = {"path": "some.plan"}
HYBRID, BOUNDED, EXACT = {"name": "hybrid"}, {"name": "bounded"}, {"name": "exact"}
CUDA = {"train__device": "cuda"}
STEP = {"name": "neighbours", "graph": "some.graph"}
TOPOLOGY = {"nodes": 2, "ranks": 2, "memory": 1 << 30, "between": {"bandwidth": 1.0}, "within": {"bandwidth": 1.0}}
RANKED = {"topology": TOPOLOGY, "memory": {"extra": 1}, "dedup": "rank", "wire": "float32"}

CANNOT = {
    "shards that run and others": (SHARDS, {"shards": 2}, "cluster.shards: .*would start others"),
    "rows here and shards": ({"rows": "host"}, {"shards": 2}, r"cluster.rows: .host. leaves no rows .* --shards 2"),
    "rows of ranks and shards": (
        {"rows": "sharded"},
        {"shards": 1, "ranks": 2},
        "cluster.rows: .sharded. leaves no rows",
    ),
    "rows of each rank": ({"rows": "host"}, {"ranks": 3}, "cluster.rows: .*there are 3 ranks, each of which"),
    "served by nobody": ({"rows": "served"}, {}, "cluster.rows: .*there are no shards"),
    "a key for nobody": ({"key": "nowhere.key"}, {}, "cluster.key: .*cluster.shards names none"),
    "a key for shards that are started": ({"key": "a.key"}, {"shards": 1}, "cluster.key: .*`hotrow up` makes the keys"),
    "a plan and shards": ({"plan": PLAN, **SHARDS}, {}, "plan: rows on shards and on a device"),
    "a plan and shards of ranks": ({"plan": PLAN, **SHARDS}, {"ranks": 2}, "plan: rows on shards and on a device"),
    "a plan and started shards": ({"plan": PLAN}, {"shards": 1}, "plan: .*--shards 0"),
    "a plan and rows": ({"plan": PLAN, "rows": "host"}, {}, "cluster.rows: .plan. says where rows are"),
    "a plan and rows of ranks": ({"plan": PLAN, "rows": "replicated"}, {"ranks": 2}, "cluster.rows: .plan. says where"),
    "a plan and a cache": ({"plan": PLAN, "cache": {}}, {}, "cluster.cache: rows that .plan. places"),
    "a plan and a cache of ranks": (
        {"plan": PLAN, "cache": {}},
        {"ranks": 2},
        "cluster.cache: rows that .plan. places",
    ),
    "a plan of one process": (
        {"plan": {"memory": "1MiB"}},
        {"ranks": 2},
        "plan.memory: .* hotrow plan DATA --topology",
    ),
    "hot_cold of ranks": ({"plan": {**PLAN, "mode": "hot_cold"}}, {"ranks": 2}, "plan.mode: .*for one process"),
    "hot_cold without a test": (
        {"plan": {**PLAN, "mode": "hot_cold"}, "data__test": "", "data__validation": ""},
        {},
        "plan.mode: hot_cold is steered by .* set data.validation or data.test",
    ),
    "hot_cold and chance": (
        {"plan": {**PLAN, "mode": "hot_cold"}, "data__steps": [STEP]},
        {},
        "plan.mode: neighbours draws anew",
    ),
    "nothing to judge": ({"plan": {**PLAN, "judge": 5}}, {}, "plan.judge: .*hot_cold"),
    "devices of ranks": ({"plan": {**PLAN, "device_rows": True}}, {}, "plan.device_rows: .*for several ranks"),
    "a plan for ranks": ({"plan": PLAN}, {"plan": RANKED}, "plan.path: .* is for ranks .*torchrun"),
    "a plan without a budget": (
        {"plan": {**PLAN, "replan_every": 5}},
        {"plan": {}},
        "plan.replan_every: .*not made for a",
    ),
    "a plan without facts": (
        {"plan": {**PLAN, "replan_every": 5}},
        {"plan": {}, "ranks": 4},
        "plan.replan_every: .*does not say its topology",
    ),
    "a plan for other ranks": (
        {"plan": {**PLAN, "replan_every": 5}},
        {"plan": RANKED, "ranks": 8},
        "made for 2 nodes of 2 ranks, .* 8 ranks",
    ),
    "a plan for other nodes": (
        {"plan": {**PLAN, "replan_every": 5}},
        {"plan": RANKED, "ranks": 4, "nodes": 1},
        "but there are 1 of 4",
    ),
    "a plan that travels": (
        {"plan": PLAN, "wire": "float16"},
        {"plan": RANKED, "ranks": 4},
        "cluster.wire: .*made for float32.*--wire float16",
    ),
    "a cache of ranks": ({"cache": {}}, {"ranks": 2}, "cluster.cache: it needs shards behind it"),
    "a cache that is not exact": ({"cache": {}, **SHARDS, "policy": EXACT}, {}, "policy: exact reads rows again"),
    "a cache staler than hybrid": (
        {"cache": {}, **SHARDS, "policy": HYBRID},
        {"ranks": 2},
        "policy: hybrid bounds by policy.staleness",
    ),
    "a cache on the wire": ({"cache": {}, **SHARDS, "wire": "float16"}, {}, "cluster.wire: rows of a cache travel as"),
    "two clocks": (
        {"cache": {"clock": 100}, "policy": {**BOUNDED, "clock": 7}},
        {},
        "cluster.cache.clock: policy.clock",
    ),
    "two depths": (
        {"cache": {"ahead": 3}, "policy": BOUNDED},
        {},
        "cluster.cache.ahead: policy.ahead says it.* 2. Take",
    ),
    "a clock of fresh rows": ({"cache": {"clock": 50}, **SHARDS}, {"ranks": 2}, "cluster.cache.clock: .*so it is 0"),
    "no clock of fresh rows": (
        {"cache": {"clock": "unbounded"}},
        {"ranks": 2, "shards": 1},
        "cluster.cache.clock: .*so it is 0",
    ),
    "ahead of fresh rows": ({"cache": {"ahead": 2}, **SHARDS}, {"ranks": 2}, "cluster.cache.ahead: .*so it is 0"),
    "popular of nobody": ({"cache": {"popular": 3}}, {}, "cluster.cache.popular: .*pinned"),
    "drift alone": ({"cache": {"drift": 0.5}}, {}, "cluster.cache.drift: one worker"),
    "drift of fresh rows": (
        {"cache": {"drift": 0.5}, **SHARDS},
        {"ranks": 2},
        "cluster.cache.drift: copies are always fresh",
    ),
    "drift without a bound": (
        {"cache": {"drift": 0.5}, **SHARDS, "policy": {**BOUNDED, "clock": "unbounded"}},
        {"ranks": 2},
        "cluster.cache.drift",
    ),
    "a sample of fresh rows": ({"cache": {"sample": 0}}, {}, "cluster.cache.sample: one worker"),
    "bounded without a cache": ({"policy": BOUNDED}, {}, r"policy: bounded .*Add \[cluster.cache\]"),
    "a ramp to nothing": (
        {"policy": {**HYBRID, "staleness": 0, "ramp": 2}},
        {},
        "policy.ramp: with policy.staleness = 0",
    ),
    "as late as nothing": ({"policy": {**HYBRID, "staleness": 0, "worst": True}}, {}, "policy.worst: with policy.stal"),
    "a wire of one": ({"wire": "bfloat16"}, {}, "cluster.wire: one process without shards sends nothing"),
    "a time of one": ({"timeout": 5.0}, {}, "cluster.timeout: one process without shards .*waits for nobody"),
    "nccl without devices": ({"exchange": "nccl"}, {"ranks": 2}, "cluster.exchange: .nccl. is for ranks with a device"),
    "nccl and threads": ({"exchange": "nccl", **CUDA, "policy": EXACT}, {"ranks": 2}, "cluster.exchange: .*sync. only"),
    "nccl of one": ({"exchange": "nccl", **CUDA}, {}, "cluster.exchange: .*that ranks send each other, and none do"),
    "nccl and shards": ({"exchange": "nccl", **CUDA, **SHARDS}, {"ranks": 2}, "cluster.exchange: .*and none do"),
    "a plan for what arrives": (
        {"plan": PLAN, "data__follow": {"path": "x"}},
        {},
        r"data.follow: .*Take \[plan\] away",
    ),
    "ranks that follow": ({"data__follow": {"path": "x"}}, {"ranks": 2}, "data.follow: one process can follow a log"),
    "a topic that is none": ({"data__follow": {"path": "kafka://broker"}}, {}, "kafka://HOST:PORT/TOPIC"),
    "a topic's format": (
        {"data__follow": {"path": "kafka://broker/clicks", "format": "criteo"}},
        {},
        "data.follow.format: .*Take it away",
    ),
    "epochs of what arrives": ({"data__follow": {"path": "x"}, "train__epochs": 2}, {}, "train.epochs: .*read once"),
    "an order of what arrives": (
        {"data__follow": {"path": "x"}, "data__shuffle": False},
        {},
        "data.shuffle: .*read once",
    ),
    "a split of what arrives": ({"data__follow": {"path": "x"}, "data__train": "all"}, {}, "data.train: .*read once"),
    "evaluated on nothing": (
        {"data__test": "", "data__validation": "", "train__evaluate_every": 5},
        {},
        "train.evaluate_every: there is no split .* set data.validation or data.test",
    ),
    "judged on the way by nothing": ({"data__validation": "train"}, {}, "data.validation: nothing is evaluated before"),
    "without what is not shared": (
        {"tables__item": {"without": ["eviction"]}},
        {},
        "tables.item.without: tables share no",
    ),
    "without its own": (
        {"tables__item": {"without": ["eviction"], "eviction": {"ttl": 3}}},
        {},
        "tables.item.without: the table has eviction of its own",
    ),
    "a seed for nothing": ({"data__shuffle": False, "data__seed": 3}, {}, "data.seed: .*nothing to seed"),
}


def as_changes(settings):
    """Settings of [cluster] by their name, the others as `make_run` takes them."""
    ours = {name: value for name, value in settings.items() if name in ("policy", "plan") or "__" in name}
    cluster = {name: value for name, value in settings.items() if name not in ours}
    return {**ours, **({"cluster": cluster} if cluster else {})}


@pytest.mark.parametrize("case", CANNOT)
def test_what_cannot_be_is_named_with_what_to_do(make_run, case):
    settings, how, said = CANNOT[case]
    found = problems(make_run(**as_changes(settings)), **how)
    assert any(re.search(said, str(problem)) for problem in found), found


CAN = {
    "nothing": ({}, {}),
    "ranks": ({"wire": "float16", "timeout": 5.0}, {"ranks": 2}),
    "shards": ({"wire": "float16", "timeout": 5.0, "key": "trainer.key", **SHARDS}, {}),
    "shards that are started": ({"rows": "served", "wire": "bfloat16"}, {"shards": 2, "ranks": 2}),
    "nccl": ({"exchange": "nccl", **CUDA}, {"ranks": 2}),
    "a cache": ({"cache": {"clock": 50, "ahead": 3, "policy": "pinned", "popular": 2}}, {}),
    "a cache under its policy": ({"cache": {"clock": 7}, "policy": {**BOUNDED, "clock": 7}}, {}),
    "a cache of ranks": ({"cache": {"drift": 0.5, "sample": 1}, **SHARDS, "policy": BOUNDED}, {"ranks": 2}),
    "an exact cache of ranks": ({"cache": {"clock": 0, "ahead": 0}, **SHARDS}, {"ranks": 2}),
    "hybrid and a cache": ({"cache": {}, "policy": HYBRID}, {}),
    "a plan": ({"plan": {"memory": "1MiB", "replan_every": 3}}, {}),
    "a plan for ranks": (
        {"plan": {**PLAN, "replan_every": 3, "device_rows": True}},
        {"plan": RANKED, "ranks": 4, "nodes": 2},
    ),
    "hot_cold": ({"plan": {**PLAN, "mode": "hot_cold", "judge": 7}}, {"plan": {}}),
    "validation alone": ({"data__test": "", "train__evaluate_every": 5}, {}),
    "a log that grows": ({"data__follow": {"path": "x"}}, {"shards": 1}),
    "a seed for steps": ({"data__shuffle": False, "data__seed": 3, "data__steps": [STEP]}, {}),
}


@pytest.mark.parametrize("case", CAN)
def test_what_can_be_is_not_refused(make_run, case):
    settings, how = CAN[case]
    assert problems(make_run(**as_changes(settings)), **how) == []


@pytest.mark.parametrize(
    ("settings", "how", "said"),
    [
        ({"plan": {"memory": "1MiB"}}, {"shards": 0, "trainers": 2}, "plan.memory"),
        ({"rows": "host"}, {"shards": 2, "trainers": 1}, "cluster.rows"),
        ({"data__follow": {"path": "x"}}, {"shards": 1, "trainers": 2}, "data.follow"),
    ],
)
@pytest.mark.parametrize("cluster", [LocalCluster, RayCluster])
def test_a_cluster_refuses_before_it_makes_a_folder_or_starts_anything(make_run, cluster, settings, how, said):
    run = make_run(**as_changes(settings))
    with pytest.raises(SettingsError, match=said):
        cluster(run, **how)
    assert not run.output.folder.exists()


def test_several_problems_are_said_at_once_and_no_folder_is_made(make_run):
    run = make_run(cluster={"wire": "float16", "key": "a.key", "rows": "served"}, policy=BOUNDED)
    with pytest.raises(SettingsError) as caught:
        train(run)
    named = [line.partition(":")[0] for line in str(caught.value).splitlines()]
    assert named == ["cluster.rows", "cluster.key", "policy", "cluster.wire"]
    assert not run.output.folder.exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tables__itme": {"dim": 8}}, 'no table "itme"'),
        ({"features": {"usr": {"pooling": "sum"}}}, 'no feature "usr"'),
        ({"model": {"name": "dlrm"}, "tables__item": {"dim": 8}}, "need one dim"),
        ({"model": {"name": "din"}}, "din found no history"),
        ({"data__steps": [{"name": "log", "columns": ["prize"]}]}, 'no dense column "prize"'),
        ({"cluster": {**SHARDS, "key": "nowhere.key"}}, "no key file nowhere.key"),
    ],
)
def test_what_the_data_set_and_the_key_file_say_is_known_before_a_shard_is_started(make_run, changes, said):
    run = make_run(**changes)
    with pytest.raises(SettingsError, match=said):
        LocalCluster(run, shards=0, trainers=1)
    assert not run.output.folder.exists()


def test_problems_of_the_data_set_are_found_without_reading_a_file(make_run, data):
    found = problems(make_run(tables__itme={"dim": 8}, data__path="nowhere"), DataSet.open(data).schema)
    assert [str(problem) for problem in found] == [
        'tables.itme: the data set has no table "itme". Did you mean "item"?'
    ]


def test_settings_as_they_were_saved_have_no_problem_that_the_run_had_not(make_run, tmp_path):
    run = make_run(train__steps=2, cluster={"cache": {}}, policy={**BOUNDED, "clock": 7, "ahead": 5})
    train(run)
    saved = tmp_path / "run" / "settings.toml"
    result = CliRunner().invoke(app, ["train", str(saved), "--resume", "--set", "train.steps=3", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["steps"] == 3


def test_a_followed_log_says_which_settings_it_does_without_and_goes_on_with_the_same_run_file(make_run, tmp_path):
    incoming, run_file = tmp_path / "incoming", tmp_path / "run.toml"
    incoming.mkdir()
    run_file.write_text(make_run(train__epochs=3, train__steps=4, data__shuffle=False).to_toml())
    assert CliRunner().invoke(app, ["train", str(run_file)]).exit_code == 0
    put(incoming, "a.parquet", samples(64, 3))
    follow = ["--follow", str(incoming), "--set", "data.follow.idle=0", "--set", "train.steps=9"]
    result = CliRunner().invoke(app, ["train", str(run_file), "--resume", "--json", *follow])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["steps"] == 5
    assert "read once, as it arrives, without train.epochs, data.shuffle." in result.stderr
    back = CliRunner().invoke(app, ["train", str(run_file), "--resume", "--json", "--set", "train.steps=7"])
    assert back.exit_code == 0, back.output
    assert json.loads(back.stdout)["steps"] == 7


def test_a_log_is_followed_without_the_split_that_was_trained_on(make_run, tmp_path):
    with DataSetWriter(tmp_path / "other", SCHEMA) as writer:
        writer.write("test", samples(100, 2))
    (tmp_path / "incoming").mkdir()
    put(tmp_path / "incoming", "a.parquet", samples(64, 3))
    run = make_run(data__path=str(tmp_path / "other"), data__follow={"path": str(tmp_path / "incoming"), "idle": 0})
    assert train(run).steps == 1
