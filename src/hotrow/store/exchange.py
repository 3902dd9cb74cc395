"""`Exchange`: what a cache in front of some stores asks, answered: changes written back, rows given that it lacks.

A request and its answer are one array of bytes each, made and read by the native core; whoever carries them, over a
network or not, looks at nothing in them. Everything in a request is checked before a row is touched.

What is written back is the change of a row and of its optimizer state since the cache took the row over, and it is
added; a cache that is the only one (`sole`) sends the row as it is, and it is taken bit for bit. `tiers/cached.py` says
what training through it is equal to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hotrow import _native
from hotrow.errors import StoreError
from hotrow.store.store import RowStore

Blob = npt.NDArray[np.uint8]


class Exchange:
    """Answers caches for `stores`, in the order in which the caches number their tables.

    It remembers which rows were written back last, in memory alone: after a restart caches check what they hold.
    """

    def __init__(self, stores: Sequence[RowStore]) -> None:
        self._stores = list(stores)
        self._ledger = _native.Ledger()

    def answer(self, request: Blob, *, again: bool = False, push: _native.Push | None = None) -> Blob:
        """The answer to one request; any thread may ask, several at once.

        `again` says that the request came before and its changes are made: they are not made twice, and every row it
        wants is answered as it is now. `push`, a journal's ticket's, does the same for what of a request durable stores
        did before their process died.
        """
        natives = [store.native for store in self._stores]  # a store that is cleared gets another
        try:
            return _native.answer_exchange(natives, self._ledger, np.frombuffer(request, np.uint8), again, push)
        except ValueError as error:
            raise StoreError(f"A cache asked for something that cannot be answered: {error}.") from None
