"""Hot and cold batches: every sample once an epoch, one kind a batch, rows moved whole, turns steered by test loss."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_planned import OPTIMIZERS, SESSIONS, SMALL
from test_trainer import lines

from hotrow.data import DataSet, DataSetWriter
from hotrow.errors import SettingsError
from hotrow.plan import Plan, Share
from hotrow.train import hot_cold
from hotrow.train.feed import Feed
from hotrow.train.hot_cold import FALLS, LEAST, LOOKS, MOST, START, HotCold, Schedule, hot_samples
from hotrow.train.trainer import train
from session_logs import grouped, logs

PLAN = {"memory": "12KiB", "mode": "hot_cold"}
MEMORY = {"sgd": 161 * 36, "adagrad": 161 * 56, "rowwise_adagrad": 161 * 40, "adam": 161 * 76}
"""The same rows whatever state they have."""


class Trained:
    """The batches a run was trained on, in order, each with its kind and epoch and where its rows were."""

    def __init__(self) -> None:
        self.batches, self.kinds, self.epochs, self.hot, self.held = [], [], [], {}, []


@pytest.fixture
def watch(monkeypatch):
    """Keeps what every HotCold feed of the test trains on."""
    seen = Trained()
    update = HotCold.update

    def kept(self, batch):
        seen.batches.append(batch)
        seen.kinds.append(self.schedule.kind)
        seen.epochs.append(self.schedule.epoch)
        seen.held.append(sum(map(len, self.tier.maps)))
        seen.hot = self.plan.keys_on("device")
        update(self, batch)

    monkeypatch.setattr(HotCold, "update", kept)
    return seen


def keys_by_sample(batch, features):
    """For each sample what it looks up: pairs of table and key."""
    spelled = batch.expand()
    found = [set() for _ in range(batch.size)]
    for feature, table in features.items():
        bags = spelled[feature]
        for owner, key in zip(
            np.repeat(np.arange(batch.size), bags.lengths.numpy()).tolist(), bags.values.tolist(), strict=True
        ):
            found[owner].add((table, key))
    return found


def check_kinds(seen, features):
    """Batches are wholly hot or cold, and where there are both kinds, both were trained on."""
    hot = {(table, key) for table, keys in seen.hot.items() for key in keys.tolist()}
    for batch, kind in zip(seen.batches, seen.kinds, strict=True):
        assert {sample <= hot for sample in keys_by_sample(batch, features)} == {kind == "hot"}
    assert set(seen.kinds) == {"hot", "cold"}
    assert all((kind == "hot") == (held > 0) for kind, held in zip(seen.kinds, seen.held, strict=True))


def test_an_epoch_has_every_sample_once_in_batches_of_one_kind(make_run, data, watch):
    train(make_run(plan=PLAN, **SMALL))
    check_kinds(watch, {"user": "user", "item": "item", "history": "item"})
    prices = np.sort(np.concatenate([t["price"].to_numpy() for t in DataSet.open(data).flat("train")]))
    orders = []
    for epoch in (0, 1):
        mine = [b.dense[:, 0].numpy() for b, e in zip(watch.batches, watch.epochs, strict=True) if e == epoch]
        assert np.array_equal(np.sort(np.concatenate(mine)), prices)
        orders.append(np.concatenate(mine))
    assert not np.array_equal(*orders), "the second epoch has the order of the first"
    sizes = [len(batch) for batch in watch.batches]
    assert max(sizes) <= 125
    assert max(sizes) - min(sizes) <= max(sizes) // 4, "a few samples that were left over made a step"


def test_samples_with_lists_sequences_and_repeats_are_divided_too(make_run, sessions, watch):
    run = make_run(plan={"memory": "16KiB", "mode": "hot_cold", "judge": 32}, data__path=str(sessions), **SESSIONS)
    result = train(run)
    check_kinds(watch, {f.name: f.table for f in DataSet.open(sessions).schema.features})
    assert sum(len(batch) for batch in watch.batches) == 2 * DataSet.open(sessions).samples("train")
    assert result.plan["within"] is True
    hot = sum(len(b) for b, kind in zip(watch.batches, watch.kinds, strict=True) if kind == "hot")
    assert result.plan["measured"] == hot / sum(map(len, watch.batches))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_move_with_their_state_at_each_switch(make_run, watch, monkeypatch, tmp_path, close_weights, optimizer):
    """The weights are those of a run without a plan that is given the same batches in the same order."""
    settings = {"tables": {"dim": 4, "optimizer": OPTIMIZERS[optimizer]}, **SMALL}
    run = make_run(plan={"memory": str(MEMORY[optimizer]), "mode": "hot_cold"}, **settings)
    train(run)
    assert len(lines(run, "switch")) >= 4
    plain = make_run(**settings, output__folder=str(tmp_path / "plain"), train__steps=len(watch.batches))
    monkeypatch.setattr(Feed, "batches", property(lambda self: len(watch.batches)))
    monkeypatch.setattr(Feed, "_order", lambda self: iter(watch.batches))
    train(plain)
    close_weights(plain, run)


def test_in_deduplicated_logs_rows_move_with_their_state_too(
    make_run, sessions, watch, monkeypatch, tmp_path, close_weights
):
    settings = {"data__path": str(sessions), **SESSIONS}
    run = make_run(plan={"memory": "16KiB", "mode": "hot_cold", "judge": 32}, **settings)
    train(run)
    plain = make_run(**settings, output__folder=str(tmp_path / "plain"), train__steps=len(watch.batches))
    monkeypatch.setattr(Feed, "batches", property(lambda self: len(watch.batches)))
    monkeypatch.setattr(Feed, "_order", lambda self: iter(watch.batches))
    train(plain)
    close_weights(plain, run)


def test_turns_become_shorter_when_the_test_loss_rises_and_longer_after_it_fell(make_run, monkeypatch):
    losses = iter([0.6, 0.7, 0.8, 0.5, 0.4, 0.3, 0.2, *np.linspace(0.19, 0.01, 100)])
    asked = []

    def evaluate(ranker, split, **given):
        asked.append((split, given))
        return {"log_loss": float(next(losses))}

    monkeypatch.setattr(hot_cold, "evaluate", evaluate)
    run = make_run(plan={**PLAN, "judge": 77}, train__epochs=3)
    train(run)
    switches = lines(run, "switch")
    assert [line["rate"] for line in switches][:7] == [START * x for x in (1, 1 / 2, 1 / 2, 1 / 2, 1 / 2, 1 / 2, 1)]
    assert [line["loss"] for line in switches][:3] == [0.6, 0.7, 0.8]
    assert [line["to"] for line in switches][:4] == ["hot", "cold", "hot", "cold"]
    assert set(map(str, asked)) == {str(("test", {"samples": 77}))}


COUNTS = st.integers(0, 40)


@given(COUNTS, COUNTS, st.lists(st.floats(0.1, 1), min_size=300, max_size=300), st.integers(1, 3))
def test_a_schedule_gives_each_batch_of_both_kinds_once_an_epoch(cold, hot, losses, epochs):
    schedule = Schedule({"cold": cold, "hot": hot})
    if cold + hot == 0:
        return
    losses = iter(losses)
    schedule.turn()
    given_out = []
    for _ in range(epochs * (cold + hot)):
        assert schedule.left > 0
        given_out.append((schedule.epoch, schedule.kind, schedule.done[schedule.kind]))
        schedule.step()
        if schedule.left == 0:
            if schedule.next_kind() != schedule.kind:
                schedule.judge(next(losses, 0.5))
            schedule.turn()
        assert LEAST <= schedule.rate <= MOST
    wanted = {(e, kind, n) for e in range(epochs) for kind, m in (("cold", cold), ("hot", hot)) for n in range(m)}
    assert len(given_out) == len(wanted)
    assert set(given_out) == wanted
    assert [e for e, _, _ in given_out] == sorted(e for e, _, _ in given_out)


def test_the_test_loss_is_looked_at_a_bounded_number_of_times():
    schedule = Schedule({"cold": 4 * LOOKS, "hot": 8 * LOOKS})
    looks = 0
    schedule.turn()
    for _ in range(12 * LOOKS):
        schedule.step()
        if schedule.left == 0:
            if schedule.next_kind() != schedule.kind and schedule.due:
                schedule.judge(0.5)
                looks += 1
            schedule.turn()
    assert LOOKS / 2 < looks <= LOOKS


def test_a_turn_is_the_rate_of_an_epochs_batches_and_kinds_alternate():
    schedule = Schedule({"cold": 10, "hot": 100}, rate=0.5)
    turns = []
    for _ in range(4):
        schedule.turn()
        turns.append((schedule.kind, schedule.left))
        for _ in range(schedule.left):
            schedule.step()
    assert turns == [("cold", 5), ("hot", 50), ("cold", 5), ("hot", 50)]
    schedule.turn()
    assert (schedule.epoch, schedule.kind) == (1, "cold")


def test_the_rate_stays_within_its_bounds_and_needs_falls_in_a_row():
    schedule = Schedule({"cold": 10, "hot": 10})
    schedule.judge(0.5)
    for i in range(FALLS - 1):
        schedule.judge(0.4 - i / 100)
    schedule.judge(0.9)
    assert schedule.rate == START / 2
    for i in range(FALLS - 1):
        schedule.judge(0.5 - i / 100)
    assert schedule.rate == START / 2, "a rise begins the count anew"
    for i in range(40):
        schedule.judge(0.2 - i / 1000)
    assert schedule.rate == MOST
    for i in range(40):
        schedule.judge(0.3 + i / 1000)
    assert schedule.rate == LEAST


@given(logs(least=1), st.sets(st.integers(0, 5)), st.booleans())
def test_a_sample_is_hot_if_every_key_of_every_list_is(tmp_path_factory, log, hot, with_groups):
    path = tmp_path_factory.mktemp("hot") / "data"
    schema = grouped() if with_groups else grouped().model_copy(update={"groups": ()})
    with DataSetWriter(path, schema, row_group=4) as writer:
        writer.write("train", log)
    data = DataSet.open(path)
    held = np.array(sorted(hot | {-1}), np.int64)
    tables = {f.name: f.table for f in schema.features}
    plan = Plan(
        {table: (Share("device", np.arange(100) if table == "k" else held), Share("host")) for table in tables.values()}
    )
    marks = hot_samples(data, "train", plan, tables, threads=2)
    keys = {"k": set(range(100))}
    wanted = []
    for row in log.to_pylist():
        used = {(table, key) for name, table in tables.items() for key in np.atleast_1d(row[name]).astype(int).tolist()}
        wanted.append(all(key in keys.get(table, hot | {-1}) for table, key in used))
    assert np.concatenate([marks.of(i) for i in range(len(marks.counts))]).tolist() == wanted


@pytest.mark.parametrize(("memory", "kind"), [("1MiB", "hot"), ("80", "cold")])
def test_a_log_of_one_kind_only_has_no_switch(make_run, watch, memory, kind):
    run = make_run(plan={"memory": memory, "mode": "hot_cold"}, **SMALL)
    result = train(run)
    assert result.steps == 32
    assert set(watch.kinds) == {kind}
    assert lines(run, "switch") == []
    assert result.plan["measured"] == (kind == "hot")


@pytest.mark.parametrize("stop", [1, 9, 14, 15, 16, 17, 30])
def test_a_hot_cold_run_is_resumed_to_the_same_bits(resumes_alike, stop):
    settings = {"plan": PLAN, "train__log_every": 3, "train__evaluate_every": 10, **SMALL}
    resumes_alike(settings, stop, ("train", "evaluate", "switch"))


def test_more_epochs_extend_a_finished_run(make_run, tmp_path, same_weights):
    short = make_run(plan=PLAN, data__batch_size=125)
    train(short)
    longer = make_run(plan=PLAN, **SMALL)
    train(longer, resume=True)
    whole = make_run(plan=PLAN, **SMALL, output__folder=str(tmp_path / "whole"))
    train(whole)
    same_weights(whole, longer)


def test_shared_accesses_are_counted_before_rows_move(make_run, sessions, tmp_path):
    """Counting runs behind: a batch counted after its rows left the device would miss."""
    results = []
    for i in range(2):
        run = make_run(
            plan={"memory": "16KiB", "mode": "hot_cold", "judge": 32},
            data__path=str(sessions),
            output__folder=str(tmp_path / str(i)),
            **SESSIONS,
        )
        train(run)
        results.append([(line["step"], line["hit_share"]) for line in lines(run, "train")])
    assert results[0] == results[1]


def test_the_test_split_that_steers_a_run_stays_the_same_when_it_is_resumed(make_run):
    train(make_run(plan=PLAN, train__steps=2))
    with pytest.raises(SettingsError, match=r"data\.test was 'test' and is now 'train'"):
        train(make_run(plan=PLAN, train__steps=4, data__test="train"), resume=True)
