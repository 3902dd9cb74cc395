"""`RetrievalMetrics`: where the right item ranks among all items, exactly, over any number of batches and ranks.

An item's score is the product of its vector and the user's. Every item is scored for every sample, so many samples
at a time that their scores take 32 MiB (one where its scores alone take more); items' vectors are kept besides. Of two
items with one score that with the smaller key ranks first. What is kept are `max(k) + 1` sums of weights, one for each
rank, so that the ranks of a run merge by adding.

| name | what it is |
| --- | --- |
| recall@k | share of the samples whose item is among the first k; a sample has one right item |
| ndcg@k | 1 / log2(1 + rank) where the rank is at most k, else 0 |
| mrr@k | 1 / rank where the rank is at most k, else 0 |
| hit_rate@k | share of the samples with a right item among the first k: recall, as there is one |
| unseen | share of the samples whose item no sample of the training split has: it is not found |
| samples | how many there were with a right item |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MEASURES = ("recall", "ndcg", "mrr", "hit_rate")
_SCORES = 8 << 20
"""Scores at a time: 32 MiB, and half as much while they are compared."""


class RetrievalMetrics:
    """Adds up ranks; `compute` gives the metrics of all so far."""

    def __init__(self, k: Sequence[int]) -> None:
        self._k = tuple(k)
        self._weights = torch.zeros(max(self._k) + 1, dtype=torch.float64)  # by rank from 1; the first: not found
        self._counts = torch.zeros(3, dtype=torch.float64)  # weight, weight of unseen items, samples

    def update(self, ranks: Tensor, weights: Tensor, unseen: Tensor) -> None:
        """Adds samples: the rank of each one's item, from 1, and whether it is no item of the catalogue."""
        ranks, weights, unseen = ranks.cpu(), weights.cpu().double(), unseen.cpu()
        found = torch.where((ranks < len(self._weights)) & ~unseen, ranks, 0)
        self._weights += torch.bincount(found, weights, minlength=len(self._weights))
        self._counts += torch.stack([weights.sum(), weights[unseen].sum(), torch.tensor(float(len(ranks)))])

    def state(self) -> dict[str, Tensor]:
        """All so far; `merge` takes it in."""
        return {"weights": self._weights.clone(), "counts": self._counts.clone()}

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Adds what another rank saw."""
        self._weights += state["weights"]
        self._counts += state["counts"]

    def compute(self) -> dict[str, float]:
        """Every metric by name."""
        total, unseen, samples = self._counts.tolist()
        ranks = torch.arange(1, len(self._weights), dtype=torch.float64)
        each = {"recall": torch.ones_like(ranks), "ndcg": 1 / torch.log2(1 + ranks), "mrr": 1 / ranks}
        each["hit_rate"] = each["recall"]
        found = {}
        for k in self._k:
            for name in MEASURES:
                found[f"{name}@{k}"] = _share(float((self._weights[1 : k + 1] * each[name][:k]).sum()), total)
        return {**found, "unseen": _share(unseen, total), "samples": samples}


def ranks_of(users: Tensor, items: Tensor, targets: Tensor, excluded: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The rank, from 1, of item `targets[i]` for `users[i]` among all `items[N, D]`, which are in the order of keys.

    `excluded` are samples and places of items that do not count for them, unless they are the right one.
    """
    ranks = torch.empty_like(targets)
    width = max(1, _SCORES // max(len(items), 1))
    for first in range(0, len(users), width):
        last = min(first + width, len(users))
        scores = users[first:last] @ items.T
        own = targets[first:last, None]
        right = scores.gather(1, own)
        if excluded is not None:
            samples, places = excluded
            here = (samples >= first) & (samples < last)
            scores[samples[here] - first, places[here]] = -torch.inf
        before = (scores > right).sum(1)
        ties = (scores == right) & (torch.arange(len(items), device=items.device) < own)
        ranks[first:last] = 1 + before + ties.sum(1)
    return ranks


def _share(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
