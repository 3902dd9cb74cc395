"""The number of distinct keys is estimated within its stated error, from nothing to millions."""

import numpy as np
import pytest

from hotrow.profile.counts import KeyCounts
from hotrow.profile.sketch import BITS, RELATIVE_ERROR, distinct


def test_no_key_gives_zero():
    assert distinct(np.zeros(1 << BITS, np.uint8)) == 0


@pytest.mark.parametrize("count", [10, 1_000, 40_000, 1_000_000])
@pytest.mark.parametrize("spread", [1, 2**40 + 1])
def test_an_estimate_is_within_four_standard_errors(count, spread):
    counts = KeyCounts(limit=4)
    counts.add(np.arange(count) * spread - 17)
    assert not counts.exact
    assert abs(counts.distinct - count) <= 4 * RELATIVE_ERROR * count + 1


def test_repeated_keys_do_not_count_again():
    once, often = KeyCounts(limit=4), KeyCounts(limit=4)
    keys = np.arange(5_000)
    once.add(keys)
    for _ in range(5):
        often.add(keys)
    assert once.distinct == often.distinct


def test_errors_of_many_estimates_are_as_large_as_stated():
    count, errors = 20_000, []
    for salt in range(60):
        counts = KeyCounts(limit=1)
        counts.add(np.random.default_rng(salt).integers(-(2**62), 2**62, count))
        errors.append(counts.distinct / count - 1)
    assert abs(np.mean(errors)) < 3 * RELATIVE_ERROR / np.sqrt(60)
    assert 0.6 * RELATIVE_ERROR < np.std(errors) < 1.4 * RELATIVE_ERROR
