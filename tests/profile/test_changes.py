"""The sample of changes is bounded, fair, and the same however the log was divided."""

import numpy as np
import pytest

from hotrow.profile import changes
from hotrow.profile.changes import Changes, hash_of


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(changes, "LOOKED", 500)


def log(count=4000):
    rng = np.random.default_rng(0)
    hashes = hash_of(np.repeat(np.arange(count // 10), 10), np.tile(np.arange(10), count // 10))
    return hashes, rng.random((5, count)) < np.array([0.05, 0.3, 0.3, 0.9, 1.0])[:, None]


@pytest.mark.parametrize("pieces", [2, 3, 17])
def test_any_division_ends_with_the_same_samples(small, pieces):
    hashes, changed = log()
    whole = Changes.of(hashes, changed)
    assert 250 < len(whole) <= 500
    parts = [
        Changes.of(hashes[at], changed[:, at])
        for at in np.array_split(np.random.default_rng(pieces).permutation(len(hashes)), pieces)
    ]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    assert merged.halvings == whole.halvings > 0
    assert (merged.hashes == whole.hashes).all() and (merged.bits == whole.bits).all()


def test_shares_of_a_sample_are_those_of_the_log(small):
    hashes, changed = log(200_000)
    found = Changes.of(hashes, changed)
    for columns in ([0], [1, 2], [0, 1, 2], [3], [4]):
        truth = changed[columns].any(axis=0).mean()
        assert found.share(columns) == pytest.approx(truth, abs=4 * (truth * (1 - truth) / len(found)) ** 0.5 + 1e-9)


def test_bits_and_words_are_what_was_given():
    hashes, changed = log(130)
    found = Changes.of(hashes, changed)
    assert len(found) == 130
    assert (found.unpacked() == changed[:, np.argsort(hashes)]).all()
    assert found.words().shape == (5, 3)
    assert (np.bitwise_count(found.words()).sum(axis=1) == changed.sum(axis=1)).all()
