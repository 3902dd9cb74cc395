"""What a plan is said to hold is what it holds in the whole, within its interval."""

import numpy as np
import pytest

from access_log import counts_of, drawn_from, log
from hotrow.plan.hot import hot_rows
from hotrow.plan.predict import predict
from hotrow.profile.sample import Sample
from hotrow.table import Table

TABLES = [Table(name="item", dim=16), Table(name="user", dim=4)]


def truth(hot, population):
    """Shares by plain counting: of each table's accesses, of all, of samples with hot rows only."""
    hits, sizes, whole, samples = {"item": 0, "user": 0}, {"item": 0, "user": 0}, 0, 0
    keys = {name: shares[0].keys for name, shares in hot.plan.shares.items()}
    for chunk in population:
        cold = set()
        for name in hits:
            is_hot = np.isin(chunk.keys[name], keys[name])
            hits[name] += is_hot.sum()
            sizes[name] += len(is_hot)
            cold |= set(chunk.owners[name][~is_hot].tolist())
        whole += chunk.samples - len(cold)
        samples += chunk.samples
    return {n: hits[n] / sizes[n] for n in hits}, sum(hits.values()) / sum(sizes.values()), whole / samples


@pytest.mark.parametrize("memory", [10_000, 60_000])
def test_a_plan_from_a_tenth_holds_what_it_predicted(memory):
    population, missed = log(640), 0
    for seed in range(8):
        sample = drawn_from(population, 64, seed)
        counts = sample.counts()
        hot = hot_rows(TABLES, counts, memory)
        said = predict(hot, sample, counts, sampled=True)
        tables, accesses, samples = truth(hot, population)
        intervals = [(said.accesses, accesses), (said.samples, samples)]
        intervals += [(said.tables[name], tables[name]) for name in tables]
        missed += sum(not interval.low <= true <= interval.high for interval, true in intervals)
        assert said.accesses.high - said.accesses.low < 0.15
        assert hot.share.value > said.accesses.value, "a plan looks better on the samples it was made from"
    assert missed <= 2, f"{missed} of 32 intervals of 99% missed"


def test_counts_of_everything_are_certain_and_samples_are_judged_by_the_plan():
    population = log(200)
    counts = counts_of(population)
    hot = hot_rows(TABLES, counts, 40_000)
    tables, accesses, samples = truth(hot, population)
    whole = predict(hot, Sample(1.0, lambda: iter(population)), counts, sampled=False)
    assert whole.accesses.low == whole.accesses.high == pytest.approx(accesses)
    assert {n: i.value for n, i in whole.tables.items()} == pytest.approx(tables)
    assert whole.samples.low == whole.samples.high == pytest.approx(samples)
    part = predict(hot, drawn_from(population, 50, 1), counts, sampled=False)
    assert part.accesses == whole.accesses
    assert part.samples.low <= samples <= part.samples.high and part.samples.high - part.samples.low < 0.15


def test_a_plan_that_holds_every_key_of_the_sample_is_not_believed_to_hold_all():
    population = log(640)
    sample = drawn_from(population, 16, 0)
    counts = sample.counts()
    hot = hot_rows(TABLES, counts, 1 << 30)
    assert hot.share.value == 1
    said, (_, accesses, _) = predict(hot, sample, counts, sampled=True), truth(hot, population)
    assert said.accesses.low <= accesses <= said.accesses.high < 0.95
