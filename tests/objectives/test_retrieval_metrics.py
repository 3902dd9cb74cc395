"""Metrics over all items: each equals what a plain sort of all scores gives, and ranks of a run merge exactly."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrow.objectives import retrieval_metrics
from hotrow.objectives.retrieval_metrics import RetrievalMetrics, ranks_of


@st.composite
def judged(draw):
    """Vectors of small whole numbers, so that products are exact and ties many."""
    users, items, dim = draw(st.integers(1, 9)), draw(st.integers(1, 12)), draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    vectors = [random.integers(-2, 3, (n, dim)).astype(np.float32) for n in (users, items)]
    targets = random.integers(-1, items, users)
    excluded = random.random((users, items)) < draw(st.sampled_from([0.0, 0.4]))
    return *vectors, targets, excluded, random.integers(0, 3, users).astype(np.float32)


def sorted_rank(user, items, target, excluded):
    """Where the target stands when all others are sorted by score, then by place."""
    scores = items @ user
    others = [(-scores[i], i) for i in range(len(items)) if not excluded[i] or i == target]
    return sorted(others).index((-scores[target], target)) + 1


@given(judged(), st.integers(1, 3))
def test_metrics_are_those_of_a_sort_of_all_items(case, width):
    users, items, targets, excluded, weights = case
    k = (1, 3, 20)
    known = np.flatnonzero(targets >= 0)
    expected = dict.fromkeys(("recall", "ndcg", "mrr", "hit_rate"), 0.0)
    expected = {f"{name}@{at}": 0.0 for at in k for name in expected}
    for i in known:
        rank = sorted_rank(users[i], items, targets[i], excluded[i])
        for at in k:
            if rank <= at:
                for name, value in (("recall", 1), ("hit_rate", 1), ("ndcg", 1 / np.log2(1 + rank)), ("mrr", 1 / rank)):
                    expected[f"{name}@{at}"] += float(weights[i]) * value
    halves = [RetrievalMetrics(k), RetrievalMetrics(k)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval_metrics, "_SCORES", width * len(items))
        pairs = tuple(torch.from_numpy(a) for a in np.nonzero(excluded))
        places = torch.from_numpy(targets).clamp(min=0)
        ranks = ranks_of(torch.from_numpy(users), torch.from_numpy(items), places, pairs)
    for part, metrics in zip(np.array_split(np.arange(len(users)), 2), halves, strict=True):
        metrics.update(ranks[part], torch.from_numpy(weights)[part], torch.from_numpy(targets)[part] < 0)
    halves[0].merge(halves[1].state())
    found, total = halves[0].compute(), float(weights.sum())
    assert found["samples"] == len(users)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value / total if total else np.nan, nan_ok=True, abs=1e-12)
    assert found["unseen"] == pytest.approx(weights[targets < 0].sum() / total if total else np.nan, nan_ok=True)


def test_of_no_samples_there_is_no_metric():
    assert np.isnan(RetrievalMetrics((5,)).compute()["recall@5"])
