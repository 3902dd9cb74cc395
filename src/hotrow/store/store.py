"""`RowStore`: the rows of one table in this process's memory, native and multi-threaded.

Keys are any int64. A row is one record of key, clock, last use, use count, optimizer state and values, found
through an index of cache-line buckets: 26 to 30 bytes a row beyond values and state. All calls take whole
batches, use every core and release the GIL; several Python threads may call at once. The batch functions
take several tables in one call, so that 26 small tables cost one call and not 26.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hotrow import _native
from hotrow.errors import StoreError
from hotrow.store.folder import lock_rows, open_rows
from hotrow.store.optimizers import Adagrad, Adam, Momentum, RowWiseAdagrad
from hotrow.table import ByCount, ByProbability, Fill, Normal, Table, Uniform

Keys = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Columns = dict[str, npt.NDArray[Any]]
Slots = _native.Slots  # where a fetch found its rows

_OPTIMIZERS = ("sgd", "momentum", "adagrad", "rowwise_adagrad", "adam")
_INITS = ("uniform", "normal", "fill")


class Cut(IntEnum):
    """What a cut holds: all rows, those changed since the last cut, or all without being the base of the next."""

    FULL = 0
    CHANGED = 1
    PEEK = 2


class Moment(Protocol):
    """A consistent cut of a table's rows, to be read chunk by chunk and ended."""

    @property
    def cut_steps(self) -> int: ...
    def read_snapshot(self, most: int) -> Columns: ...
    def cut_erased(self) -> Keys: ...
    def cut_sketch(self) -> npt.NDArray[np.uint8]: ...
    def end_snapshot(self, kept: bool) -> None: ...


