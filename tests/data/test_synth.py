"""A synthetic log is what it says: the same for a seed, with a truth that its facts know."""

import hashlib
import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

from hotrow.data import Reader, prepare, sessions, synth
from hotrow.data.mix import Randoms, mix64
from hotrow.data.synth import SynthSettings, auc, generate, preset_settings, write_log
from hotrow.errors import DataError, SettingsError
from hotrow.profile import Repetition

SMALL = SynthSettings(samples=6_000, users=50, items=80, history_length=5)


def table_of(settings):
    return pa.Table.from_batches([rows for rows, _ in generate(settings)])


def digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_the_same_seed_gives_the_same_files_to_the_bit(tmp_path, monkeypatch):
    write_log(SMALL, tmp_path / "a")
    write_log(SMALL, tmp_path / "b")
    monkeypatch.setattr(sessions, "BLOCK", 37)
    write_log(SMALL, tmp_path / "c")
    write_log(SMALL.model_copy(update={"seed": 1}), tmp_path / "d")
    assert digests(tmp_path / "a") == digests(tmp_path / "b") == digests(tmp_path / "c")
    assert digests(tmp_path / "a")["log-00000.parquet"] != digests(tmp_path / "d")["log-00000.parquet"]


@hypothesis_settings(max_examples=15)
@given(
    block=st.integers(1, 60),
    samples=st.integers(1, 700),
    history=st.integers(1, 9),
    change=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    mean=st.sampled_from([1.0, 2.0, 16.5]),
)
def test_a_log_does_not_depend_on_how_it_is_chunked(block, samples, history, change, mean):
    settings = SynthSettings(
        samples=samples, users=6, items=9, history_length=history, change=change, samples_per_session=mean
    )
    whole = table_of(settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "BLOCK", block)
        assert table_of(settings).equals(whole)
    assert len(whole) == samples


@hypothesis_settings(max_examples=15)
@given(block=st.integers(1, 60), samples=st.integers(1, 700), mean=st.sampled_from([1.0, 2.0, 16.5]))
def test_a_log_of_whole_sessions_does_not_depend_on_how_it_is_chunked(block, samples, mean):
    settings = SynthSettings(
        samples=samples, users=6, items=9, history_length=4, past=3, pause=400, whole=True, samples_per_session=mean
    )
    whole = table_of(settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "BLOCK", block)
        assert table_of(settings).equals(whole)
    assert len(whole) == samples
    assert (np.diff(whole.column("time").to_numpy()) > 0).all()
    numbers = Randoms(settings.seed).key_of("session", np.arange(samples + 1))
    lengths = dict(zip(*np.unique(whole.column("session").to_numpy(), return_counts=True), strict=True))
    assert set(lengths) == set(numbers[: len(lengths)].tolist())  # no session is left out
    wanted = sessions.Sessions(settings, Randoms(settings.seed))._lengths(np.arange(len(lengths)))
    assert [lengths[n] for n in numbers[: len(lengths) - 1].tolist()] == wanted[:-1].tolist()  # nor cut, but the last


@hypothesis_settings(max_examples=15)
@given(change=st.sampled_from([0.0, 0.1, 1.0]), users=st.integers(1, 8), mean=st.sampled_from([1.5, 12.0]))
def test_histories_slide_over_what_the_user_saw(change, users, mean):
    settings = SynthSettings(
        samples=800, users=users, items=300, history_length=4, change=change, samples_per_session=mean
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "BLOCK", 16)
        rows = table_of(settings).select(["user", "item", "history", "session"]).to_pylist()
    seen, snapshot = {}, {}
    for row in rows:
        items = seen.setdefault(row["user"], [])
        possible = [items[max(0, end - 4) : end] for end in range(len(items) + 1)]
        assert row["history"] in possible
        if row["session"] not in snapshot or change == 1.0:
            assert row["history"] == possible[-1]
        snapshot[row["session"]] = row["history"]
        items.append(row["item"])


