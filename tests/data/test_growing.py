"""Logs that grow: every sample once, in order, from wherever the state says."""

import json
import sys
import types

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from hotrow.data import Column, Schema
from hotrow.data.folder_log import FolderLog
from hotrow.data.growing import Follow
from hotrow.data.kafka import Confluent, KafkaLog, Message
from hotrow.errors import DataError, SettingsError

LOG = Schema(
    label="click",
    dense=("price",),
    features=(
        Column(name="item", column="item_id"),
        Column(name="tags", column="labels", kind="keys", max_length=2),
    ),
)
SCHEMA = LOG.prepared()


def rows(first, count):
    at = np.arange(first, first + count)
    return pa.table(
        {
            "click": (at % 2).astype(np.int64),
            "price": at * 0.5,
            "item_id": [f"i{a}" for a in at],
            "labels": [[int(a), int(a) + 1, int(a) + 2] for a in at],
        }
    )


def put(folder, name, table):
    pq.write_table(table, folder / f".{name}")
    (folder / f".{name}").rename(folder / name)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "schema.json").write_text(LOG.to_json())
    return tmp_path / "in"


def follow(folder, batch_size=4, state=None, **settings):
    log = FolderLog(Follow(path=str(folder), **settings), SCHEMA, batch_size)
    log.restore(state or {})
    return log


def prices(batches):
    return (np.concatenate([b.samples["price"].to_numpy() for b in batches]) * 2).astype(int).tolist()


def test_files_come_in_the_order_of_their_names_each_once(folder):
    put(folder, "b.parquet", rows(10, 6))
    put(folder, "a.parquet", rows(0, 10))
    log = follow(folder)
    batches = list(log.read())
    assert [len(b.samples) for b in batches] == [4, 4, 2, 4, 2]
    assert prices(batches) == list(range(16))
    assert batches[0].samples["tags"].to_pylist()[3] == [4, 5]
    for batch in batches:
        log.trained(batch)
    assert not log.arrived()
    put(folder, "0-late.parquet", rows(16, 3))
    assert log.arrived()
    assert prices(list(log.read())) == [16, 17, 18]


def test_what_arrives_while_it_reads_is_read_too(folder):
    put(folder, "a.parquet", rows(0, 4))
    log = follow(folder)
    reading = log.read()
    first = next(reading)
    put(folder, "b.parquet", rows(4, 4))
    assert prices([first, *reading]) == list(range(8))


@pytest.mark.parametrize("done", range(6))
def test_the_state_after_any_batch_leads_to_the_next_sample(folder, done):
    put(folder, "a.parquet", rows(0, 10))
    put(folder, "b.parquet", rows(10, 6))
    log = follow(folder)
    lines = []
    for batch in [*log.read()][:done]:
        lines += log.trained(batch)
    state = json.loads(json.dumps(log.state()))
    again = follow(folder, state=state)
    assert prices(list(log.read())) == prices(list(again.read())) if done < 5 else not again.arrived()
    for batch in again.read():
        lines += again.trained(batch)
    assert lines == [
        {"file": "a.parquet", "samples": 10, "set_aside": 0},
        {"file": "b.parquet", "samples": 6, "set_aside": 0},
    ]


def test_what_was_read_and_not_trained_on_comes_again(folder):
    put(folder, "a.parquet", rows(0, 10))
    log = follow(folder)
    log.trained(next(log.read()))
    assert prices(list(log.read())) == list(range(4, 10))


def test_files_being_written_are_not_looked_at(folder):
    for name in (".a.parquet", "_a.parquet", "a.parquet.tmp", "a.json"):
        (folder / name).write_bytes(b"half a fi")
    assert not follow(folder).arrived()


def test_text_files_packed_or_not_are_read_as_parquet_is(folder):
    table = rows(0, 9)
    text = pa.table({**{n: table[n] for n in ("click", "price", "item_id")}, "labels": ["1 2"] * 9})
    pa.csv.write_csv(text.slice(0, 5), folder / "a.csv")
    with pa.CompressedOutputStream(str(folder / "b.csv.gz"), "gzip") as out:
        pa.csv.write_csv(text.slice(5), out)
    batches = list(follow(folder).read())
    assert prices(batches) == list(range(9))
    keys = pa.concat_tables([b.samples for b in batches])["item"]
    put(folder, "c.parquet", table)
    assert keys.equals(pa.concat_tables([b.samples for b in list(follow(folder).read())[3:]])["item"])


def test_a_name_is_forgotten_when_its_file_is_gone(folder):
    put(folder, "a.parquet", rows(0, 4))
    log = follow(folder)
    log.trained(next(log.read()))
    assert list(log.state()["done"]) == ["a.parquet"]
    (folder / "a.parquet").unlink()
    assert log.state()["done"] == {}


