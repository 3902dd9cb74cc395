"""What was applied is applied once, whatever comes again and in whatever order."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow.errors import StoreError
from hotrow.service.once import WINDOW, Once, UnderWay

A, B = b"a" * 16, b"b" * 16


def test_a_request_is_applied_once():
    once = Once()
    ticket = once.begin(A, 1)
    assert ticket is not None
    with pytest.raises(UnderWay):
        once.begin(A, 1)
    assert not once.was_applied(A, 1)
    ticket.done()
    assert once.was_applied(A, 1) and once.begin(A, 1) is None
    assert once.begin(B, 1) is not None, "another client's"


def test_what_failed_may_come_again():
    once = Once()
    once.begin(A, 1).failed()
    assert not once.was_applied(A, 1) and once.begin(A, 1) is not None


def test_of_a_client_that_was_forgotten_no_request_is_applied_again(monkeypatch):
    monkeypatch.setattr("hotrow.service.once._MOST_CLIENTS", 2)
    once = Once()
    for client in (A, B, b"c" * 16):
        once.begin(client, 1).done()
    for ask in (once.begin, once.was_applied):
        with pytest.raises(StoreError, match=r"were forgotten.*last checkpoint"):
            ask(A, 1)
    assert once.was_applied(B, 1) and once.begin(B, 2) is not None


@given(st.integers(0, 2**32), st.integers(1, 200))
def test_any_order_within_the_window_with_any_repeats_applies_each_once(seed, count):
    """As a client sends: number n only after n - 64 was acknowledged, anything not acknowledged any number of times."""
    chance, once, applied, acknowledged, sent = random.Random(seed), Once(), [], set(), [1]
    while len(acknowledged) < count:
        oldest = next(n for n in range(1, count + 1) if n not in acknowledged)
        n = chance.choice(sent) if chance.random() < 0.3 else chance.randint(oldest, min(count, oldest + WINDOW - 1))
        sent.append(n)
        ticket = once.begin(A, n)
        if ticket is not None:
            applied.append(n)
            ticket.done()
        if chance.random() < 0.7:
            acknowledged.add(n)
    assert sorted(applied) == list(range(1, count + 1))