def test_sessions_overlap_time_grows_and_keys_fill_int64():
    table = table_of(SMALL)
    time = table.column("time").to_numpy()
    session = table.column("session").to_numpy()
    assert (np.diff(time) > 0).all()
    assert (np.diff(session) != 0).mean() > 0.9
    for column in ("user", "item", "session"):
        keys = table.column(column).unique().to_numpy()
        assert (keys < 0).any() and (np.abs(keys.astype(float)) > 2**32).mean() > 0.9
    assert table.group_by("session").aggregate([("user", "count_distinct")])["user_count_distinct"].to_pylist() == [
        1
    ] * len(np.unique(session))


def test_sessions_have_the_wanted_mean_and_slow_features_the_wanted_change():
    settings = SynthSettings(samples=60_000, users=300, items=300, change=0.2, samples_per_session=8)
    table = table_of(settings).sort_by([("session", "ascending"), ("time", "ascending")])
    session = table.column("session").to_numpy()
    assert len(session) / len(np.unique(session)) == pytest.approx(8, rel=0.05)
    within = session[1:] == session[:-1]
    slow = table.column("slow_0").to_numpy()
    changed = (slow[1:] != slow[:-1])[within].mean()
    assert changed == pytest.approx(0.2 * (1 - 1 / settings.vocabulary), rel=0.1)
    context = table.column("context_0").to_numpy()
    assert (context[1:] != context[:-1])[within].mean() > 0.8


def test_the_preset_recd_repeats_as_much_as_published():
    settings = SynthSettings(samples=100_000, **preset_settings("recd"))
    table = table_of(settings)
    session = table.column("session").to_numpy()
    met = 4096 / np.mean([len(np.unique(part)) for part in session[: 24 * 4096].reshape(24, 4096)])
    assert met < 2  # few of a session meet in a batch of the log as it comes
    found = Repetition.of(
        table.sort_by([("session", "ascending"), ("time", "ascending")]), settings.log_schema().prepared()
    )
    assert found.samples_per_session == pytest.approx(16.5, rel=0.02)
    assert found.exact_share == pytest.approx(0.80, abs=0.005)
    assert found.slid_share == pytest.approx(0.89, abs=0.005)
    assert preset_settings("") == {}
    with pytest.raises(SettingsError, match='no preset "recdd".* "recd"'):
        preset_settings("recdd")


def test_features_of_one_clock_change_together():
    settings = SynthSettings(samples=4_000, users=50, items=80, slow=3, interests=1, clocks=2, vocabulary=100_000)
    table = table_of(settings).sort_by([("session", "ascending"), ("time", "ascending")])
    changed = {
        name: [a != b for a, b in itertools.pairwise(table.column(name).to_pylist())]
        for name in ("slow_0", "slow_1", "slow_2", "interests_0")
    }
    assert changed["slow_0"] == changed["slow_2"] != changed["slow_1"] == changed["interests_0"]


def test_the_default_log_is_what_it_was():
    values = hashlib.sha256()
    for column in table_of(SynthSettings(samples=20_000)).columns:
        array = column.combine_chunks()
        values.update((array.flatten() if pa.types.is_list(array.type) else array).to_numpy().tobytes())
    assert values.hexdigest() == "fb7ff26045cd65dbf8bafcdf909e0f1b169e919a85094ded8a27097fd98d3bb3"


def test_keys_follow_zipfs_law():
    drawn = Randoms(0).zipf(1000, 1.05, Randoms(0).uniform("x", np.arange(200_000)))
    counts = np.bincount(drawn, minlength=1000)
    expected = np.arange(1, 1001) ** -1.05
    expected *= len(drawn) / expected.sum()
    assert counts[:20] == pytest.approx(expected[:20], rel=0.1)
    assert drawn.max() < 1000


