"""Nothing lost, nothing twice: rate 1 and gradients of exactly 1.0, so that a row says how often it was updated.

Lines break in the middle of messages again and again, requests come again, and each row still equals minus its uses.
"""

import contextlib
import threading

import numpy as np
import pytest

from hotrow import Table
from hotrow.store.optimizers import SGD
from hotrow.table import Fill
from hotrow.tiers.served import ServedTier
from hotrow.tiers.tier import Gradients, Part
from hotrow.world import World
from serving import Breaking, served, shards

DIMS = {"a": 2, "b": 5}
TABLES = [Table(name=name, dim=dim, optimizer=SGD(lr=1.0), init=Fill(value=0.0)) for name, dim in DIMS.items()]
KEYS = 200


def work(tier: ServedTier, steps: int, seed: int, uses: dict[str, np.ndarray]) -> None:
    rng = np.random.default_rng(seed)
    for step in range(steps):
        parts, start = [], 0
        for i, (name, dim) in enumerate(DIMS.items()):
            keys = rng.permutation(KEYS)[: rng.integers(0, 30)].astype(np.int64)
            uses[name][keys] += 1
            parts.append(Part(name, i, keys, None, start))
            start += len(keys) * dim
        ticket = tier.fetch(parts, np.empty(start, np.float32), step)
        tier.update(parts, Gradients(np.ones(start, np.float32)), step, ticket)


def check(addresses: list[str], uses: list[dict[str, np.ndarray]], share: float) -> None:
    with served(addresses, TABLES) as tier:
        for i, (name, dim) in enumerate(DIMS.items()):
            rows = np.empty(KEYS * dim, np.float32)
            tier.read([Part(name, i, np.arange(KEYS), None, 0)], rows, 0)
            expected = -share * np.sum([u[name] for u in uses], axis=0)
            assert np.array_equal(rows.reshape(KEYS, dim), np.repeat(expected[:, None], dim, 1).astype(np.float32))


@pytest.mark.parametrize(("combine", "workers", "steps"), [(False, 3, 700), (True, 4, 250)])
def test_each_row_is_minus_its_uses_over_lines_that_break(combine, workers, steps):
    """Workers that combine push a quarter each, which float32 adds up exactly."""
    uses = [{name: np.zeros(KEYS, np.int64) for name in DIMS} for _ in range(workers)]
    failures: list[BaseException] = []
    with contextlib.ExitStack() as stack:
        addresses = stack.enter_context(shards(2))
        lines = [
            [stack.enter_context(Breaking(a, 10 * w + s, (500, 60_000))) for s, a in enumerate(addresses)]
            for w in range(workers)
        ]

        def worker(w: int) -> None:
            settings = {"world": World(w, workers, workers), "group": "g"} if combine else {}
            try:
                with served([line.address for line in lines[w]], TABLES, retry=0.02, **settings) as tier:
                    work(tier, steps, w, uses[w])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=worker, args=(w,)) for w in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert sum(line.broken for of_worker in lines for line in of_worker) > 10 * workers
        check(addresses, uses, 1 / workers if combine else 1)
