"""A Kafka topic of JSON objects, one a sample, as a log that grows (pip install confluent-kafka).

The place in the log is the next offset of each partition, and it is kept in the run's checkpoints, not with the broker:
who resumes from a checkpoint reads what came after it, whatever was read since. Messages of a partition are trained on
in their order. A batch is what has come, at most `batch_size` messages of it. A column that no message of a batch has
counts as missing in all of them, for senders leave out what is null.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.json

from hotrow.data.convert import BadRows, Chunk, convert
from hotrow.data.growing import Arrived, Follow, GrowingLog, check_same, clustered
from hotrow.data.schema import Schema
from hotrow.errors import DataError, SettingsError


class Message(NamedTuple):
    """What one message holds, and where it stands."""

    partition: int
    offset: int
    value: bytes


class Client(Protocol):
    """What is needed of a Kafka client."""

    def begin(self, offsets: Mapping[int, int]) -> None:
        """Reads every partition from its offset on, from its first message where none is given."""

    def poll(self, most: int, seconds: float) -> list[Message]:
        """At most so many messages, once they are there or the time is over; none if nothing has come."""

    def close(self) -> None: ...


class Confluent:
    """confluent-kafka's consumer; never commits, for checkpoints know where the run stands."""

    def __init__(self, servers: str, topic: str) -> None:
        try:
            import confluent_kafka
        except ImportError:
            raise SettingsError(
                "Following a Kafka topic needs a client that is not installed: pip install confluent-kafka"
            ) from None
        self._kafka, self._topic = confluent_kafka, topic
        settings = {"bootstrap.servers": servers, "group.id": "hotrow", "enable.auto.commit": False}
        self._consumer = confluent_kafka.Consumer(settings)

    def begin(self, offsets: Mapping[int, int]) -> None:
        try:
            found = self._consumer.list_topics(self._topic, timeout=30).topics[self._topic]
        except self._kafka.KafkaException as error:
            raise DataError(f"The topic {self._topic} cannot be read: {error}.") from None
        if found.error is not None or not found.partitions:
            raise DataError(f"There is no topic {self._topic} on these servers: {found.error or 'it is empty'}.")
        first = self._kafka.OFFSET_BEGINNING
        places = [self._kafka.TopicPartition(self._topic, p, offsets.get(p, first)) for p in found.partitions]
        self._consumer.assign(places)

    def poll(self, most: int, seconds: float) -> list[Message]:
        messages = []
        for message in self._consumer.consume(most, timeout=seconds):
            if message.error() is not None:
                if message.error().code() == self._kafka.KafkaError._PARTITION_EOF:
                    continue
                raise DataError(f"The topic {self._topic} cannot be read: {message.error()}.")
            messages.append(Message(message.partition(), message.offset(), message.value() or b""))
        return messages

    def close(self) -> None:
        self._consumer.close()


class KafkaLog(GrowingLog):
    """The messages of a topic. `client` stands for confluent-kafka's where another is wanted."""

    def __init__(self, settings: Follow, schema: Schema, batch_size: int, client: Client | None = None) -> None:
        super().__init__(schema, batch_size)
        assert settings.topic is not None
        servers, self.topic = settings.topic
        self._settings = settings
        self._log = schema if settings.columns is None else Schema.read(settings.columns)
        check_same(self._log, schema, str(settings.columns))
        self._client: Client = client or Confluent(servers, self.topic)
        self._offsets: dict[int, int] = {}
        self._waiting: list[Message] = []
        self._begun = False
        self._rest: tuple[dict[int, int], int] = {}, 0  # offsets behind messages set aside, and how many these were

    def arrived(self) -> bool:
        self._begin()
        if not self._waiting:
            self._waiting = self._client.poll(self.batch_size, self._settings.look_every)
        return bool(self._waiting)

    def read(self) -> Iterator[Arrived]:
        self._begin()
        offsets, aside = dict[int, int](), 0
        while self.arrived():
            messages, self._waiting = self._waiting, []
            offsets = offsets | {m.partition: m.offset + 1 for m in messages}
            bad = BadRows(self._settings.bad)
            samples = self._samples(messages, bad)
            aside += bad.skipped
            if len(samples):
                yield Arrived(clustered(samples, self.schema), (offsets, len(samples), aside))
                offsets, aside = {}, 0
            elif bad.examples:
                self.notes.append(f"{bad.skipped} messages were set aside. For example: {bad.examples[0]}")

        self._rest = offsets, aside

    def rest(self) -> list[dict[str, Any]]:
        (offsets, aside), self._rest = self._rest, ({}, 0)
        return self._done(offsets, 0, aside) if offsets else []

    def trained(self, arrived: Arrived) -> list[dict[str, Any]]:
        return self._done(*arrived.upto)

    def _done(self, offsets: Mapping[int, int], samples: int, aside: int) -> list[dict[str, Any]]:
        self._offsets |= offsets
        return [{"offsets": {str(p): o for p, o in offsets.items()}, "samples": samples, "set_aside": aside}]

    def state(self) -> dict[str, Any]:
        return {"offsets": {str(partition): offset for partition, offset in self._offsets.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._offsets = {int(partition): offset for partition, offset in state.get("offsets", {}).items()}

    def close(self) -> None:
        self._client.close()

    def _begin(self) -> None:
        if not self._begun:
            self._client.begin(self._offsets)
            self._begun = True

    def _samples(self, messages: Sequence[Message], bad: BadRows) -> pa.Table:
        rows, messages = self._parsed(messages, bad)

        def place(i: int) -> str:
            return self._place(messages[i])

        for name in self._log.columns:
            if name not in rows.schema.names:
                rows = rows.append_column(name, pa.nulls(len(rows)))
        made = [
            convert(Chunk(batch, place), self._log, self.schema, bad)
            for batch in rows.combine_chunks().to_batches()  # one, or none where nothing is left
        ]
        return pa.Table.from_batches(made) if made else pa.table({})

    def _parsed(self, messages: Sequence[Message], bad: BadRows) -> tuple[pa.Table, Sequence[Message]]:
        """The messages as rows, all at once; one by one only where that fails, to find the one at fault."""
        try:
            rows = _read_json(m.value for m in messages)
            if len(rows) == len(messages):
                return rows, messages
        except pa.ArrowInvalid:
            pass
        good, wrong = [], []
        for message in messages:
            try:
                value = json.loads(message.value)
                if not isinstance(value, dict):
                    raise ValueError("it holds something else than an object")
                good.append(message._replace(value=json.dumps(value).encode()))
            except ValueError as error:
                wrong.append(f"{self._place(message)}: this is no JSON object: {error}.")
        if wrong:
            bad.refuse_or_skip(lambda i: wrong[i], len(wrong), "no JSON object")
        try:
            return (_read_json(m.value for m in good) if good else pa.table({})), good
        except pa.ArrowInvalid as error:
            sentence = f"{self._place(good[0])} and the messages after it do not have columns of one kind: {error}."
            bad.refuse_or_skip(lambda i: sentence, len(good), "columns of several kinds", shown=1)
            return pa.table({}), []

    def _place(self, message: Message) -> str:
        return f"Topic {self.topic}, partition {message.partition}, offset {message.offset}"


def _read_json(values: Any) -> pa.Table:
    text = b"\n".join(values) + b"\n"
    options = pyarrow.json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    return pyarrow.json.read_json(pa.BufferReader(text), read_options=options)
