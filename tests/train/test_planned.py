"""A run with a plan: the weights of one without, whatever moves; what it predicts happens; resumable anywhere."""

import re
import signal

import numpy as np
import pytest
from test_kill import KILLED, start
from test_trainer import lines

from hotrow.data import DataSet
from hotrow.errors import DataError, SettingsError
from hotrow.plan import Plan, Share
from hotrow.plan.budget import count_keys, plan_data_set
from hotrow.plan.predict import _Tally as Tally
from hotrow.run import load_run
from hotrow.sizes import parse_size
from hotrow.table import Table
from hotrow.train.compatibility import problems
from hotrow.train.progress import Progress
from hotrow.train.trainer import train

OPTIMIZERS = {
    "sgd": {"name": "sgd", "lr": 0.5, "weight_decay": 0.01},
    "adagrad": {"name": "adagrad", "lr": 0.05, "initial": 0.1, "clip_value": 0.3},
    "rowwise_adagrad": {"name": "rowwise_adagrad", "lr": 0.05, "clip_norm": 0.5},
    "adam": {"name": "adam", "lr": 0.02, "schedule": {"name": "linear", "steps": 40, "final": 0.1}},
}
SMALL = {"data__batch_size": 125, "train__epochs": 2}
"""16 steps an epoch."""
SESSIONS = {
    "model": {"name": "din"},
    "data__batch_size": 64,
    "train__epochs": 2,
    "tables": {"dim": 4, "optimizer": {"name": "adagrad", "lr": 0.05}},
}


@pytest.fixture
def both(make_run, tmp_path):
    """A run without a plan and the same run with one, both trained; the result of the second."""

    def make(plan, **settings):
        without, planned = (
            make_run(**settings, output__folder=str(tmp_path / "without")),
            make_run(**settings, plan=plan),
        )
        train(without)
        return without, planned, train(planned)

    return make