class Rows(Protocol):
    """What snapshots, checkpoints and changes of plan need of whoever holds a table's rows in this process."""

    table: Table
    last_cut: str | None

    def __len__(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def begin_cut(self, cut: Cut) -> Moment: ...
    def is_of(self, moment: Moment) -> bool: ...
    def tracks_erased(self) -> bool: ...
    def settle(self, steps: int, cut: str, sketch: npt.NDArray[np.uint8] | None) -> None: ...
    def set_steps(self, steps: int) -> None: ...
    def clear(self) -> None: ...
    def erase(self, keys: Keys) -> int: ...
    def take(self, keys: Keys) -> Columns: ...
    def import_(self, columns: Mapping[str, npt.NDArray[Any]]) -> None: ...


class RowStore:
    """One table's rows. `seed` and the table's name decide what new rows start from.

    With a `folder` they are in files mapped from there, and outlive the process: opened again, the store holds what
    every call that returned had made, and each row whole. All rows then count as changed since the last snapshot, so
    the next one is a full one.
    """

    def __init__(self, table: Table, seed: int = 0, folder: Path | None = None) -> None:
        self.table, self.seed, self.folder = table, seed, folder
        self._lock = None if folder is None else lock_rows(folder)
        self.native = self._open()
        self.recovered = len(self)  # rows that an earlier process left
        self.last_cut: str | None = None  # the snapshot that a cut of changes builds on

    def __len__(self) -> int:
        return int(self.native.rows())

    @property
    def bytes(self) -> int:
        """Memory of rows, state and index."""
        return int(self.native.bytes())

    @property
    def steps(self) -> int:
        """Updates applied so far: what Adam corrects its bias by."""
        return int(self.native.steps)

    @steps.setter
    def steps(self, steps: int) -> None:
        self.native.steps = steps

    def set_steps(self, steps: int) -> None:
        """Takes the table as having had so many updates: what one has to know that gets its rows in mid-run."""
        self.steps = steps

    def fetch(self, keys: Keys, step: int) -> Floats:
        """The rows of `keys` for training at `step`: counts their use and makes new ones, as admission has it."""
        rows = np.empty((len(keys), self.table.dim), np.float32)
        fetch([self], [keys], [None], rows.reshape(-1), [0], step)
        return rows

    def read(self, keys: Keys, step: int = 0) -> Floats:
        """The rows of `keys` as they are; changes nothing. A key without a row reads as it would start."""
        rows = np.empty((len(keys), self.table.dim), np.float32)
        read([self], [keys], [None], rows.reshape(-1), [0], step)
        return rows

    def update(self, keys: Keys, grads: Floats, lr: float, push: _native.Push | None = None) -> None:
        """Applies the table's optimizer once, with one gradient for each key. A key without a row loses its own.

        With `push`, a journal's ticket's, a durable store passes over what that push did before its process died.
        """
        if grads.shape != (len(keys), self.table.dim):
            raise StoreError(
                f"Table {self.table.name}: gradients are {list(grads.shape)}, "
                f"but {len(keys)} keys of dim {self.table.dim} were given."
            )
        update([self], [keys], [None], np.ascontiguousarray(grads).reshape(-1), [0], [lr], None, push=push)

    def contains(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which of `keys` have a row."""
        out = np.empty(len(keys), np.bool_)
        self.native.contains(np.ascontiguousarray(keys), out)
        return out

    def write(self, keys: Keys, values: Floats, step: int = 0) -> None:
        """Sets the rows of `keys`, making those that are not there: as new, with fresh state, last used at `step`."""
        n, o = len(keys), self.table.optimizer
        if values.shape != (n, self.table.dim):
            raise StoreError(
                f"Table {self.table.name}: {n} keys need rows [{n}, {self.table.dim}], not {list(values.shape)}."
            )
        bits = np.ascontiguousarray(values, np.float32)
        if self.table.dtype == "bfloat16":
            import torch  # here, so that a shard starts without it

            bits = torch.from_numpy(bits).bfloat16().view(torch.uint16).numpy()
        start = o.initial if isinstance(o, (Adagrad, RowWiseAdagrad)) else 0.0
        zeros = np.zeros(n, np.uint32)
        state = np.full((n, o.state_dim(self.table.dim)), start, np.float32)
        self.import_(
            {
                "keys": keys,
                "values": bits,
                "state": state,
                "clocks": zeros,
                "uses": zeros,
                "last": np.full(n, step, np.uint32),
            }
        )

    def erase(self, keys: Keys) -> int:
        """Removes the rows of `keys`; says how many there were."""
        return int(self.native.erase(np.ascontiguousarray(keys)))

    def initial(self, keys: Keys) -> Floats:
        """What the rows of `keys` start from."""
        rows = np.empty((len(keys), self.table.dim), np.float32)
        self.native.initial(np.ascontiguousarray(keys), rows)
        return rows

    def export(self, chunk: int = 1 << 17) -> Iterator[Columns]:
        """All rows as columns, chunk by chunk: one moment's rows, whatever happens meanwhile.

        Columns are keys, values, state (flat), clocks, uses and last; bfloat16 values come as their bits. It
        has no effect on what the next incremental snapshot holds.
        """
        native = self.begin_cut(Cut.PEEK)
        finished = False
        try:
            while len((columns := native.read_snapshot(chunk))["keys"]):
                yield columns
            finished = True
        finally:
            native.end_snapshot(finished)

    def copy_to(self, other: RowStore) -> None:
        """Gives another store of the same table, which is empty, all that is here."""
        native = self.begin_cut(Cut.PEEK)
        try:
            while len((columns := native.read_snapshot(1 << 17))["keys"]):
                other.import_(columns)
            other.steps = int(native.cut_steps)
            if len(sketch := native.cut_sketch()):
                other.native.set_sketch(sketch)
        finally:
            native.end_snapshot(True)

    def take(self, keys: Keys) -> Columns:
        """The rows of those of `keys` that have one, as `export` gives them; they are gone here afterwards."""
        return self.native.rows_of(np.ascontiguousarray(keys), True)

    def begin_cut(self, cut: Cut) -> _native.Store:
        """Begins a consistent cut; its native store is to be read by `read_snapshot` and told `end_snapshot`."""
        try:
            self.native.begin_snapshot(cut)
        except RuntimeError:
            raise StoreError(f"Table {self.table.name}: a snapshot or export of it is already under way.") from None
        return self.native

    def is_of(self, moment: Moment) -> bool:
        """Whether a cut was made of the rows that are here now, and not before `clear`."""
        return moment is self.native

    def tracks_erased(self) -> bool:
        """Whether everything erased since the last cut is known, so that one of changes can be taken."""
        return self.native.tracks_erased()

    def settle(self, steps: int, cut: str, sketch: npt.NDArray[np.uint8] | None) -> None:
        """Takes the rows just restored as those of snapshot `cut`, made after `steps` updates."""
        self.steps = steps
        self.native.settle()
        self.last_cut = cut
        if sketch is not None:
            self.native.set_sketch(sketch)

    def clear(self) -> None:
        """Forgets every row. A cut under way still gives what it was of."""
        self.native = self._open(fresh=True)
        self.last_cut = None

    def close(self) -> None:
        """Lets go of the folder, so that it can be opened again; the rows stay there. The store is of no use then."""
        if self._lock is not None:
            del self.native
            self._lock.release()
            self._lock = None

    def _open(self, fresh: bool = False) -> _native.Store:
        settings = _native_settings(self.table, self.seed)
        if self.folder is None:
            return _native.Store(**settings)
        return open_rows(self.folder, self.table, self.seed, settings, fresh)

    def import_(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Writes rows as `export` gave them, over those that are there."""
        flat = {name: np.ascontiguousarray(column).reshape(-1) for name, column in columns.items()}
        try:
            self.native.import_columns(
                flat["keys"],
                flat["values"].view(np.uint8),
                flat["state"],
                flat["clocks"],
                flat["uses"],
                flat["last"],
            )
        except ValueError as error:
            raise StoreError(f"Table {self.table.name}: {error}.") from None


def fetch(
    stores: Sequence[RowStore],
    keys: Sequence[Keys],
    positions: Sequence[Keys | None],
    rows: Floats,
    starts: Sequence[int],
    step: int,
) -> Slots:
    """Rows of several tables at once, into one flat array.

    The row of `keys[t][i]` goes to `rows[starts[t] + p * dim:]`, p being `positions[t][i]`, or i where there are
    no positions. What is returned makes the update of the same keys faster.
    """
    return _native.fetch([s.native for s in stores], keys, positions, rows, starts, step)


def read(
    stores: Sequence[RowStore],
    keys: Sequence[Keys],
    positions: Sequence[Keys | None],
    rows: Floats,
    starts: Sequence[int],
    step: int,
) -> None:
    """As `fetch`, but nothing changes."""
    _native.read([s.native for s in stores], keys, positions, rows, starts, step)


def update(
    stores: Sequence[RowStore],
    keys: Sequence[Keys],
    positions: Sequence[Keys | None],
    grads: Floats,
    starts: Sequence[int],
    rates: Sequence[float],
    slots: Slots | None,
    places: _native.Places | None = None,
    push: _native.Push | None = None,
) -> None:
    """One optimizer step of several tables at once; gradients lie as rows do in `fetch`.

    With `places` they are summed from the gradients of the batch's results, and `grads` is not looked at. With `push`
    durable tables pass over what it did before its process died; it must come with the same keys and gradients.
    """
    _native.update([s.native for s in stores], keys, positions, grads, starts, rates, slots, places, push)


def salt(seed: int, table: str) -> int:
    """64 bits from seed and table name (FNV-1a over the name's bytes and the seed's)."""
    state = 0xCBF29CE484222325
    for byte in table.encode() + b"\0" + (seed % 2**64).to_bytes(8, "little"):
        state = ((state ^ byte) * 0x100000001B3) % 2**64
    return state


def _native_settings(table: Table, seed: int) -> dict[str, Any]:
    o, init, admission, eviction = table.optimizer, table.init, table.admission, table.eviction
    scale = init.scale if isinstance(init, Uniform) else init.std if isinstance(init, Normal) else 0.0
    return {
        "dim": table.dim,
        "bf16": table.dtype == "bfloat16",
        "optimizer": _OPTIMIZERS.index(o.name),
        "weight_decay": o.weight_decay,
        "clip_value": o.clip_value or 0.0,
        "clip_norm": o.clip_norm or 0.0,
        "bound": o.bound or 0.0,
        "momentum": o.momentum if isinstance(o, Momentum) else 0.0,
        "dampening": o.dampening if isinstance(o, Momentum) else 0.0,
        "nesterov": isinstance(o, Momentum) and o.nesterov,
        "beta1": o.beta1 if isinstance(o, Adam) else 0.0,
        "beta2": o.beta2 if isinstance(o, Adam) else 0.0,
        "eps": o.eps if isinstance(o, (Adagrad, RowWiseAdagrad, Adam)) else 0.0,
        "initial": o.initial if isinstance(o, (Adagrad, RowWiseAdagrad)) else 0.0,
        "init": _INITS.index(init.name),
        "init_scale": init.value if isinstance(init, Fill) else scale,
        "salt": salt(seed, table.name),
        "admit_count": admission.count if isinstance(admission, ByCount) else 0,
        "admit_probability": admission.probability if isinstance(admission, ByProbability) else 0.0,
        "sketch_bytes": admission.bytes if isinstance(admission, ByCount) else 0,
        "capacity": (eviction.capacity or 0) if eviction else 0,
        "lfu": eviction is not None and eviction.policy == "lfu",
        "ttl": (eviction.ttl or 0) if eviction else 0,
    }
