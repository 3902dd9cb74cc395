"""Processes killed with -9 again and again, and a shard cut off the network: nothing is lost, and nothing twice."""

import os
import time

import pytest

from hotrow.bench.hosts import Hosts, unavailable
from hotrow.bench.hybrid_failures import Crew, drawn, kill_at_random

SLOW = "HOTROW_SLOW" in os.environ


def test_random_kills_lose_no_update_and_apply_none_twice(tmp_path, capsys):
    """Also the push that a worker or a shard died in is applied once, and every worker gets to the same step."""
    with Crew(tmp_path, shards=2, workers=2) as crew:
        killed = kill_at_random(crew, seconds=60 if SLOW else 15, every=2.0 if SLOW else 1.5)
        steps = crew.finish()
        account = crew.account()
    assert crew.steps.tolist() == [steps, steps]
    assert {one.who.split()[0] for one in killed} == {"shard", "worker"}
    assert account.updates == sum(len(k) for w in range(2) for s in range(steps) for k in drawn(w, s))
    assert (account.lost, account.twice) == (0, 0)
    with capsys.disabled():
        said = ", ".join(f"{one.who} {one.recovery_s:.2f} s" for one in killed)
        print(f"\n{steps} steps, {account.updates} updates; recovered from: {said}")


def test_accounting_sees_an_update_too_many_and_one_too_few(tmp_path):
    with Crew(tmp_path, shards=1, workers=1) as crew:
        crew.finish()
        assert crew.account()[1:] == (0, 0)
        crew._states[0][0] += 1
        missing = crew.account()
        crew._states[0][0] -= 2
        assert missing.lost == sum(len(keys) for keys in drawn(0, int(crew.steps[0]) + 1))
        assert crew.account().twice == sum(len(keys) for keys in drawn(0, int(crew.steps[0])))


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_a_shard_off_the_network_for_a_while_loses_nothing_and_the_wait_is_seen(tmp_path, capsys):
    with Hosts(4, link=1e9) as hosts, Crew(tmp_path, shards=2, workers=2, hosts=hosts) as crew:
        hosts.cut(1)
        begun = time.monotonic()
        crew.wait_until(lambda: min(crew.waited_s) > (10 if SLOW else 4))  # workers stand, and say so
        stood, waited = crew.steps, crew.waited_s
        hosts.cut(1, off=False)
        back = time.monotonic()
        crew.wait_for(stood + 2)
        again = time.monotonic() - back
        steps = crew.finish()
        account = crew.account()
    assert crew.steps.tolist() == [steps, steps]
    assert (account.lost, account.twice) == (0, 0)
    with capsys.disabled():
        print(
            f"\ncut off for {back - begun:.1f} s; workers said {waited} s, and went on {again:.2f} s after it was back"
        )
