"""The router asks tiers whose rows come over a network at the same time, and the local ones meanwhile."""

import threading

import numpy as np
import pytest

from hotrow import Table
from hotrow.plan import Plan, Share
from hotrow.tiers import Gradients, Router, Tier

TABLE = Table(name="t", dim=1)


class Meeting(Tier):
    """Answers only while all the others are being asked too."""

    def __init__(self, barrier: threading.Barrier, remote: bool, value: float) -> None:
        super().__init__([TABLE])
        self._barrier, self.remote, self._value = barrier, remote, value
        self.updated = 0

    def fetch(self, parts, rows, step):
        self.read(parts, rows, step)
        return self._value

    def read(self, parts, rows, step):
        self._barrier.wait(20)
        rows[parts[0].positions] = self._value

    def update(self, parts, grads, step, ticket=None):
        self._barrier.wait(20)
        assert ticket == self._value and (grads.flat[parts[0].positions] == self._value).all()
        self.updated += 1


def test_remote_tiers_are_asked_at_once_and_every_ticket_comes_back_to_its_tier():
    barrier = threading.Barrier(3)
    tiers = {"a": Meeting(barrier, True, 1.0), "b": Meeting(barrier, False, 2.0), "c": Meeting(barrier, True, 3.0)}
    shares = (Share("a", np.array([1, 4])), Share("b", np.array([2])), Share("c"))
    router = Router(tiers, Plan({"t": shares}))
    routed = router.route(["t"], [np.arange(6)], [0])
    rows = np.zeros(6, np.float32)
    tickets = router.fetch(routed, rows, 0)
    assert rows.tolist() == [3, 1, 2, 3, 1, 3] and tickets == [1.0, 2.0, 3.0]
    router.read(routed, rows, 0)
    router.update(routed, Gradients(rows), 0, tickets)
    assert [tier.updated for tier in tiers.values()] == [1, 1, 1]


class Failing(Tier):
    remote = True

    def read(self, parts, rows, step):
        raise RuntimeError("gone")


class Slow(Tier):
    def __init__(self) -> None:
        super().__init__([TABLE])
        self.ended = False

    def read(self, parts, rows, step):
        self.ended = True


def test_what_a_remote_tier_raises_is_raised_when_all_have_ended():
    tiers = {"a": Failing([TABLE]), "b": Slow()}
    router = Router(tiers, Plan({"t": (Share("a", np.array([1])), Share("b"))}))
    with pytest.raises(RuntimeError, match="gone"):
        router.read(router.route(["t"], [np.arange(3)], [0]), np.zeros(3, np.float32), 0)
    assert tiers["b"].ended
