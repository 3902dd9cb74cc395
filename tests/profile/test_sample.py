"""A sample says what the whole is, within its intervals, and reads only what it needs."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from hotrow.data import Batch, Column, DataSet, DataSetWriter, Group, Schema
from hotrow.data.steps import Hash
from hotrow.errors import DataError, SettingsError
from hotrow.profile.sample import FEWEST, Chunk, Interval, Uses, draw, ratio, squares, student

SCHEMA = Schema(
    label="y",
    features=(Column(name="k"), Column(name="list", kind="keys", table="k"), Column(name="u")),
)


@pytest.fixture
def dataset(tmp_path):
    samples = pa.table(
        {
            "y": np.zeros(1000, np.float32),
            "k": np.arange(1000),
            "list": [list(range(i % 3)) for i in range(1000)],
            "u": np.arange(1000) // 10,
        }
    )
    with DataSetWriter(tmp_path / "set", SCHEMA, row_group=250) as writer:
        writer.split("test")
        writer.write("train", samples)
    return DataSet.open(tmp_path / "set")


def test_a_chunk_knows_which_sample_looks_up_which_key():
    group = Group(("a", "b"), torch.tensor([1, 2, 3, 9]), torch.tensor([0, 2, 3, 3, 4]), torch.tensor([1, 0, 1]))
    chunk = Chunk.of(Batch((group,)), {"a": "t", "b": "t"})
    found = sorted(zip(chunk.owners["t"].tolist(), chunk.keys["t"].tolist(), strict=True))
    assert found == [(0, 3), (0, 9), (1, 1), (1, 2), (2, 3), (2, 9)]
    (keys, times), inverse = chunk.uses("t")
    assert dict(zip(keys.tolist(), times.tolist(), strict=True)) == {1: 1, 2: 1, 3: 2, 9: 2}
    assert (keys[inverse] == chunk.keys["t"]).all()


def test_the_whole_is_every_sample_once(dataset):
    sample = draw(dataset, "train", 1.0)
    counts = sample.counts()
    assert sample.fraction == 1
    assert counts["k"].total == 1000 + sum(i % 3 for i in range(1000)) and counts["u"].total == 1000
    assert counts["u"].histogram().counts.tolist() == [10]


@pytest.mark.parametrize("share", [0.08, 0.3, 0.77])
def test_a_share_is_drawn_at_random_and_the_same_again(dataset, share):
    sample = draw(dataset, "train", share, chunks=16)
    chunks = list(sample.chunks())
    assert len(chunks) >= 16
    assert sample.fraction == pytest.approx(sum(chunk.samples for chunk in chunks) / 1000, abs=0.01)
    assert sample.fraction == pytest.approx(share, rel=0.3)
    again, other = draw(dataset, "train", share, chunks=16), draw(dataset, "train", share, chunks=16, seed=1)
    first = [chunk.keys["k"].tolist() for chunk in chunks]
    assert first == [chunk.keys["k"].tolist() for chunk in again.chunks()]
    assert first != [chunk.keys["k"].tolist() for chunk in other.chunks()]


def test_keys_are_those_that_training_sees(dataset):
    counts = draw(dataset, "train", 1.0, steps=[Hash(columns=("u",), buckets=7)]).counts()
    assert counts["u"].distinct == 7 and counts["k"].distinct == 1000


def test_what_cannot_be_drawn_is_refused(dataset):
    with pytest.raises(SettingsError, match="above 0 and up to 1, not 5"):
        draw(dataset, "train", 5)
    with pytest.raises(DataError, match="no samples to draw"):
        draw(dataset, "test", 0.5)


@pytest.mark.parametrize(
    ("level", "freedom", "quantile"), [(0.99, 7, 3.4995), (0.99, 63, 2.6561), (0.95, 10, 2.2281), (0.999, 30, 3.6460)]
)
def test_students_quantiles_are_those_of_the_tables(level, freedom, quantile):
    assert student(level, freedom) == pytest.approx(quantile, rel=2e-3)


def test_nothing_is_uncertain_where_everything_was_read():
    assert ratio([1.0], [2.0], 1.0, 0.5) == Interval(0.5, 0.5, 0.5, 1.0)


def test_too_few_chunks_say_nothing():
    with pytest.raises(SettingsError, match=f"at least {FEWEST}"):
        ratio([1.0] * 3, [2.0] * 3, 0.1, 0.5)


@pytest.mark.parametrize("hit", [0.0, 1.0])
def test_chunks_that_are_all_alike_leave_some_doubt(hit):
    interval = ratio([hit * 10] * 10, [10.0] * 10, 0.01, hit)
    assert interval.low <= interval.value <= interval.high and interval.high - interval.low > 0.01


def test_ratio_intervals_hold_the_truth_as_often_as_stated():
    random, held = np.random.default_rng(0), 0
    sizes = random.integers(20, 60, 400).astype(float)
    hits = random.binomial(sizes.astype(int), random.beta(3, 2, 400)).astype(
        float
    )  # chunks differ more than samples do
    truth = hits.sum() / sizes.sum()
    for _ in range(300):
        at = random.permutation(400)[:40]
        interval = ratio(hits[at], sizes[at], 0.1, hits[at].sum() / sizes[at].sum(), level=0.9)
        held += interval.low <= truth <= interval.high
    assert 0.85 < held / 300 < 0.95


def test_what_a_key_takes_is_squared_over_all_chunks():
    assert squares([Uses(np.array([1, 2]), np.array([2, 1])), Uses(np.array([1]), np.array([1]))]) == 9 + 1