@pytest.mark.parametrize("replan_every", [None, 5, "epoch"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_split_run_ends_with_the_weights_of_a_run_without_a_plan(both, close_weights, optimizer, replan_every):
    plan = {"memory": "6KiB"} | ({} if replan_every is None else {"replan_every": replan_every})
    without, planned, result = both(plan, tables={"dim": 4, "optimizer": OPTIMIZERS[optimizer]}, **SMALL)
    close_weights(without, planned)
    changes = [line["step"] for line in lines(planned, "plan")]
    assert changes == {None: [], 5: [5, 10, 15, 20, 25, 30], "epoch": [16, 32]}[replan_every]
    assert 0.2 < result.plan["measured"] < 0.9, "one of the tiers was hardly used"


@pytest.mark.parametrize("replan_every", [None, 4])
def test_sequences_lists_and_deduplicated_groups_are_split_too(both, close_weights, sessions, replan_every):
    assert any(group.slides for group in DataSet.open(sessions).schema.groups)
    plan = {"memory": "8KiB"} | ({} if replan_every is None else {"replan_every": replan_every})
    without, planned, result = both(plan, data__path=str(sessions), **SESSIONS)
    close_weights(without, planned)
    assert 0.2 < result.plan["measured"] < 0.9


@pytest.mark.parametrize("memory", ["4KiB", "6KiB", "1MiB"])
def test_the_device_never_takes_more_than_the_budget(make_run, memory):
    run = make_run(plan={"memory": memory, "replan_every": 3}, train__steps=20, train__log_every=1)
    result = train(run)
    taken = [line["device_bytes"] for line in lines(run) if "device_bytes" in line]
    assert len(taken) == 26
    assert 0 < max(taken) == result.plan["device_bytes"] <= run.plan.bytes


@pytest.mark.parametrize("log", ["data", "sessions"])
def test_the_share_a_plan_predicts_is_what_training_measures(make_run, sessions, log):
    settings = {"data__path": str(sessions), **SESSIONS} if log == "sessions" else SMALL
    result = train(make_run(plan={"memory": "6KiB"}, **settings))
    assert result.plan["predicted"]["low"] == result.plan["predicted"]["high"], "the whole data set was counted"
    assert result.plan["measured"] == pytest.approx(result.plan["predicted"]["value"], abs=1e-12)
    assert result.plan["within"] is True
    assert "within its interval" in result.plan["said"]


def saved_plan(data, path, *, share=None, facts=None):
    """A plan of a log like `data` for the tables of `make_run`, whose model adds a value to each row; other `facts`."""
    dataset = DataSet.open(data)
    tables = [Table(name=name, dim=5, optimizer={"name": "adam", "lr": 0.05}) for name in ("user", "item")]
    plan, _ = plan_data_set(dataset, tables, 6 << 10, count_keys(dataset, share=share))
    Plan(plan.shares, plan.row_bytes, {**plan.facts, **(facts or {})}).save(path, overwrite=True)
    return plan


def test_what_a_sample_predicts_is_within_its_interval(make_run, data, tmp_path):
    plan = saved_plan(data, tmp_path / "sampled.plan", share=0.5)
    share = plan.facts["share"]
    assert share["low"] < share["value"] < share["high"]
    result = train(make_run(plan={"path": str(tmp_path / "sampled.plan")}, **SMALL))
    assert result.plan["within"] is True
    assert share["low"] <= result.plan["measured"] <= share["high"]
    assert result.plan["measured"] != share["value"]


def test_a_prediction_that_was_not_borne_out_is_said_to_be_outside(make_run, data, tmp_path):
    wrong = {"value": 0.99, "low": 0.98, "high": 1.0, "level": 0.99}
    saved_plan(data, tmp_path / "wrong.plan", facts={"share": wrong})
    result = train(make_run(plan={"path": str(tmp_path / "wrong.plan")}, **SMALL))
    assert result.plan["within"] is False
    assert "outside its interval" in result.plan["said"]


def test_nothing_is_judged_before_a_whole_epoch_was_trained_on(make_run):
    result = train(make_run(plan={"memory": "6KiB"}, train__steps=20))
    assert result.plan["within"] is None
    assert "of a whole epoch; this run trained less" in result.plan["said"]


def test_a_plan_made_on_the_way_follows_accesses_that_move(make_run, moving, tmp_path):
    settings = {"data__path": str(moving), "data__shuffle": False, "data__batch_size": 100, "train__log_every": 5}
    stays = make_run(plan={"memory": "5KiB"}, **settings, output__folder=str(tmp_path / "stays"))
    follows = make_run(plan={"memory": "5KiB", "replan_every": 2}, **settings)
    train(stays)
    result = train(follows)
    static, live = ([line["hit_share"] for line in lines(run, "train")] for run in (stays, follows))
    assert live[-1] > static[-1] + 0.02, "the plan of the whole log should be worse at its end"
    changes = lines(follows, "plan")
    assert [line["step"] for line in changes] == list(range(2, 21, 2))
    assert changes[5]["hit_share_before"] < changes[8]["hit_share_before"], "the first plan after the move was stale"
    assert "the last plan, of step 20" in result.plan["said"]


@pytest.mark.parametrize("stop", [4, 5, 6, 17, 31])
@pytest.mark.parametrize("replan_every", [5, "epoch"])
def test_a_run_that_replans_is_resumed_to_the_same_bits(resumes_alike, replan_every, stop):
    settings = {"plan": {"memory": "6KiB", "replan_every": replan_every}, "train__log_every": 3, **SMALL}
    resumes_alike(settings, stop, ("train", "evaluate", "plan"))


@pytest.mark.parametrize(
    "plan",
    [{"memory": "6KiB", "replan_every": 3}, {"memory": "12KiB", "mode": "hot_cold"}],
    ids=["replans", "hot_cold"],
)
def test_a_planned_run_killed_and_resumed_ends_as_one_never_killed(make_run, tmp_path, same_weights, plan):
    settings = {"train__epochs": 2, "train__incremental": 1, "plan": plan}
    whole = make_run(**settings, output__folder=str(tmp_path / "whole"))
    train(whole)
    run = make_run(**settings, train__checkpoint_every=2)
    run_file = tmp_path / "run.toml"
    run_file.write_text(run.to_toml())
    killed = start(["-c", KILLED, run_file, run.output.folder, 57])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert train(run, resume=True).stopped == "end"
    same_weights(whole, run)


def test_the_plan_a_run_made_is_kept_and_gives_the_same_bits_again(make_run, tmp_path, same_weights):
    one = make_run(plan={"memory": "6KiB"}, **SMALL)
    train(one)
    kept = tmp_path / "kept.plan"
    (one.output.folder / "start.plan").rename(kept)
    two = make_run(plan={"path": str(kept)}, **SMALL, output__folder=str(tmp_path / "two"))
    train(two)
    same_weights(one, two)
    assert not (two.output.folder / "start.plan").exists(), "a plan that was given is not copied"


def test_a_key_that_no_profile_saw_is_trained_on_the_host(make_run, data, write_log, close_weights, tmp_path):
    saved_plan(write_log(tmp_path / "other", seed=9), tmp_path / "other.plan", facts={"fingerprint": None})
    run = make_run(plan={"path": str(tmp_path / "other.plan")}, **SMALL)
    without = make_run(**SMALL, output__folder=str(tmp_path / "without"))
    train(without)
    result = train(run)
    close_weights(without, run)
    assert 0 < result.plan["measured"] < 1


def refused(run, error=SettingsError):
    """What a run says that is refused; it must have written nothing."""
    with pytest.raises(error) as caught:
        train(run)
    assert not run.output.folder.exists()
    return str(caught.value)


@pytest.fixture
def plan_file(tmp_path):
    return tmp_path / "some.plan"


def test_a_plan_of_another_data_set_is_refused(make_run, write_log, tmp_path, plan_file):
    saved_plan(write_log(tmp_path / "other", seed=9), plan_file)
    said = refused(make_run(plan={"path": str(plan_file)}))
    assert f"plan.path: {plan_file} was made from another data set, {tmp_path / 'other'}, than the split" in said
    assert "hotrow plan" in said


def test_a_plan_of_keys_before_preprocessing_is_refused(make_run, data, plan_file):
    saved_plan(data, plan_file)
    steps = [{"name": "hash", "columns": ["item"], "buckets": 50}]
    assert "names keys as other data.steps leave them" in refused(
        make_run(plan={"path": str(plan_file)}, data__steps=steps)
    )


def test_steps_are_planned_for_as_they_leave_keys(make_run, both, close_weights):
    steps = [{"name": "hash", "columns": ["item", "history"], "buckets": 50}]
    without, planned, result = both({"memory": "3KiB"}, data__steps=steps, **SMALL)
    close_weights(without, planned)
    assert result.plan["within"] is True


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ({"user": (Share("host"),)}, 'it says nothing of "item"'),
        ({"user": (Share("host"),), "item": (Share("host"),), "itme": (Share("host"),)}, 'it has "itme".*mean "item"'),
        ({"user": (Share("host"),), "item": (Share("host"),)}, "puts no row on the device"),
        (
            {"user": (Share("host"),), "item": (Share("device", np.array([1])), Share("served"))},
            "on device, served; a run",
        ),
        ({"user": (Share("device"),), "item": (Share("host"),)}, "puts table user on device; a run"),
    ],
    ids=["table missing", "table unknown", "no row", "other tiers", "a whole table"],
)
def test_a_plan_for_other_tables_or_tiers_is_refused(make_run, plan_file, shares, said):
    Plan(shares).save(plan_file)
    found = refused(make_run(plan={"path": str(plan_file)}))
    assert found.startswith(f"plan.path: {plan_file}")
    assert re.search(said, found)