def test_a_file_that_changes_after_it_was_trained_on_is_said_once(folder):
    put(folder, "a.parquet", rows(0, 4))
    log = follow(folder)
    log.trained(next(log.read()))
    put(folder, "a.parquet", rows(0, 40))
    assert not log.arrived()
    assert not log.arrived()
    (said,) = log.notes
    assert "a.parquet had" in said and "is not looked at" in said


def test_what_cannot_be_used_is_refused_with_its_place_or_set_aside(folder):
    bad = rows(0, 5).set_column(1, "price", pa.array(["1", "2", "x", "4", "5"]))
    put(folder, "a.parquet", bad)
    put(folder, "b.parquet", rows(5, 3))
    with pytest.raises(DataError, match=r'a\.parquet, row 3: column "price" holds \'x\''):
        list(follow(folder).read())
    log = follow(folder, bad="skip")
    lines = [line for batch in log.read() for line in log.trained(batch)]
    assert [(line["file"], line["samples"], line["set_aside"]) for line in lines] == [
        ("a.parquet", 4, 1),
        ("b.parquet", 3, 0),
    ]
    (folder / "c.parquet").write_bytes(b"PAR1 no such thing")
    with pytest.raises(DataError, match="not a whole Parquet file"):
        list(follow(folder, state=log.state()).read())
    assert list(log.read()) == []
    assert "not a whole Parquet file" in log.notes[0]


def test_a_file_of_nothing_but_bad_rows_is_done_and_told_without_a_next_one(folder):
    put(folder, "a.parquet", rows(0, 2).set_column(0, "click", pa.array([5.0, 7.0])))
    log = follow(folder, bad="skip")
    assert list(log.read()) == []
    assert log.rest() == [{"file": "a.parquet", "samples": 0, "set_aside": 2}] and log.rest() == []
    assert list(log.state()["done"]) == ["a.parquet"] and not log.arrived()
    put(folder, "b.parquet", rows(2, 2))
    (batch,) = log.read()
    assert prices([batch]) == [2, 3]
    assert log.trained(batch) == [{"file": "b.parquet", "samples": 2, "set_aside": 0}] and log.rest() == []


@pytest.mark.parametrize("schema", ["own", "none"])
@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.csv.gz", "a.tsv"])
def test_a_file_of_0_bytes_is_refused_or_set_aside(folder, name, schema):
    if schema == "none":
        (folder / "schema.json").unlink()
    (folder / name).write_bytes(b"")
    with pytest.raises(DataError, match=f"{name} is empty.*--bad skip"):
        list(follow(folder).read())
    log = follow(folder, bad="skip")
    assert list(log.read()) == [] and not log.arrived()
    assert len(log.notes) == 1 and f"{name} is empty" in log.notes[0]
    assert log.rest() == [{"file": name, "samples": 0, "set_aside": 0}]


def test_a_log_of_other_columns_is_refused(folder, tmp_path):
    with pytest.raises(DataError, match="There is no folder"):
        follow(tmp_path / "nowhere")
    other = LOG.model_copy(update={"dense": ()})
    (folder / "schema.json").write_text(other.to_json())
    with pytest.raises(SettingsError, match=r"another log than the data set was prepared from: dense is \(\) there"):
        follow(folder)
    (folder / "schema.json").unlink()
    put(folder, "a.parquet", rows(0, 3))
    with pytest.raises(DataError, match='no column "item"'):
        list(follow(folder).read())
    (folder / "b.csv").write_text("user,item,rating,timestamp\n1,2,3,4\n")
    (folder / "a.parquet").unlink()
    with pytest.raises(SettingsError, match="bare events"):
        list(follow(folder).read())


def test_a_checkpoint_in_the_middle_of_a_file_that_is_gone_says_so(folder):
    put(folder, "a.parquet", rows(0, 8))
    log = follow(folder)
    log.trained(next(log.read()))
    state = log.state()
    (folder / "a.parquet").unlink()
    with pytest.raises(DataError, match="is gone, and the checkpoint stands after 4 of its samples"):
        follow(folder, state=state)


class Topic:
    """A topic of two partitions, held in memory; gives at most three messages at a time."""

    def __init__(self, *partitions):
        self.partitions, self.next = partitions, None
        self.closed = False

    def begin(self, offsets):
        self.next = [offsets.get(p, 0) for p in range(len(self.partitions))]

    def poll(self, most, seconds):
        found = []
        for p, values in enumerate(self.partitions):
            while self.next[p] < len(values) and len(found) < min(most, 3):
                found.append(Message(p, self.next[p], values[self.next[p]]))
                self.next[p] += 1
        return found

    def close(self):
        self.closed = True


def messages(first, count):
    return [json.dumps(row).encode() for row in rows(first, count).to_pylist()]


def topic_log(topic, tmp_path, state=None, **settings):
    (tmp_path / "log.json").write_text(LOG.to_json())
    log = KafkaLog(
        Follow(path="kafka://here:9092/clicks", columns=tmp_path / "log.json", **settings), SCHEMA, 4, client=topic
    )
    log.restore(state or {})
    return log


