"""A journal knows what was applied, also after it was opened again."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow import Table
from hotrow.errors import StoreError
from hotrow.store.journal import Journal, UnderWay
from hotrow.store.optimizers import SGD
from hotrow.store.store import RowStore
from hotrow.table import Fill

A, B = b"a" * 16, b"b" * 16


def apply(journal, client, sequence) -> bool:
    ticket = journal.begin(client, sequence)
    if ticket is not None:
        ticket.done()
    return ticket is not None


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(-63, 63), st.booleans()), max_size=60))
def test_a_push_is_begun_until_it_is_done_and_never_again(tmp_path_factory, calls):
    """In any order within a client's window, with the journal opened again at any time."""
    folder = tmp_path_factory.mktemp("journal")
    journal, done, newest = Journal(folder), set(), {A: 64, B: 64}
    for client, offset, again in calls:
        sequence = newest[client] + offset
        assert apply(journal, client, sequence) == ((client, sequence) not in done)
        done.add((client, sequence))
        newest[client] = max(newest[client], sequence)
        done -= {(c, s) for c, s in done if s <= newest[c] - 64}
        assert journal.was_applied(client, sequence)
        if again:
            journal.close()
            journal = Journal(folder)
    journal.close()


def test_a_push_of_before_the_window_counts_as_applied(tmp_path):
    journal = Journal(tmp_path)
    assert apply(journal, A, 1)
    assert apply(journal, A, 65)
    assert not apply(journal, A, 1)


def test_a_push_being_applied_is_not_begun_twice_and_goes_on_when_it_failed(tmp_path):
    journal = Journal(tmp_path)
    ticket = journal.begin(A, 1)
    with pytest.raises(UnderWay):
        journal.begin(A, 1)
    assert journal.begin(B, 1) is not None
    ticket.failed()
    again = journal.begin(A, 1)
    assert again.push.number == ticket.push.number
    again.done()
    assert journal.begin(A, 1) is None
    with pytest.raises(ValueError, match="not under way"):
        again.done()


def test_what_was_refused_leaves_its_place_to_others_and_may_come_again(tmp_path):
    journal = Journal(tmp_path)
    for _ in range(200):
        journal.begin(A, 1).refused()
    assert journal.unfinished == 0
    journal.close()
    journal = Journal(tmp_path)
    assert journal.unfinished == 0
    assert not journal.was_applied(A, 1)
    ticket = journal.begin(A, 1)
    ticket.refused()
    with pytest.raises(ValueError, match="not under way"):
        ticket.refused()
    assert apply(journal, A, 1)


def test_only_what_nobody_sent_again_is_given_up_and_its_client_is_told(tmp_path):
    journal = Journal(tmp_path)
    for n in range(128):
        journal.begin(n.to_bytes(16, "big"), 1)
    journal.close()
    journal = Journal(tmp_path)
    assert journal.unfinished == 128
    assert apply(journal, (0).to_bytes(16, "big"), 1)  # the oldest comes again in time
    assert apply(journal, A, 1)
    assert journal.unfinished == 127
    tickets = [journal.begin(B, n) for n in range(2)]
    assert journal.unfinished == 128
    assert None not in tickets
    with pytest.raises(StoreError, match=r"given up.*last checkpoint"):
        journal.begin((1).to_bytes(16, "big"), 1)
    assert apply(journal, (2).to_bytes(16, "big"), 1)


def test_of_the_client_that_made_place_for_another_no_push_is_applied_again(tmp_path):
    journal = Journal(tmp_path)
    clients = [n.to_bytes(16, "big") for n in range(1025)]
    assert all(apply(journal, client, 5) for client in clients)
    for _ in range(2):
        for push in (5, 6):  # nobody knows which of them were applied
            with pytest.raises(StoreError, match=r"were forgotten.*Start it anew from the last checkpoint"):
                journal.begin(clients[0], push)
            with pytest.raises(StoreError, match="were forgotten"):
                journal.was_applied(clients[0], push)
        assert all(journal.was_applied(client, 5) for client in clients[1:])
        journal.close()
        journal = Journal(tmp_path)
    assert apply(journal, A, 1), "a client that is new"


def test_numbers_of_a_new_journal_are_not_taken_for_those_of_the_old_one(tmp_path):
    table = Table(name="t", dim=1, optimizer=SGD(lr=1.0), init=Fill())
    store = RowStore(table, folder=tmp_path / "rows")
    store.fetch(np.arange(100), step=0)
    for name in ("first", "second"):
        ticket = Journal(tmp_path / name).begin(A, 1)
        store.update(np.arange(100), np.ones((100, 1), np.float32), lr=1.0, push=ticket.push)
    assert (store.read(np.arange(100)) == -2).all()


def test_a_push_goes_on_at_the_keys_it_had_not_reached(tmp_path):
    table = Table(name="t", dim=1, optimizer=SGD(lr=1.0), init=Fill())
    store = RowStore(table, folder=tmp_path / "rows")
    store.fetch(np.arange(100), step=0)
    push = Journal(tmp_path).begin(A, 1).push
    for n in (0, 30, 30, 100):  # as much of it as a process did before it died
        store.update(np.arange(n), np.ones((n, 1), np.float32), lr=1.0, push=push)
        assert store.steps == 1
    assert (store.read(np.arange(100)) == -1).all()


def test_a_byte_altered_at_rest_is_refused_or_means_nothing(tmp_path):
    """After a kill as after a close, for the sum is right at any time."""
    journal = Journal(tmp_path / "a")
    for n in range(3):
        apply(journal, A, n + 1)
    journal.begin(A, 4)
    begun = journal.begin(B, 7)
    whole = (tmp_path / "a" / "journal").read_bytes()
    (tmp_path / "b").mkdir()
    path, chance = tmp_path / "b" / "journal", random.Random(5)
    used = [i for i, byte in enumerate(whole) if byte]
    refused = 0
    for k in range(400):
        data = bytearray(whole)
        data[chance.choice(used) if k % 2 else chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        try:
            again = Journal(tmp_path / "b")
        except StoreError:
            refused += 1
            continue
        assert [again.was_applied(A, n) for n in (1, 2, 3, 4)] == [True, True, True, False]
        assert again.unfinished == 2 and again.begin(B, 7).push.number == begun.push.number
        again.close()
    assert refused > 200


@pytest.mark.parametrize("damage", [lambda d: d[:100], lambda d: b"garbage!" + d[8:], lambda d: b""])
def test_a_damaged_journal_is_refused(tmp_path, damage):
    Journal(tmp_path).close()
    path = tmp_path / "journal"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StoreError, match="not a journal"):
        Journal(tmp_path)


def test_a_journal_is_opened_by_one_at_a_time(tmp_path):
    journal = Journal(tmp_path)
    with pytest.raises(StoreError, match="is in use: this process"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path)


def test_a_client_has_a_name_of_sixteen_bytes(tmp_path):
    with pytest.raises(StoreError, match="16 bytes"):
        Journal(tmp_path).begin(b"short", 1)
