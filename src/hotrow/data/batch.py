"""`Batch`: deduplicated samples, in the form every later step works on (RecD's inverse keyed jagged tensor).

Features that repeat together form a `Group`. A group holds each distinct sample of its features once, and
one `inverse` that says which of them every sample of the batch is:

    values[L]        the keys of all features, feature after feature, unique sample after unique sample
    offsets[F*S+1]   where in `values` the bag of feature f and unique sample s begins: entry f*S + s
    inverse[B]       for each sample of the batch its unique sample; None if every sample is its own
    weights[L]       a weight for each key, or None
    begins[F*S]      None, or where in `values` each bag begins instead: bags may then overlap, and `offsets` only say
                     how long they are. A history that slides is one stretch of `values` with a window for each sample

Features that seldom repeat stand in a group whose inverse is None: an ordinary keyed jagged tensor. Nothing
is expanded here; `Batch.expand` exists for code that wants every sample spelled out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotrow.errors import BatchError, nearest


class Jagged(NamedTuple):
    """One feature's bags: `values` split at `offsets`, with a weight for each value or None."""

    values: Tensor
    offsets: Tensor
    weights: Tensor | None = None

    @property
    def lengths(self) -> Tensor:
        return self.offsets[1:] - self.offsets[:-1]


@dataclass(frozen=True)
class Group:
    """Features whose samples repeat together: each distinct sample once, and who is which."""

    features: tuple[str, ...]
    values: Tensor
    offsets: Tensor
    inverse: Tensor | None = None
    weights: Tensor | None = None
    begins: Tensor | None = None

    @property
    def unique_size(self) -> int:
        """How many distinct samples there are."""
        return (len(self.offsets) - 1) // len(self.features)

    @property
    def size(self) -> int:
        """How many samples of the batch there are."""
        return self.unique_size if self.inverse is None else len(self.inverse)

    def __getitem__(self, feature: str) -> Jagged:
        """One feature's bags over the unique samples, one after another even where windows overlap."""
        f, s = self.features.index(feature), self.unique_size
        if self.begins is not None:
            values, offsets, weights = self._bags(torch.arange(f * s, (f + 1) * s))
            return Jagged(values, offsets, weights)
        offsets = self.offsets[f * s : (f + 1) * s + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        weights = None if self.weights is None else self.weights[first:last]
        return Jagged(self.values[first:last], offsets - first, weights)

    def check(self) -> None:
        """Raises `BatchError` where the parts do not fit together."""
        if not self.features:
            raise BatchError("A group of a batch has no features.")
        name = ", ".join(self.features)
        check_tensor(self.values, torch.int64, 1, f"values of feature {name}")
        check_tensor(self.offsets, torch.int64, 1, f"offsets of feature {name}")
        count = len(self.features)
        if len(self.offsets) == 0 or (len(self.offsets) - 1) % count:
            raise BatchError(
                f"Feature {name}: {len(self.offsets)} offsets do not divide over {count} features; "
                f"there must be features x samples + 1."
            )
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        if first != 0 or (self.begins is None and last != len(self.values)):
            raise BatchError(
                f"Feature {name}: offsets run from {first} to {last}, but there are {len(self.values)} values."
            )
        offsets = self.offsets.numpy()  # NumPy: a small check should not wait for torch's threads
        self._refuse(offsets[1:] < offsets[:-1], "offsets decrease at sample {sample}; they must never fall")
        if self.begins is not None:
            self._check_begins(offsets, name)
        if self.weights is not None:
            check_tensor(self.weights, torch.float32, 1, f"weights of feature {name}")
            if len(self.weights) != len(self.values):
                raise BatchError(
                    f"Feature {name}: {len(self.weights)} weights for {len(self.values)} values; each value needs one."
                )
            if self.weights.requires_grad:
                raise BatchError(f"Feature {name}: weights of keys get no gradient here; give them detached.")
        if self.inverse is not None:
            check_tensor(self.inverse, torch.int64, 1, f"inverse of feature {name}")
            if len(self.inverse) and not (int(self.inverse.min()) >= 0 and int(self.inverse.max()) < self.unique_size):
                raise BatchError(
                    f"Feature {name}: inverse names unique samples from {int(self.inverse.min())} to "
                    f"{int(self.inverse.max())}, but there are {self.unique_size}."
                )

    def _check_begins(self, offsets: npt.NDArray[np.int64], name: str) -> None:
        assert self.begins is not None
        check_tensor(self.begins, torch.int64, 1, f"begins of feature {name}")
        if len(self.begins) != len(offsets) - 1:
            raise BatchError(f"Feature {name}: {len(self.begins)} begins for {len(offsets) - 1} bags; each needs one.")
        begins, lengths = self.begins.numpy(), offsets[1:] - offsets[:-1]
        outside = (begins < 0) | (begins > len(self.values) - lengths)
        self._refuse(outside, f"the window of sample {{sample}} is not within the {len(self.values)} values")

    def _refuse(self, wrong: npt.NDArray[np.bool_], why: str) -> None:
        """Raises `BatchError` for the first bag that is wrong."""
        if wrong.any():
            feature, sample = divmod(int(np.argmax(wrong)), self.unique_size)
            raise BatchError(f"Feature {self.features[feature]}: {why.format(sample=sample)}.")

    def apart(self) -> Group:
        """The same group with bags one after another: windows that overlap are spelled out, samples are not."""
        if self.begins is None:
            return self
        values, offsets, weights = self._bags(torch.arange(len(self.begins)))
        return Group(self.features, values, offsets, self.inverse, weights)

    def expand(self) -> Group:
        """The same group with every sample spelled out: no inverse and no windows."""
        if self.inverse is None:
            return self.apart()
        bags = (torch.arange(len(self.features))[:, None] * self.unique_size + self.inverse).reshape(-1)
        values, offsets, weights = self._bags(bags)
        return Group(self.features, values, offsets, None, weights)

    def _bags(self, bags: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values, offsets and weights of these bags, one after another."""
        begins = self.offsets[:-1] if self.begins is None else self.begins
        at, offsets = ranges(begins[bags], (self.offsets[1:] - self.offsets[:-1])[bags])
        return self.values[at], offsets, None if self.weights is None else self.weights[at]


@dataclass(frozen=True)
class Batch:
    """Samples to train on or to score. Checked on construction; `BatchError` names the feature at fault.

    `dense` is [B, n], `weights` and `users` are [B], `labels` are [B], or [B, L] where a sample has several; each may
    be None. `users` only groups samples for per-user metrics.
    """

    groups: tuple[Group, ...]
    dense: Tensor | None = None
    labels: Tensor | None = None
    weights: Tensor | None = None
    users: Tensor | None = None
    _where: dict[str, Group] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        where: dict[str, Group] = {}
        for group in self.groups:
            group.check()
            for name in group.features:
                if name in where:
                    raise BatchError(f"Feature {name} stands twice in the batch.")
                where[name] = group
        object.__setattr__(self, "_where", where)
        size = self.size
        for group in self.groups:
            if group.size != size:
                raise BatchError(f"Feature {group.features[0]} has {group.size} samples, the batch has {size}.")
        for name, tensor, dims in (
            ("dense", self.dense, 2),
            ("labels", self.labels, 2 if getattr(self.labels, "ndim", 1) == 2 else 1),
            ("weights", self.weights, 1),
        ):
            if tensor is not None:
                check_tensor(tensor, torch.float32, dims, name)
                if len(tensor) != size:
                    raise BatchError(f"{name} has {len(tensor)} samples, the batch has {size}.")
        if self.users is not None:
            check_tensor(self.users, torch.int64, 1, "users")
            if len(self.users) != size:
                raise BatchError(f"users has {len(self.users)} samples, the batch has {size}.")

    @staticmethod
    def plain(
        features: Mapping[str, Tensor | Sequence[Sequence[int]] | Jagged],
        dense: Tensor | None = None,
        labels: Tensor | None = None,
        weights: Tensor | None = None,
        users: Tensor | None = None,
    ) -> Batch:
        """A batch without deduplication. A feature is a tensor [B] or [B, n] of keys, a list of lists, or `Jagged`."""
        jagged = {name: _jagged(name, given) for name, given in features.items()}
        with_weights = {n: j for n, j in jagged.items() if j.weights is not None}
        without = {n: j for n, j in jagged.items() if j.weights is None}
        groups = tuple(join(part) for part in (without, with_weights) if part)
        return Batch(groups, dense, labels, weights, users)

    @property
    def size(self) -> int:
        """How many samples there are."""
        if self.groups:
            return self.groups[0].size
        for tensor in (self.dense, self.labels):
            if tensor is not None:
                return len(tensor)
        return 0

    def __len__(self) -> int:
        return self.size

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(self._where)

    def group_of(self, feature: str) -> Group:
        """The group that `feature` stands in."""
        if feature not in self._where:
            raise BatchError(f'The batch has no feature "{feature}".{nearest(feature, self._where)}')
        return self._where[feature]

    def __getitem__(self, feature: str) -> Jagged:
        """One feature's bags over the unique samples of its group."""
        return self.group_of(feature)[feature]

    def keys(self, feature: str) -> Tensor:
        """The key of every sample, `[B]`, of a feature that has one key a sample."""
        group, bags = self.group_of(feature), self[feature]
        if len(bags.values) != group.unique_size or not bool((bags.lengths == 1).all()):
            raise BatchError(
                f"Feature {feature} does not have one key in every sample; "
                f'batch.expand()["{feature}"] gives the keys of each.'
            )
        return bags.values if group.inverse is None else bags.values[group.inverse]

    def take(self, samples: Tensor) -> Batch:
        """Some of the samples, by their places, in this order. What they are made of is kept, not copied."""
        inverses = (samples if group.inverse is None else group.inverse[samples] for group in self.groups)
        groups = tuple(replace(group, inverse=of) for group, of in zip(self.groups, inverses, strict=True))
        rest = (self.dense, self.labels, self.weights, self.users)
        return Batch(groups, *(None if tensor is None else tensor[samples] for tensor in rest))

    def expand(self) -> Batch:
        """The same samples with nothing deduplicated."""
        return replace(self, groups=tuple(g.expand() for g in self.groups))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The dense tensors, labels and weights on `device`; keys stay where rows are looked up, on the host."""

        def move(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.to(device, non_blocking=non_blocking)

        return replace(self, dense=move(self.dense), labels=move(self.labels), weights=move(self.weights))

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)


def join(features: Mapping[str, Jagged]) -> Group:
    """One group without an inverse from several features over the same samples."""
    values = torch.cat([j.values for j in features.values()])
    sizes = {name: len(j.offsets) - 1 for name, j in features.items()}
    if len(set(sizes.values())) > 1:
        short = min(sizes, key=lambda n: sizes[n])
        raise BatchError(f"Feature {short} has {sizes[short]} samples, others have {max(sizes.values())}.")
    offsets, start = [torch.zeros(1, dtype=torch.int64)], 0
    for jagged in features.values():
        offsets.append(jagged.offsets[1:] + start)
        start += len(jagged.values)
    weights = [j.weights for j in features.values() if j.weights is not None]
    return Group(tuple(features), values, torch.cat(offsets), None, torch.cat(weights) if weights else None)


def ranges(begins: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The places begin, begin + 1, ... of each range, one range after another, and the offsets between them."""
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    # `item` and `shape`, not `int` and `len`: so torch.export can follow sizes that depend on the data.
    places = torch.arange(offsets[-1].item(), device=lengths.device)
    return places + torch.repeat_interleave(begins - offsets[:-1], lengths, output_size=places.shape[0]), offsets


def _jagged(name: str, given: Tensor | Sequence[Sequence[int]] | Jagged) -> Jagged:
    if isinstance(given, Jagged):
        Group((name,), given.values, given.offsets, None, given.weights).check()
        return given
    if not isinstance(given, Tensor):
        lengths = torch.tensor([0] + [len(bag) for bag in given], dtype=torch.int64)
        try:
            keys = torch.tensor([index(key) for bag in given for key in bag], dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise BatchError(f"feature {name} has keys that are not whole numbers of 64 bits.") from None
        return Jagged(keys, torch.cumsum(lengths, 0))
    check_tensor(given, torch.int64, given.dim() if given.dim() in (1, 2) else 1, f"feature {name}")
    width = 1 if given.dim() == 1 else given.shape[1]
    return Jagged(given.reshape(-1), torch.arange(0, len(given) + 1, dtype=torch.int64) * width)


def check_tensor(tensor: Tensor, dtype: torch.dtype, dims: int, what: str) -> None:
    """Raises `BatchError` for what is not such a tensor."""
    if not isinstance(tensor, Tensor):
        raise BatchError(f"{what} must be a tensor, not {type(tensor).__name__}.")
    if tensor.dtype != dtype:
        raise BatchError(f"{what} must be {_short(dtype)}, not {_short(tensor.dtype)}.")
    if tensor.dim() != dims:
        raise BatchError(f"{what} must have {dims} dimension{'s' * (dims > 1)}, not {tensor.dim()}.")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