def test_a_topic_gives_every_message_once_and_goes_on_at_its_offsets(tmp_path):
    partitions = messages(0, 5), messages(5, 4)
    log = topic_log(Topic(*partitions), tmp_path)
    batches = list(log.read())
    assert sorted(prices(batches)) == list(range(9))
    assert not log.arrived()
    for batch in batches[:2]:
        (line,) = log.trained(batch)
    assert line["samples"] == 3
    state = json.loads(json.dumps(log.state()))
    again = topic_log(Topic(*partitions), tmp_path, state=state)
    assert sorted(prices(list(again.read()))) == [6, 7, 8]
    partitions[0].extend(messages(9, 2))
    assert prices(list(again.read())) == [9, 10]
    again.close()
    assert again._client.closed


def test_a_message_that_cannot_be_used_is_refused_with_its_place_or_set_aside(tmp_path):
    wrong = [b"{no json", b"[1]", *messages(0, 1), b'{"click": 2, "price": 1.0, "item_id": "a", "labels": []}']
    with pytest.raises(DataError, match="Topic clicks, partition 0, offset 0: this is no JSON object"):
        list(topic_log(Topic(wrong), tmp_path).read())
    with pytest.raises(DataError, match=r'partition 0, offset 3: column "click" holds 2'):
        list(topic_log(Topic(wrong), tmp_path, state={"offsets": {"0": 2}}).read())
    (batch, *_) = topic_log(Topic(wrong), tmp_path, bad="skip").read()
    assert len(batch.samples) == 1
    mixed = [b'{"click": 1, "price": 1, "item_id": 1}', b'{"click": 1, "price": 1, "item_id": [2]}']
    with pytest.raises(DataError, match="do not have columns of one kind"):
        list(topic_log(Topic(mixed), tmp_path).read())
    few = topic_log(Topic([b'{"click": 1, "item_id": "a"}']), tmp_path)
    (batch,) = few.read()
    assert batch.samples["price"].to_pylist() == [0.0]
    assert batch.samples["tags"].to_pylist() == [[]]


def test_messages_set_aside_count_with_the_next_samples_or_by_themselves(tmp_path):
    bad = [b"{no json"] * 3
    log = topic_log(Topic([*bad, *messages(0, 2)]), tmp_path, bad="skip")
    (batch,) = log.read()
    assert log.trained(batch) == [{"offsets": {"0": 5}, "samples": 2, "set_aside": 3}] and log.rest() == []
    alone = topic_log(Topic(bad), tmp_path, bad="skip")
    assert list(alone.read()) == []
    assert alone.rest() == [{"offsets": {"0": 3}, "samples": 0, "set_aside": 3}] and alone.rest() == []
    assert alone.state() == {"offsets": {"0": 3}}


def test_addresses_and_missing_clients_are_said_in_a_sentence(monkeypatch):
    with pytest.raises(SettingsError, match="a topic is written"):
        _ = Follow(path="kafka://nothing").topic
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(SettingsError, match="pip install confluent-kafka"):
        Confluent("here:9092", "clicks")


def test_the_adapter_asks_the_client_for_all_partitions_and_never_commits(monkeypatch):
    """By a stand-in with the names of confluent-kafka that the adapter uses."""
    asked = {}

    class Said:
        def __init__(self, partition, offset, value, error=None):
            self._all = (partition, offset, value, error)

        partition, offset, value, error = (lambda self, i=i: self._all[i] for i in range(4))

    class Wrong(Exception):
        _PARTITION_EOF = -191

        def code(self):
            return self.args[0]

    class Consumer:
        def __init__(self, settings):
            asked["settings"] = settings

        def list_topics(self, topic, timeout):
            return types.SimpleNamespace(topics={topic: types.SimpleNamespace(error=None, partitions={0: 1, 1: 1})})

        def assign(self, places):
            asked["places"] = places

        def consume(self, most, timeout):
            asked["most"] = most
            return asked["given"]

        def close(self):
            asked["closed"] = True

    stand_in = types.SimpleNamespace(
        Consumer=Consumer,
        KafkaException=Wrong,
        KafkaError=Wrong,
        OFFSET_BEGINNING=-2,
        TopicPartition=lambda *place: place,
    )
    monkeypatch.setitem(sys.modules, "confluent_kafka", stand_in)
    client = Confluent("here:9092", "clicks")
    assert asked["settings"]["enable.auto.commit"] is False
    client.begin({1: 7})
    assert asked["places"] == [("clicks", 0, -2), ("clicks", 1, 7)]
    asked["given"] = [Said(1, 7, b"{}"), Said(0, 0, None, Wrong(-191))]
    assert client.poll(5, 0.1) == [Message(1, 7, b"{}")]
    asked["given"] = [Said(0, 0, None, Wrong(3))]
    with pytest.raises(DataError, match="topic clicks cannot be read"):
        client.poll(5, 0.1)
    client.close()
    assert asked["closed"]