def test_a_plan_for_smaller_rows_is_refused(make_run, data, plan_file):
    saved_plan(data, plan_file)
    assert "a row takes" in refused(make_run(plan={"path": str(plan_file)}, tables__dim=8))


def test_a_file_that_is_no_plan_or_not_there_is_refused(make_run, plan_file):
    assert "There is no plan" in refused(make_run(plan={"path": str(plan_file)}), DataError)
    plan_file.write_text("plan")
    assert "cannot be read" in refused(make_run(plan={"path": str(plan_file)}), DataError)


def test_a_budget_that_holds_no_row_is_refused(make_run):
    assert "plan.memory: A budget of 10 bytes holds no row" in refused(make_run(plan={"memory": "10"}))


def test_an_optimizer_the_device_does_not_know_is_refused(make_run):
    said = refused(make_run(plan={"memory": "6KiB"}, tables={"dim": 4, "optimizer": {"name": "momentum", "lr": 0.1}}))
    assert "user, item (it has momentum" in said and "Take the plan away" in said


def test_replanning_needs_a_budget(make_run, plan_file):
    Plan({"user": (Share("device", np.arange(3)), Share("host")), "item": (Share("host"),)}).save(plan_file)
    said = refused(make_run(plan={"path": str(plan_file), "replan_every": 5}))
    assert f"plan.replan_every: {plan_file} was not made for a budget" in said


