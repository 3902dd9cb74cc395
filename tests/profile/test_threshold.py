"""What a threshold costs in the whole lies within the interval that a sample gave."""

import numpy as np
import pytest

from access_log import counts_of, drawn_from, log
from hotrow.errors import SettingsError
from hotrow.profile.counts import KeyCounts
from hotrow.profile.threshold import known_costs, threshold_costs

WIDTHS = {"item": 84, "user": 20}


def test_intervals_from_a_tenth_hold_the_truth():
    population = log(640)
    truth = counts_of(population)
    thresholds = [120, 400, 1500]
    known = {name: known_costs(truth[name], thresholds, WIDTHS[name]) for name in truth}
    missed = 0
    for seed in range(12):
        sample = drawn_from(population, 64, seed)
        counts = sample.counts()
        costs = threshold_costs(sample, counts, thresholds, WIDTHS, seed=seed)
        for name in truth:
            for cost, true in zip(costs[name], known[name], strict=True):
                missed += not cost.rows.low <= true.rows.value <= cost.rows.high
                hot = counts[name].above(int(np.ceil(cost.threshold * sample.fraction)))[0]
                share = truth[name].of(hot).sum() / truth[name].total
                missed += not cost.share.low <= share <= cost.share.high
                assert cost.bytes == cost.rows.times(WIDTHS[name])
    assert missed <= 4, f"{missed} of 144 intervals of 99% missed"


def test_the_rows_of_many_keys_are_told_closely():
    population = log(640, items=500)
    truth = counts_of(population)["item"]
    (true,) = known_costs(truth, [150], 1)
    sample = drawn_from(population, 128, 3)
    cost = threshold_costs(sample, sample.counts(), [150], WIDTHS)["item"][0]
    assert true.rows.value > 80
    assert cost.rows.high - cost.rows.low < 0.4 * true.rows.value
    assert cost.share.high - cost.share.low < 0.05


def test_a_threshold_that_the_sample_cannot_tell_is_refused():
    sample = drawn_from(log(64), 16, 0)
    with pytest.raises(SettingsError, match="comes to 2.5 in a sample of 25.0%.*ask from 40 on"):
        threshold_costs(sample, sample.counts(), [10], WIDTHS)


def test_counts_of_everything_are_certain_and_summaries_are_bounds():
    stream = np.random.default_rng(0).zipf(1.3, 20_000) % 5000
    exact, small = KeyCounts(), KeyCounts(200)
    exact.add(stream)
    small.add(stream)
    (true,), (bound,) = known_costs(exact, [small.error * 2], 84), known_costs(small, [small.error * 2], 84)
    assert true.rows.low == true.rows.high == len(exact.above(small.error * 2)[0])
    assert bound.rows.low <= true.rows.value <= bound.rows.high
    assert bound.share.low <= true.share.value <= bound.share.high
