"""What a shard answers to each kind of message. Knows nothing of sockets and threads: a message in, answers out.

A message that cannot be answered is refused with a sentence and counted; nobody else notices. Requests that change
something have a sequence number and are applied once; a push of several ranks is applied when it is the last of its
round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hotrow import _native
from hotrow.errors import HotrowError, StoreError
from hotrow.service.counters import Counters
from hotrow.service.cuts import COLUMNS, Cuts
from hotrow.service.holding import Holding, array_of, shared_in, sum_in_order
from hotrow.service.once import Applied, Begun, Ticket, UnderWay
from hotrow.service.protocol import Array, Kind, Message, ProtocolError, from_json, to_json
from hotrow.service.rounds import Held, Reply, Rounds
from hotrow.store.store import Cut, RowStore

Answer = Callable[[Message], list[Array]]


class Answers:
    """One shard's answers; any thread may ask for one."""

    def __init__(self, holding: Holding, counters: Counters) -> None:
        self.holding, self.counters = holding, counters
        self.rounds, self._cuts = Rounds(), Cuts()
        self._applied: Applied = holding.applied
        self._read: dict[Kind, Answer] = {
            Kind.HELLO: self._hello,
            Kind.PING: lambda _: [],
            Kind.FETCH: holding.fetch,
            Kind.READ: holding.read,
            Kind.ROWS: self._rows,
            Kind.BEGIN_CUT: self._begin_cut,
            Kind.READ_CUT: self._read_cut,
            Kind.STATS: self._stats,
        }
        self._change: dict[Kind, Answer] = {
            Kind.END_CUT: self._end_cut,
            Kind.NAME_CUT: self._name_cut,
            Kind.IMPORT: self._import,
            Kind.ERASE: self._erase,
            Kind.SETTLE: self._settle,
            Kind.CLEAR: self._clear,
            Kind.OWN: self._own,
        }

    def answer(self, message: Message, reply: Reply) -> None:
        """Answers a message by `reply`, at once or, for a push that waits for others, later; never raises."""
        begun = time.perf_counter()
        try:
            self._answer(message, reply)
        except UnderWay:
            self.counters.add("repeats")
        except HotrowError as error:
            self.counters.add("refused")
            reply(Kind.REFUSED, [to_json({"error": str(error)})])
        except (ValueError, KeyError, TypeError, MemoryError) as error:
            self.counters.add("refused")
            reply(Kind.REFUSED, [to_json({"error": f"The message cannot be answered: {error!r}."})])
        self.counters.took(message.kind.name.lower(), time.perf_counter() - begun, message.bytes)

    def _answer(self, message: Message, reply: Reply) -> None:
        if message.kind != Kind.HELLO and message.epoch != self.holding.epoch:
            reply(Kind.STRANGER, [])
        elif message.kind == Kind.PUSH and message.workers > 1:
            self._push_of_rank(message, reply)
        elif message.kind == Kind.PUSH:
            asked, grads = self.holding.push(message)
            ticket = self._begin(message)
            if ticket is not None:
                push = ticket.push
                self._apply(ticket, lambda: self.holding.apply(asked, grads, message.step, push))
            reply(Kind.ANSWER, self.holding.fetch_after(message))
        elif message.kind == Kind.EXCHANGE:
            reply(Kind.ANSWER, [self._exchange(message)])
        elif message.kind in self._change:
            self._change_once(message, reply, self._change[message.kind], repeated=lambda _: [])
        elif message.kind in self._read:
            reply(Kind.ANSWER, self._read[message.kind](message))
        else:
            raise ProtocolError(f"A shard does not answer messages of kind {message.kind.name.lower()}.")

    def _begin(self, message: Message) -> Begun | Ticket | None:
        if message.sequence == 0:
            raise ProtocolError("A request that changes something needs a sequence number.")
        ticket = self._applied.begin(message.client, message.sequence)
        if ticket is None:
            self.counters.add("repeats")
        return ticket

    def _change_once(self, message: Message, reply: Reply, change: Answer, repeated: Answer) -> None:
        ticket, said = self._begin(message), list[Array]()
        if ticket is None:
            said = repeated(message)
        else:  # none of these goes on where it stopped: one that comes again is done from its beginning
            self._apply(ticket, lambda: said.extend(change(message)), untouched=lambda _: True)
        reply(Kind.ANSWER, said)

    @staticmethod
    def _apply(
        ticket: Begun | Ticket, change: Callable[[], None], untouched: Callable[[BaseException], bool] = lambda _: False
    ) -> None:
        """Makes a change; `untouched` says of an error whether it came before a row was touched."""
        try:
            change()
        except BaseException as error:
            if untouched(error):
                ticket.refused()
            else:
                ticket.failed()
            raise
        ticket.done()

    def _push_of_rank(self, message: Message, reply: Reply) -> None:
        self.holding.push(message)  # refused by itself, before it can spoil a round
        round = self.rounds.add(message, reply)
        if round is not None:
            try:
                ticket = self._begin(message)
            except UnderWay:  # all ranks sent it again while it is being applied: answered below, or by who applies it
                self.rounds.put_back(round)
            else:
                self._complete(round, ticket, message)
        if self._applied.was_applied(message.client, message.sequence):
            for push in self.rounds.take(message.client, message.sequence):
                rows = self.holding.fetch_after(push.message)
                push.reply(Kind.ANSWER, [np.empty(0, np.uint8), *rows] if rows else [])
        else:
            reply(Kind.HELD, [])

    def _complete(self, round: list[Held], ticket: Begun | Ticket | None, last: Message) -> None:
        try:
            if ticket is not None:
                push = ticket.push
                self._apply(ticket, lambda: self._apply_round(round, push))
            shared = shared_in([self.holding.push(held.message)[0] for held in round])
            rows = [self.holding.fetch_after(held.message) for held in round]
        except Exception as error:
            for held in round:
                if held.message is not last:  # who came last is told by the caller
                    held.reply(Kind.REFUSED, [to_json({"error": f"The step of all ranks failed: {error!r}."})])
            raise
        for held, of_held, read in zip(round, shared, rows, strict=True):
            held.reply(Kind.ANSWER, [of_held, *read])

    def _apply_round(self, held: list[Held], push: _native.Push | None) -> None:
        asked, grads = sum_in_order([self.holding.push(push.message) for push in held])
        self.holding.apply(asked, grads, held[0].message.step, push)

    def _exchange(self, message: Message) -> Array:
        """What a cache asks, one array of bytes; answered by another."""
        blob, exchange = array_of(message, 0, np.uint8, 1), self.holding.exchange
        ticket, said = self._begin(message), list[Array]()
        if ticket is None:
            return exchange.answer(blob, again=True)
        push = ticket.push
        self._apply(ticket, lambda: said.append(exchange.answer(blob, push=push)), untouched=_not_understood)
        return said[0]

    def _hello(self, message: Message) -> list[Array]:
        """Facts: tables, seed, shard, shards, group; answered by epoch, durable."""
        said = from_json(array_of(message, 0, np.uint8, 1))
        try:
            tables, seed, shard, shards = (
                list(said["tables"]),
                int(said["seed"]),
                int(said["shard"]),
                int(said["shards"]),
            )
            group = bytes.fromhex(said.get("group", ""))
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"A hello cannot be understood: {error!r}.") from None
        self.holding.open(tables, seed, shard, shards)
        if group:
            self.rounds.forget_others(group)
        self.counters.add("hellos")
        return [to_json({"epoch": self.holding.epoch, "durable": self.holding.durable})]

    def _stats(self, message: Message) -> list[Array]:
        tables = {
            store.table.name: {
                "rows": len(store),
                "bytes": store.bytes,
                "steps": store.steps,
                "last_cut": store.last_cut,
                "tracks_erased": store.tracks_erased(),
            }
            for store in self.holding.stores
        }
        said = {"tables": tables, "run": self.holding.run, "held": len(self.rounds), "counters": self.counters.all()}
        return [to_json(said)]

    def _named(self, message: Message) -> tuple[dict[str, Any], RowStore]:
        said = from_json(array_of(message, 0, np.uint8, 1))
        return said, self.holding.store(int(said["table"]))

    def _begin_cut(self, message: Message) -> list[Array]:
        """Facts: table, cut, begun (its name); answered by steps, and the arrays erased and sketch."""
        said, store = self._named(message)
        moment = self._cuts.begin(store, (message.client, int(said["begun"])), Cut(said["cut"]))
        return [to_json({"steps": int(moment.cut_steps)}), moment.cut_erased(), moment.cut_sketch()]

    def _read_cut(self, message: Message) -> list[Array]:
        """Facts: table, begun, chunk, most; answered by the columns of some rows."""
        said, store = self._named(message)
        return self._cuts.read(store, (message.client, int(said["begun"])), int(said["chunk"]), int(said["most"]))

    def _end_cut(self, message: Message) -> list[Array]:
        """Facts: table, begun, kept; answered by current: whether the rows are still those the cut was of."""
        said, store = self._named(message)
        return [to_json({"current": self._cuts.end(store, (message.client, int(said["begun"])), bool(said["kept"]))})]

    def _name_cut(self, message: Message) -> list[Array]:
        """Facts: table, name of the snapshot that the last cut became, or null."""
        said, store = self._named(message)
        store.last_cut = None if said["name"] is None else str(said["name"])
        return []

    def _import(self, message: Message) -> list[Array]:
        """Facts: table; then the columns of rows, as a store exports them."""
        _, store = self._named(message)
        value = np.uint16 if store.table.dtype == "bfloat16" else np.float32
        types = (np.int64, value, np.float32, np.uint32, np.uint32, np.uint32)
        store.import_({c: array_of(message, i + 1, t, 1) for i, (c, t) in enumerate(zip(COLUMNS, types, strict=True))})
        return []

    def _rows(self, message: Message) -> list[Array]:
        """Facts: table; then keys; answered by the columns of those that have a row."""
        _, store = self._named(message)
        columns = store.native.rows_of(np.ascontiguousarray(array_of(message, 1, np.int64, 1)), False)
        return [columns[column] for column in COLUMNS]

    def _erase(self, message: Message) -> list[Array]:
        """Facts: table; then keys; answered by how many had a row."""
        _, store = self._named(message)
        return [to_json({"erased": store.erase(array_of(message, 1, np.int64, 1))})]

    def _settle(self, message: Message) -> list[Array]:
        """Facts: table, steps, name; then the sketch, empty if there is none. Without a name only the steps are set."""
        said, store = self._named(message)
        sketch = array_of(message, 1, np.uint8, 1)
        if said["name"] is None:
            store.set_steps(int(said["steps"]))
            return []
        try:
            store.settle(int(said["steps"]), str(said["name"]), sketch if len(sketch) else None)
        except ValueError as error:
            raise StoreError(f"Table {store.table.name}: {error}.") from None
        return []

    def _clear(self, message: Message) -> list[Array]:
        """Facts: table."""
        self._named(message)[1].clear()
        return []

    def _own(self, message: Message) -> list[Array]:
        """Facts: run, whose rows are here from now on."""
        self.holding.own(str(from_json(array_of(message, 0, np.uint8, 1))["run"]))
        return []


def _not_understood(error: BaseException) -> bool:
    """Whether a cache's request was refused as a whole; what fails in the midst of it, a file, has another error."""
    return isinstance(error, StoreError) and not isinstance(error, _native.FolderError)
