"""`Weight`: a table in a state dict. What is written into it is written to the table's rows.

State dicts of TorchRec are the weights themselves, and code that gathers or loads in place counts on that. Rows lie
elsewhere, so a `Weight` is a copy that knows where it came from: an operation that writes into it, or into a view of
it, gives the rows it touched to the table. It is one way: it does not follow the table as that trains. Clones, and what
is read from a file, are plain tensors. What NumPy writes is not seen, so an array of one is read-only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Write = Callable[[Tensor, int], None]
"""Gives the table these rows, the first of which has this key."""


class Weight(Tensor):
    """The rows of keys 0, 1, ... of a table, `[n, dim]`, or a view of some."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    plain: Tensor
    rows: Tensor
    write: Write

    @staticmethod
    def of(rows: Tensor, write: Write) -> Weight:
        """`rows` are new and contiguous."""
        return _wrapped(rows, rows, write)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        weights: list[Weight] = []

        def plain(given: Any) -> Any:
            if isinstance(given, Weight):
                weights.append(given)
                return given.plain
            return given

        result = func(*tree_map(plain, args), **tree_map(plain, kwargs))
        for weight in _written(func, args, kwargs):
            weight.give_back()

        def again(given: Any) -> Any:
            if not isinstance(given, Tensor):
                return given
            for weight in weights:
                if given is weight.plain:
                    return weight
                if given.untyped_storage()._cdata == weight.plain.untyped_storage()._cdata:
                    return _wrapped(given, weight.rows, weight.write)
            return given

        return tree_map(again, result)

    def give_back(self) -> None:
        """Writes the rows that this view touches to the table."""
        if not self.plain.numel():
            return
        dim, begin = self.rows.shape[1], self.plain.storage_offset()
        steps = zip(self.plain.shape, self.plain.stride(), strict=True)
        last = begin + sum((size - 1) * stride for size, stride in steps)
        first = begin // dim
        self.write(self.rows[first : last // dim + 1], first)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.plain.clone()

    def numpy(self, *, force: bool = False) -> npt.NDArray[Any]:
        array = self.plain.numpy(force=force)
        array.flags.writeable = False
        return array

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("What is written through DLPack would not reach the table's rows: give a clone() instead.")

    def tolist(self) -> Any:
        return self.plain.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.plain)


def _wrapped(plain: Tensor, rows: Tensor, write: Write) -> Weight:
    made: Weight = torch.Tensor._make_subclass(Weight, plain)
    made.plain, made.rows, made.write = plain, rows, write
    return made


def _written(func: Any, args: Any, kwargs: Any) -> list[Weight]:
    """The arguments that an operation writes into."""
    found: list[Weight] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = kwargs.get(argument.name) if argument.name in kwargs or i >= len(args) else args[i]
        found += [one for one in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(one, Weight)]
    return found