def test_a_run_is_not_resumed_with_another_plan(make_run):
    train(make_run(plan={"memory": "6KiB"}, train__steps=2))
    with pytest.raises(SettingsError, match=r"plan\.memory was '6KiB' and is now '8KiB'"):
        train(make_run(plan={"memory": "8KiB"}, train__steps=2), resume=True)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("", "give either the path of a saved plan or the memory"),
        ('memory = "1MiB"\npath = "a.plan"', "give either the path of a saved plan or the memory"),
        ('memory = "much"', "plan.memory: .*much"),
        ('memory = "1MiB"\nreplan_every = 0', "replan_every"),
        ('memory = "1MiB"\nreplan_every = "day"', "replan_every"),
        ('memory = "1MiB"\nmode = "hot_cold"\nreplan_every = 5', 'replan_every works with mode = "split" only'),
        ('memory = "1MiB"\nmode = "hot"', "plan.mode"),
        ('memory = "1MiB"\ndevice_rows = true', "device_rows is for a saved plan of several ranks"),
    ],
)
def test_a_plan_section_that_makes_no_sense_is_refused_with_its_place(tmp_path, plan, said):
    path = tmp_path / "run.toml"
    path.write_text(f'[plan]\n{plan}\n[data]\npath = "x"\n[model]\nname = "dlrm"\n')
    with pytest.raises(SettingsError, match=said) as caught:
        load_run(path)
    assert str(path) in str(caught.value)


def test_the_path_of_a_plan_is_taken_from_the_folder_of_the_run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[data]\npath = "x"\n[model]\nname = "dlrm"\n[plan]\npath = "some.plan"\n')
    assert load_run(path).plan.path == tmp_path / "some.plan"
    path.write_text('[data]\npath = "x"\n[model]\nname = "dlrm"\n[plan]\nmemory = 65536\n')
    assert load_run(path).plan.bytes == 65536


def test_a_dim_that_kernels_do_not_take_is_refused_on_a_gpu_before_anything_starts(make_run, data):
    schema = DataSet.open(data).schema
    (problem,) = problems(make_run(tables={"dim": 2048}, train__device="cuda"), schema)
    assert "dims up to 1024" in str(problem) and "user has dim 2049" in str(problem)
    assert problems(make_run(tables={"dim": 2048}), schema) == []


@pytest.mark.parametrize("source", ["memory", "path"])
def test_a_table_whose_rows_come_and_go_stays_on_the_host_and_the_run_says_so(make_run, data, tmp_path, source):
    tables = {"dim": 4, "optimizer": {"name": "adam", "lr": 0.05}, "user": {"eviction": {"capacity": 20}}}
    saved_plan(data, tmp_path / "saved.plan")
    plan = {"memory": "6KiB"} if source == "memory" else {"path": str(tmp_path / "saved.plan")}
    said = Said()
    train(make_run(plan=plan, tables=tables, train__steps=4), progress=said)
    assert any(line.startswith("In host memory") and "user (it forgets rows" in line for line in said.lines)


class Said(Progress):
    def __init__(self):
        self.lines = []

    def say(self, sentence):
        self.lines.append(sentence)


def test_a_run_plans_from_the_profile_of_its_data_set_and_reads_no_sample_first(sessions, make_run, monkeypatch):
    dataset, memory = DataSet.open(sessions), parse_size("8KiB")
    run = make_run(data__path=str(sessions), plan={"memory": "8KiB"}, train__steps=1, **SESSIONS)
    tables = run.tables_of(feature.table for feature in dataset.schema.feature_settings())
    expected, told = plan_data_set(dataset, tables, memory, count_keys(dataset))
    assert "samples" in told

    def read(*_):
        raise AssertionError("the log is read before the first step")

    monkeypatch.setattr(Tally, "see", read)
    watched = Watched()
    train(run, progress=watched)
    made = Plan.load(run.output.folder / "start.plan")
    assert {t: s.tolist() for t, s in made.keys_on("device").items()} == {
        t: s.tolist() for t, s in expected.keys_on("device").items()
    }
    assert any("from the data set's profile" in text for text in watched.said)


class Watched(Progress):
    """Keeps what a run says."""

    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)
