"""Between TorchRec's `KeyedJaggedTensor` and Hotrow's groups of features, without copying keys.

A keyed jagged tensor lies as a group does, feature after feature, so a run of its features is a group of
views. Features wanted in another order than they stand in, or more than once, make more groups, not copies.
Its inverse indices (TorchRec's variable batch, a stride per key) are the inverses of groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from hotrow.data.batch import Batch, Group
from hotrow.errors import BatchError, nearest


def from_kjt(
    kjt: KeyedJaggedTensor,
    *,
    dense: Tensor | None = None,
    labels: Tensor | None = None,
    weights: Tensor | None = None,
    users: Tensor | None = None,
) -> Batch:
    """A batch with the features of `kjt`; `weights` are the samples' own, the keys' come with `kjt`.

    Keys are shared with `kjt`, not copied, where they are int64 in host memory. A tensor with inverse indices
    keeps its deduplication: neighbours that share an inverse become one group.
    """
    groups = kjt_groups(kjt, [(key, key) for key in list(kjt.keys())], kjt.weights_or_none())
    return Batch(groups, dense, labels, weights, users)


def to_kjt(batch: Batch, *, expand: bool = True) -> KeyedJaggedTensor:
    """The features of `batch`, in its order, every sample spelled out.

    Nothing is copied where the batch is one plain group. With `expand` False samples stay deduplicated:
    the tensor has a stride per key and inverse indices. Windows that overlap are spelled out: it has none. Where
    some groups have weights and others none, those get 1.0, which leaves sums and means what they are.
    """
    groups = [group.expand() if expand else group.apart() for group in batch.groups]
    features, values = list(batch.features), _cat([group.values for group in groups], torch.int64)
    weights = None
    if any(group.weights is not None for group in groups):
        parts = [torch.ones(len(g.values)) if g.weights is None else g.weights for g in groups]
        weights = _cat(parts, torch.float32)
    if all(group.inverse is None for group in groups):
        return KeyedJaggedTensor(features, values, weights, offsets=_offsets(groups), stride=batch.size)
    itself = torch.arange(batch.size)
    inverses = [itself if g.inverse is None else g.inverse for g in groups for _ in g.features]
    return KeyedJaggedTensor(
        features,
        values,
        weights,
        offsets=_offsets(groups),
        stride_per_key_per_rank=[[g.unique_size] for g in groups for _ in g.features],
        inverse_indices=(features, torch.stack(inverses)),
    )


def kjt_groups(kjt: KeyedJaggedTensor, wanted: Sequence[tuple[str, str]], weights: Tensor | None) -> tuple[Group, ...]:
    """Views of `kjt` with the features `wanted`, in that order: each a name to give it, its key in `kjt`."""
    place = {key: i for i, key in enumerate(kjt.keys())}
    for _, key in wanted:
        if key not in place:
            raise BatchError(f'The KeyedJaggedTensor has no feature "{key}".{nearest(key, place)}')
    values, strides, inverses = _keys(kjt), kjt.stride_per_key(), _inverses(kjt)
    offsets = _offsets_of(kjt, strides)
    bags = [0, *accumulate(strides)]  # where in `offsets` each key begins
    starts = offsets[torch.tensor(bags)].tolist()  # where in `values` each key begins
    if starts[-1] != len(values):
        raise BatchError(f"The KeyedJaggedTensor has {len(values)} values, but its lengths add up to {starts[-1]}.")
    weights = None if weights is None else _key_weights(weights, len(values))

    groups = []
    for run in _runs([place[key] for _, key in wanted], strides, inverses):
        first, last = place[wanted[run.start][1]], place[wanted[run.stop - 1][1]] + 1
        mine, bounds = slice(starts[first], starts[last]), offsets[bags[first] : bags[last] + 1]
        groups.append(
            Group(
                tuple(name for name, _ in wanted[run]),
                values[mine],
                bounds - mine.start if mine.start else bounds,
                inverses[first],
                None if weights is None else weights[mine],
            )
        )
    return tuple(groups)


def _runs(places: Sequence[int], strides: Sequence[int], inverses: Sequence[Tensor | None]) -> Iterator[slice]:
    """Cuts `places` where a feature does not follow the one before it, or repeats in another way."""

    def alike(a: Tensor | None, b: Tensor | None) -> bool:
        return a is b or (a is not None and b is not None and torch.equal(a, b))

    start = 0
    for i, (here, after) in enumerate(pairwise(places), 1):
        follows = after == here + 1 and strides[here] == strides[after]
        if not (follows and alike(inverses[here], inverses[after])):
            yield slice(start, i)
            start = i
    if places:
        yield slice(start, len(places))


def _keys(kjt: KeyedJaggedTensor) -> Tensor:
    values: Tensor = kjt.values()
    if len(values) and (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool):
        raise BatchError(f"Keys are whole numbers; the values of the KeyedJaggedTensor are {values.dtype}.")
    return values.cpu().long()


def _key_weights(weights: Tensor, count: int) -> Tensor:
    if weights.requires_grad:
        raise BatchError(
            "The weights of the KeyedJaggedTensor take gradients, and lookups give none to weights; "
            "detach them, or apply them to the embeddings yourself."
        )
    if len(weights) != count:
        raise BatchError(f"The KeyedJaggedTensor has {len(weights)} weights for {count} values; each value needs one.")
    return weights.cpu()


def _offsets_of(kjt: KeyedJaggedTensor, strides: Sequence[int]) -> Tensor:
    given: Tensor = kjt.offsets().cpu().long()
    offsets = given if len(given) else torch.zeros(1, dtype=torch.int64)
    if len(offsets) - 1 != sum(strides):
        counts = ", ".join(f"{key} {stride}" for key, stride in zip(kjt.keys(), strides, strict=True))
        raise BatchError(
            f"The KeyedJaggedTensor has {len(offsets) - 1} bags, but strides for {sum(strides)} ({counts})."
        )
    return offsets


def _inverses(kjt: KeyedJaggedTensor) -> list[Tensor | None]:
    """For each key of `kjt` which of its bags every sample has; None: each its own."""
    keys, strides, given = list(kjt.keys()), kjt.stride_per_key(), kjt.inverse_indices_or_none()
    if given is None:
        if len(set(strides)) > 1:
            counts = ", ".join(f"{key} {stride}" for key, stride in zip(keys, strides, strict=True))
            raise BatchError(
                f"The features of the KeyedJaggedTensor have different numbers of samples ({counts}), and "
                f"it has no inverse_indices to say which belong together."
            )
        return [None] * len(keys)
    inverse = dict(zip(given[0], given[1].cpu().long(), strict=True))
    missing = [key for key in keys if key not in inverse]
    if missing:
        raise BatchError(f'The inverse_indices of the KeyedJaggedTensor lack feature "{missing[0]}".')
    return [inverse[key] for key in keys]


def _offsets(groups: Sequence[Group]) -> Tensor:
    """The offsets of all groups' bags in their values, one group after the other."""
    if len(groups) == 1:
        return groups[0].offsets
    starts = [0, *accumulate(len(group.values) for group in groups)]
    ends = [group.offsets[1:] + start for group, start in zip(groups, starts, strict=False)]
    return torch.cat([torch.zeros(1, dtype=torch.int64), *ends])


def _cat(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=dtype), *parts])
