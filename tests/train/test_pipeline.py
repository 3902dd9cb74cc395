"""The pipeline: order, how far stages run ahead, errors from the background, and closing."""

import threading
from functools import partial

import pytest

from hotrow.errors import DataError
from hotrow.train.exact import ExactPipeline
from hotrow.train.hybrid import HybridPipeline
from hotrow.train.pipeline import Pipeline
from travel import Recorder, batches, number

POLICIES = {
    "sync": Pipeline,
    "sync, three groupers": partial(Pipeline, groupers=3),
    "hybrid1": partial(HybridPipeline, staleness=1),
    "hybrid3": partial(HybridPipeline, staleness=3),
    "exact": partial(ExactPipeline, lead=2),
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


@every_policy
def test_batches_come_in_order_and_all_of_them(policy):
    recorder = Recorder()
    with policy(batches(9), recorder, ahead=2) as pipeline:
        seen = []
        for fetched in pipeline:
            assert number(fetched.batch) == fetched.lookup.number
            seen.append(fetched.lookup.number)
            pipeline.update()
    assert seen == list(range(9))
    assert [e for e in recorder.events if e[0] == "update"] == [("update", i) for i in range(9)]


def test_batches_that_are_only_scored_need_no_update():
    with Pipeline(batches(5), Recorder(), ahead=2) as pipeline:
        assert [fetched.lookup.number for fetched in pipeline] == list(range(5))


def test_without_staleness_every_fetch_follows_the_update_of_the_batch_before():
    recorder = Recorder()
    with Pipeline(batches(3), recorder, ahead=3) as pipeline:
        for _ in pipeline:
            pipeline.update()
    assert recorder.events == [
        ("fetch", 0),
        ("update", 0),
        ("fetch", 1),
        ("update", 1),
        ("fetch", 2),
        ("update", 2),
    ]


def test_nothing_touches_the_tables_between_an_update_and_the_next_batch():
    recorder = Recorder()
    with Pipeline(batches(8), recorder, ahead=2) as pipeline:
        next(pipeline)
        pipeline.update()
        for _ in range(4):  # one taken, two waiting, one in hand: grouping has run as far ahead as it may
            assert recorder.grouped.acquire(timeout=30)
        assert recorder.events == [("fetch", 0), ("update", 0)]


def test_tiers_are_told_of_so_many_coming_batches_and_no_more():
    recorder = Recorder()
    with Pipeline(batches(9), recorder, ahead=9, told=3) as pipeline:
        next(pipeline)
        for _ in range(4):  # the one that was taken, and three more
            assert recorder.prefetched.acquire(timeout=30)
        assert not recorder.prefetched.acquire(blocking=False)
        assert [e for e in recorder.events if e[0] == "prefetch"] == [("prefetch", i, i) for i in range(4)]
        pipeline.update()
        assert [f.lookup.number for f in pipeline] == list(range(1, 9))


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
@every_policy
def test_an_error_in_the_background_reaches_the_consumer_at_its_batch(stage, policy):
    seen = []
    with (
        pytest.raises(DataError, match=f"cannot {stage}"),
        policy(batches(5), Recorder((stage, 2)), ahead=2) as pipeline,
    ):
        for fetched in pipeline:
            seen.append(fetched.lookup.number)
            pipeline.update()
    assert seen == [0, 1]


@every_policy
def test_an_update_that_fails_is_the_consumers_business(policy):
    before = threading.active_count()
    with (
        pytest.raises(DataError, match="cannot update"),
        policy(batches(50), Recorder(("update", 2)), ahead=2) as pipeline,
    ):
        for _ in pipeline:
            pipeline.update()
    assert threading.active_count() == before


@every_policy
def test_the_last_update_that_fails_is_raised_at_the_end(policy):
    pipeline = policy(batches(3), Recorder(("update", 2)), ahead=2)
    with pytest.raises(DataError, match="cannot update"):
        for _ in pipeline:
            pipeline.update()
        pipeline.close()


@every_policy
def test_while_paused_all_updates_are_applied_and_nothing_is_asked_of_the_tables(policy):
    recorder = Recorder()
    with policy(batches(20), recorder, ahead=2) as pipeline:
        for _ in range(4):
            next(pipeline)
            pipeline.update()
        with pipeline.paused():
            seen = list(recorder.events)
            assert ("update", 3) in seen
            assert recorder.events == seen
        assert [f.lookup.number for f in _trained(pipeline)] == list(range(4, 20))


def _trained(pipeline):
    for fetched in pipeline:
        yield fetched
        pipeline.update()


@every_policy
def test_an_error_of_the_reader_reaches_the_consumer_after_the_batches_before_it(policy):
    def broken():
        yield from batches(4)
        raise DataError("row 7 is malformed")

    with policy(broken(), Recorder()) as pipeline:
        for _ in range(4):
            next(pipeline)
            pipeline.update()
        with pytest.raises(DataError, match="row 7"):
            next(pipeline)


@every_policy
def test_closing_early_ends_the_threads_and_closes_the_source(policy):
    closed = threading.Event()

    def source():
        try:
            yield from batches(1000)
        finally:
            closed.set()

    before = threading.active_count()
    with policy(source(), Recorder(), ahead=2) as pipeline:
        next(pipeline)
    assert closed.is_set()
    assert threading.active_count() == before
    assert list(pipeline) == []


@every_policy
def test_closing_applies_the_updates_that_were_given(policy):
    recorder = Recorder()
    with policy(batches(9), recorder, ahead=2) as pipeline:
        for _ in range(3):
            next(pipeline)
            pipeline.update()
    assert ("update", 2) in recorder.events