def test_the_truth_is_the_best_that_can_be_reached(tmp_path):
    facts = write_log(SynthSettings(samples=40_000), tmp_path / "log")
    parts = list(generate(SynthSettings(samples=40_000)))
    logits = np.concatenate([logit for _, logit in parts])
    labels = np.concatenate([rows.column("label").to_numpy() for rows, _ in parts])
    assert 0.75 < facts["best_auc"] < 0.87
    assert facts["best_auc"] == auc(logits[36_000:], labels[36_000:])
    chance = 1 / (1 + np.exp(-logits))
    assert labels.mean() == pytest.approx(chance.mean(), abs=0.01)
    loss = np.logaddexp(0, np.where(labels > 0, -logits, logits))
    assert facts["best_log_loss"] == pytest.approx(loss[36_000:].mean())
    expected = -(chance * np.log(chance) + (1 - chance) * np.log1p(-chance))
    assert loss.mean() == pytest.approx(expected.mean(), abs=4 * loss.std() / len(loss) ** 0.5)
    noisy = logits[36_000:] + np.random.default_rng(0).normal(size=4_000)
    assert auc(noisy, labels[36_000:]) < facts["best_auc"] - 0.01
    coins = write_log(SynthSettings(samples=40_000, strength=0), tmp_path / "coins")
    assert coins["best_auc"] == pytest.approx(0.5, abs=0.03)


def test_prepare_takes_a_synthetic_log_with_its_split_and_facts(tmp_path):
    facts = write_log(SMALL, tmp_path / "log")
    dataset = prepare(tmp_path / "log", tmp_path / "set")
    assert [dataset.samples(split) for split in dataset.splits] == [4_860, 540, 600]
    assert dataset.facts["best_auc"] == facts["best_auc"]
    assert dataset.facts["split"] == f"time:{facts['test_from']}"
    raw = pq.read_table(tmp_path / "log" / "log-00000.parquet")
    test = raw.filter(pa.compute.field("time") >= facts["test_from"])
    assert len(test) == 600
    session = pq.read_table(dataset.path / "train-00000.parquet").column("session").to_numpy()
    assert (np.diff(session) != 0).sum() + 1 == len(np.unique(session))
    batch = next(iter(Reader(dataset, "test", 600, shuffle=False)))
    assert set(batch.features) == {f.name for f in SMALL.log_schema().features}
    assert sorted(batch["item"].values.tolist()) == sorted(test.column("item").to_pylist())
    assert batch.labels.sum() == sum(test.column("label").to_pylist())


def test_a_log_can_be_as_plain_as_wanted(tmp_path):
    plain = SynthSettings(
        samples=50, users=1, items=1, contexts=0, slow=0, interests=0, dense=0, samples_per_session=1, test=0.5
    )
    write_log(plain, tmp_path / "log")
    assert prepare(tmp_path / "log", tmp_path / "set").samples("test") == 25


def test_a_log_is_whole_or_not_there(tmp_path, monkeypatch):
    write_log(SMALL, tmp_path / "log")
    with pytest.raises(DataError, match="not empty"):
        write_log(SMALL, tmp_path / "log")
    monkeypatch.setattr(synth, "_facts", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(DataError, match="The disk is full"):
        write_log(SMALL, tmp_path / "other")
    with pytest.raises(DataError, match="The disk is full"):
        write_log(SMALL, tmp_path / "log", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["log"]
    assert prepare(tmp_path / "log", tmp_path / "set").samples("train") == 4_860
    with pytest.raises(ValidationError):
        SynthSettings(samples=0)


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=30))
def test_auc_is_the_share_of_pairs_in_the_right_order(pairs):
    scores, labels = (np.array(column, dtype=np.float64) for column in zip(*pairs, strict=True))
    above, below = scores[labels > 0], scores[labels == 0]
    found = auc(scores, labels.astype(np.float32))
    if not len(above) or not len(below):
        assert found is None
    else:
        wins = (above[:, None] > below).sum() + 0.5 * (above[:, None] == below).sum()
        assert found == pytest.approx(wins / (len(above) * len(below)))


def test_mix64_maps_no_two_values_to_one():
    assert len(np.unique(mix64(np.arange(100_000, dtype=np.uint64)))) == 100_000
