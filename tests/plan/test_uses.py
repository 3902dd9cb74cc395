"""Expected uses are those of the samples a step takes, and bursts make up for samples that repeat each other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusters import cluster
from hotrow.errors import SettingsError
from hotrow.plan.uses import Bursts, Use, measured_bursts
from hotrow.profile.counts import KeyCounts


def met(batches, groups):
    """The mean number of distinct keys in so many successive batches."""
    return np.mean(
        [len(np.unique(np.concatenate(batches[a : a + groups]))) for a in range(0, len(batches) - groups + 1, groups)]
    )


def expected_distinct(keys, batch, topology, bursts=None):
    counts = KeyCounts()
    counts.add(keys)
    histogram = counts.histogram()
    use = Use.of_counts(histogram.counts, len(keys), batch, topology, bursts)
    return [float(histogram.keys @ chance) for chance in (use.rank, use.node, use.world)], counts


@given(st.integers(0, 20), st.sampled_from([(2, 2), (2, 4), (1, 3)]))
def test_shuffled_samples_meet_as_many_distinct_keys_as_expected(seed, shape):
    topology, random = cluster(*shape), np.random.default_rng(seed)
    keys = random.permutation(random.zipf(1.3, 6000) % 700)
    found, _ = expected_distinct(keys, 100, topology)
    batches = np.split(keys, 60)
    for value, groups in zip(found, (1, topology.ranks, topology.size), strict=True):
        assert value == pytest.approx(met(batches, groups), rel=0.08)


def test_bursts_are_measured_where_samples_repeat_each_other():
    topology, random = cluster(2, 2), np.random.default_rng(0)
    sessions = random.zipf(1.4, 3000) % 500
    keys = np.repeat(sessions, 4)  # a session repeats its key four times
    batches = np.split(keys, 100)
    plain, counts = expected_distinct(keys, 120, topology)
    assert plain[0] > 1.2 * met(batches, 1)
    bursts = Bursts.measured(batches, counts, len(keys), 120, topology)
    found, _ = expected_distinct(keys, 120, topology, bursts)
    for value, groups in zip(found, (1, 2, 4), strict=True):
        assert value == pytest.approx(met(batches, groups), rel=0.02)


def test_too_few_batches_for_a_step_take_what_was_seen_of_fewer_ranks():
    topology = cluster(4, 2)
    keys = np.repeat(np.arange(600), 5)
    counts = KeyCounts()
    counts.add(keys)
    bursts = Bursts.measured(np.split(keys, 30)[:3], counts, len(keys), 100, topology)
    assert (bursts.sizes[2] == bursts.sizes[1]).all() and bursts.sizes[0].max() > 2


def test_a_row_used_once_cannot_come_in_bursts():
    bursts = Bursts(np.full((3, 64), 50.0))
    assert bursts.of(0, np.array([1, 2, 1000])).tolist() == [1, 2, 50]


def test_bursts_are_of_each_table():
    topology = cluster(1, 2)
    counts = {name: KeyCounts() for name in "ab"}
    keys = {"a": np.arange(400) % 40, "b": np.repeat(np.arange(40), 10)}
    for name, known in counts.items():
        known.add(keys[name])
    batches = [{name: k[at : at + 40] for name, k in keys.items()} for at in range(0, 400, 40)]
    found = measured_bursts(batches, counts, 400, 40, topology)
    assert found["a"].sizes[0].max() < 2 < found["b"].sizes[0].max()


def test_a_step_of_all_samples_uses_every_row():
    use = Use.of_counts(np.array([1, 5]), 400, 100, cluster(2, 2))
    assert use.world == pytest.approx([1, 1]) and use.lookups.tolist() == [0.25, 1.25]
    with pytest.raises(SettingsError, match="there are 0, in batches of 100"):
        Use.of_counts(np.array([1]), 0, 100, cluster(2, 2))
