"""Skew is what was planted."""

import numpy as np
import pytest

from hotrow.data.mix import Randoms
from hotrow.profile import KeyCounts
from hotrow.profile.skew import top_share, zipf_exponent


def counts_of(keys):
    counts = KeyCounts()
    counts.add(np.asarray(keys, np.int64))
    return counts


@pytest.mark.parametrize("exponent", [0.5, 0.8, 1.05, 1.4])
@pytest.mark.parametrize("keys", [1_000, 20_000])
def test_the_planted_exponent_is_found(exponent, keys):
    random = Randoms(3)
    drawn = random.zipf(keys, exponent, random.uniform("x", np.arange(400_000)))
    assert zipf_exponent(counts_of(drawn)) == pytest.approx(exponent, abs=0.03)


def test_equal_counts_have_no_skew():
    counts = counts_of(np.repeat(np.arange(200), 5))
    assert zipf_exponent(counts) == pytest.approx(0, abs=1e-6)
    assert top_share(counts) == pytest.approx(0.01)
    assert top_share(counts, 1.0) == pytest.approx(1.0)


def test_the_top_takes_its_share():
    counts = counts_of(np.append(np.repeat(np.arange(2), 50), np.arange(2, 200)))
    assert top_share(counts) == pytest.approx(100 / 298)
    assert top_share(counts, 0.005) == pytest.approx(50 / 298)
    assert top_share(counts_of([])) == 0.0
    assert zipf_exponent(counts_of([])) == 0.0
    assert zipf_exponent(counts_of([7, 7])) == 0.0
