"""Rounds: complete when every rank is there, in rank order, however often one comes."""

import pytest

from hotrow.service.protocol import Kind, Message
from hotrow.service.rounds import RoundError, Rounds

GROUP = b"g" * 16


def push(rank: int, sequence: int = 1, step: int = 0, workers: int = 3, group: bytes = GROUP) -> Message:
    return Message(Kind.PUSH, client=group, sequence=sequence, step=step, rank=rank, workers=workers)


def test_a_round_is_complete_with_its_last_rank_and_in_rank_order():
    rounds, answered = Rounds(), []
    assert rounds.add(push(2), lambda *a: answered.append(2)) is None
    assert rounds.add(push(0), lambda *a: answered.append(0)) is None
    assert rounds.add(push(2), lambda *a: answered.append("2 again")) is None, "a repeat takes the first one's place"
    assert len(rounds) == 2
    held = rounds.add(push(1), lambda *a: answered.append(1))
    for one in held:
        one.reply(Kind.ANSWER, [])
    assert answered == [0, 1, "2 again"] and len(rounds) == 0


def test_steps_and_groups_are_apart():
    rounds = Rounds()
    assert rounds.add(push(0, workers=2), print) is None
    assert rounds.add(push(1, sequence=2, step=1, workers=2), print) is None
    assert rounds.add(push(1, workers=2, group=b"h" * 16), print) is None
    assert len(rounds.add(push(1, workers=2), print)) == 2


def test_ranks_that_are_out_of_step_are_told():
    rounds = Rounds()
    rounds.add(push(0, step=5), print)
    with pytest.raises(RoundError, match="Rank 1 pushes step 6 among 3, while other ranks push step 5 among 3"):
        rounds.add(push(1, step=6), print)
    with pytest.raises(RoundError, match="out of step"):
        rounds.add(push(1, step=5, workers=2), print)


def test_a_missing_rank_does_not_fill_the_memory():
    rounds = Rounds()
    for sequence in range(1, 65):
        rounds.add(push(0, sequence), print)
    with pytest.raises(RoundError, match="one of them is missing"):
        rounds.add(push(0, 65), print)
    rounds.forget_others(b"h" * 16)
    assert len(rounds) == 0
