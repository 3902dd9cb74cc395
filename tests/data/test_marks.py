"""Marks: which samples of a split are meant, and what a reader reads when it is told to read only those."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow.data import Column, DataSet, DataSetWriter, Reader, Schema
from hotrow.data.marks import Marks, pieces

BITS = st.lists(st.booleans(), max_size=30)


@given(st.lists(BITS, max_size=4))
def test_marks_give_back_what_was_marked_group_by_group(groups):
    marks = Marks(np.array(group, np.bool_) for group in groups)
    others = marks.others()
    assert [marks.of(i).tolist() for i in range(len(groups))] == groups
    assert [others.of(i).tolist() for i in range(len(groups))] == [[not bit for bit in group] for group in groups]
    assert marks.counts == [sum(group) for group in groups]
    assert marks.samples + others.samples == sum(map(len, groups))


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=6), st.randoms())
def test_pieces_are_the_marked_runs_of_each_session_in_the_order_of_sessions(sessions, random):
    marked = np.array([bit for session in sessions for bit in session])
    begins = np.cumsum([0, *map(len, sessions[:-1])])
    order = list(range(len(sessions)))
    random.shuffle(order)
    found = pieces(marked, begins, np.array(order))
    got = [list(range(a, a + n)) for a, n in zip(found.starts.tolist(), found.counts.tolist(), strict=True)]
    wanted = []
    for s in order:
        run: list[int] = []
        for i, bit in enumerate(sessions[s] + [False]):
            if bit:
                run.append(int(begins[s]) + i)
            elif run:
                wanted.append(run)
                run = []
    assert got == wanted


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """1,000 samples in sessions of about ten and row groups of about a hundred; a sample's key is its number."""
    path = tmp_path_factory.mktemp("marks") / "data"
    schema = Schema(label="y", features=(Column(name="key"), Column(name="who")), session="session", time="time")
    number = np.arange(1000)
    session = np.random.default_rng(0).integers(0, 1000, 100).cumsum().repeat(10)
    columns = {"y": number % 2.0, "key": number, "who": session, "session": session, "time": number}
    with DataSetWriter(path, schema, row_group=100) as writer:
        writer.write("train", pa.table({**columns, "y": columns["y"].astype(np.float32)}))
    return DataSet.open(path)


def marked(data: DataSet, share: float, seed: int = 1) -> tuple[Marks, set[int]]:
    """Some samples at random, none in the first row group; the numbers of those marked."""
    random = np.random.default_rng(seed)
    groups = [random.random(group.samples) < share for group in data.row_groups("train")]
    groups[0][:] = False
    return Marks(groups), set(np.flatnonzero(np.concatenate(groups)).tolist())


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_a_reader_told_to_read_only_some_reads_each_of_them_once(data, share, shuffle):
    marks, wanted = marked(data, share)
    reader = Reader(data, "train", 37, shuffle=shuffle, only=marks)
    batches = [batch["key"].values.tolist() for batch in reader]
    read = [key for batch in batches for key in batch]
    assert len(read) == len(wanted) == reader.samples
    assert set(read) == wanted
    assert len(batches) == len(reader) == -(-len(wanted) // 37)
    assert all(len(batch) == 37 for batch in batches[:-1])
    if not shuffle:
        assert read == sorted(read)


def test_marked_samples_of_a_session_stay_together_in_their_order(data):
    marks, _ = marked(data, 0.5)
    who, keys = [], []
    for batch in Reader(data, "train", 64, only=marks):
        keys += batch["key"].values.tolist()
        who += batch["who"].values.tolist()
    changes = sum(a != b for a, b in pairwise(who))
    assert changes == len(set(who)) - 1, "a session was torn apart"
    assert all(a < b for a, b, x, y in zip(keys, keys[1:], who, who[1:], strict=False) if x == y)
    assert keys != sorted(keys), "nothing was shuffled"


def test_a_reader_of_marked_samples_can_be_set_to_any_batch(data):
    marks, _ = marked(data, 0.3)
    whole = [batch["key"].values.tolist() for batch in Reader(data, "train", 25, seed=3, only=marks)]
    for at in range(len(whole) + 1):
        reader = Reader(data, "train", 25, seed=3, only=marks)
        reader.seek(0, at)
        rest = [batch["key"].values.tolist() for batch in reader] if at < len(whole) else []
        assert rest == whole[at:]


def test_ranks_share_the_marked_samples_among_them(data):
    marks, wanted = marked(data, 0.5)
    read: list[int] = []
    for rank in range(3):
        for batch in Reader(data, "train", 16, rank=rank, world=3, only=marks):
            read += batch["key"].values.tolist()
    dropped = Reader(data, "train", 16, world=3, only=marks).dropped
    assert len(read) == len(set(read)) == len(wanted) - dropped
    assert set(read) <= wanted
