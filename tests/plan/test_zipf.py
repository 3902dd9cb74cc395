"""Bins of ranks have what their ranks have, and draws come as the law says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusters import cluster
from hotrow.errors import SettingsError
from hotrow.plan.zipf import Zipf
from hotrow.table import Table


@given(st.floats(0, 3), st.integers(1, 60_000))
def test_bins_hold_what_their_rows_hold(s, rows):
    edges, p = Zipf(s, rows).bins()
    law = np.arange(1, rows + 1) ** -s
    law /= law.sum()
    assert edges[0] == 0 and edges[-1] == rows and (np.diff(edges) > 0).all()
    assert p * np.diff(edges) == pytest.approx(np.add.reduceat(law, edges[:-1]), rel=1e-6)


def test_rows_beyond_any_array_are_still_a_law():
    edges, p = Zipf(1.05, 10**9).bins()
    assert len(p) < 20_000 and float(p @ np.diff(edges)) == pytest.approx(1)
    assert (np.diff(p) < 0).all()


def test_draws_follow_the_law():
    law = Zipf(1.1, 20_000)
    keys = law.draw(np.random.default_rng(0), 200_000)
    edges, p = law.bins()
    assert keys.min() == 0 and keys.max() < 20_000
    assert np.bincount(keys, minlength=20_000)[:5] == pytest.approx(200_000 * p[:5], rel=0.03)
    assert (keys >= 10_000).mean() == pytest.approx(float((p * np.diff(edges))[edges[:-1] >= 10_000].sum()), rel=0.05)


def test_a_histogram_has_the_mean_counts():
    counts, keys = Zipf(1.0, 100_000).histogram(10_000_000)
    assert (np.diff(counts) < 0).all() and keys.sum() == 100_000
    assert float(counts @ keys) == pytest.approx(10_000_000, rel=0.01)


def test_a_table_of_the_law_has_all_its_rows_and_lookups():
    used = Zipf(1.05, 50_000).use(Table(name="t", dim=4), 700, cluster(2, 2))
    assert used.rows == 50_000 and used.lookups == pytest.approx(700)


@pytest.mark.parametrize(("s", "rows"), [(-0.1, 5), (11, 5), (1, 0), (float("nan"), 5)])
def test_no_law_is_a_sentence(s, rows):
    with pytest.raises(SettingsError, match="not"):
        Zipf(s, rows)
