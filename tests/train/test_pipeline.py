"""The pipeline: order, how far stages run ahead, errors from the background, and closing."""

import threading

import pytest
import torch

from hotrow.data.batch import Batch
from hotrow.errors import DataError
from hotrow.train.pipeline import Pipeline


def batches(n):
    for i in range(n):
        yield Batch.plain({"item": torch.tensor([i])})


def number(batch):
    return int(batch["item"].values[0])


class Recorder:
    """Stands in for `Embeddings` and notes what is asked of it, from which thread."""

    def __init__(self, fail_at=None):
        self.events = []
        self.fail_at = fail_at
        self.grouped = threading.Semaphore(0)
        self.fetched = threading.Semaphore(0)

    def group(self, batch):
        if self.fail_at == ("group", number(batch)):
            raise DataError("cannot group")
        self.grouped.release()
        return number(batch)

    def fetch(self, lookup):
        if self.fail_at == ("fetch", lookup):
            raise DataError("cannot fetch")
        self.events.append(("fetch", lookup))
        self.fetched.release()
        return lookup

    def step(self):
        self.events.append(("update",))


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_batches_come_in_order_and_all_of_them(staleness):
    with Pipeline(batches(9), Recorder(), ahead=2, staleness=staleness) as pipeline:
        seen = []
        for fetched in pipeline:
            assert number(fetched.batch) == fetched.lookup
            seen.append(fetched.lookup)
            pipeline.update()
    assert seen == list(range(9))


def test_batches_that_are_only_scored_need_no_update():
    with Pipeline(batches(5), Recorder(), ahead=2) as pipeline:
        assert [fetched.lookup for fetched in pipeline] == list(range(5))


def test_without_staleness_every_fetch_follows_the_update_of_the_batch_before():
    recorder = Recorder()
    with Pipeline(batches(3), recorder, ahead=3) as pipeline:
        for _ in pipeline:
            pipeline.update()
    assert recorder.events == [
        ("fetch", 0),
        ("update",),
        ("fetch", 1),
        ("update",),
        ("fetch", 2),
        ("update",),
    ]


def test_nothing_touches_the_tables_between_an_update_and_the_next_batch():
    recorder = Recorder()
    with Pipeline(batches(8), recorder, ahead=2) as pipeline:
        next(pipeline)
        pipeline.update()
        for _ in range(4):  # one taken, two waiting, one in hand: grouping has run as far ahead as it may
            assert recorder.grouped.acquire(timeout=30)
        assert recorder.events == [("fetch", 0), ("update",)]


def test_fetching_runs_ahead_of_updates_by_the_staleness_and_no_further():
    recorder = Recorder()
    with Pipeline(batches(8), recorder, ahead=8, staleness=2) as pipeline:
        next(pipeline)
        for _ in range(3):
            assert recorder.fetched.acquire(timeout=30)
        for _ in range(8):
            assert recorder.grouped.acquire(timeout=30)
        assert recorder.events == [("fetch", 0), ("fetch", 1), ("fetch", 2)]
        pipeline.update()
        assert recorder.fetched.acquire(timeout=30)
        assert recorder.events[3:] == [("update",), ("fetch", 3)]


def test_reading_runs_ahead_by_a_bounded_number_of_batches():
    taken = []

    def source():
        for batch in batches(100):
            taken.append(number(batch))
            yield batch

    recorder = Recorder()
    with Pipeline(source(), recorder, ahead=3) as pipeline:
        next(pipeline)
        for _ in range(5):  # one taken, three waiting, one in hand
            assert recorder.grouped.acquire(timeout=30)
    assert taken == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("stage", ["group", "fetch"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_an_error_in_the_background_reaches_the_consumer_at_its_batch(stage, staleness):
    seen = []
    with (
        pytest.raises(DataError, match=f"cannot {stage}"),
        Pipeline(batches(5), Recorder((stage, 2)), ahead=2, staleness=staleness) as pipeline,
    ):
        for fetched in pipeline:
            seen.append(fetched.lookup)
            pipeline.update()
    assert seen == [0, 1]


def test_an_error_of_the_reader_reaches_the_consumer():
    def broken():
        yield from batches(1)
        raise DataError("row 7 is malformed")

    with Pipeline(broken(), Recorder()) as pipeline:
        next(pipeline)
        pipeline.update()
        with pytest.raises(DataError, match="row 7"):
            next(pipeline)


@pytest.mark.parametrize("staleness", [0, 2])
def test_closing_early_ends_the_threads_and_closes_the_source(staleness):
    closed = threading.Event()

    def source():
        try:
            yield from batches(1000)
        finally:
            closed.set()

    before = threading.active_count()
    with Pipeline(source(), Recorder(), ahead=2, staleness=staleness) as pipeline:
        next(pipeline)
    assert closed.is_set()
    assert threading.active_count() == before
    assert list(pipeline) == []
