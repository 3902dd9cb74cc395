"""What tests of policies share: a stand-in for `Embeddings`, and cases that are trained under a policy."""

import sys
import threading
from contextlib import contextmanager

import numpy as np
import torch

from hotrow import Batch, Embeddings
from hotrow.errors import DataError
from hotrow.tiers import HostTier
from test_embeddings import loss_of, results


def batches(n):
    for i in range(n):
        yield Batch.plain({"item": torch.tensor([i])})


def number(batch):
    return int(batch["item"].values[0])


class Lookup:
    """Stands in for a lookup of one key."""

    in_place = True

    def __init__(self, number):
        self.number, self.routed = number, []

    def keys(self):
        return [np.array([self.number])]

    def read_again(self, chosen, step, only):
        pass


class Recorder:
    """Stands in for `Embeddings` and notes what is asked of it, from which thread."""

    def __init__(self, fail_at=None):
        self.events = []
        self.fail_at = fail_at
        self.steps = 0
        self.grouped = threading.Semaphore(0)
        self.fetched = threading.Semaphore(0)
        self.prefetched = threading.Semaphore(0)
        self.may_update = threading.Event()
        self.may_update.set()

    def group(self, batch):
        if self.fail_at == ("group", number(batch)):
            raise DataError("cannot group")
        self.grouped.release()
        return Lookup(number(batch))

    def prefetch(self, lookup, step):
        self.events.append(("prefetch", lookup.number, step))
        self.prefetched.release()

    def current(self, lookup):
        return True

    def fetch(self, lookup, step=None, only=None, once=False):
        if self.fail_at == ("fetch", lookup.number):
            raise DataError("cannot fetch")
        self.events.append(("fetch", lookup.number))
        self.fetched.release()
        return lookup

    def finish(self):
        self.steps += 1
        return Update(self, self.steps - 1)


class Update:
    """Stands in for the gradients of a step."""

    def __init__(self, recorder, step):
        self.recorder, self.step = recorder, step

    def apply(self):
        assert self.recorder.may_update.wait(30)
        if self.recorder.fail_at == ("update", self.step):
            raise DataError("cannot update")
        self.recorder.events.append(("update", self.step))


class RemoteHost(HostTier):
    """A host tier that counts as remote, and notes what it is asked."""

    name = "remote"
    remote = True

    def __init__(self, tables, seed=0):
        super().__init__(tables, seed)
        self.asked = []

    def fetch(self, parts, rows, step):
        self.asked.append(("fetch", step, _keys(parts)))
        return super().fetch(parts, rows, step)

    def read(self, parts, rows, step):
        self.asked.append(("read", step, _keys(parts)))
        super().read(parts, rows, step)

    def update(self, parts, grads, step, ticket=None):
        super().update(parts, grads, step, ticket)
        self.asked.append(("update", step, _keys(parts)))


def _keys(parts):
    return {part.table: sorted(part.keys.tolist()) for part in parts}


@contextmanager
def busy_threads():
    """Threads that take turns as often as they can: more orders of events in one test."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def travel(embeddings: Embeddings, batches, policy, between=None):
    """Trains on `batches` under a policy; what the model saw of each."""
    seen = []
    with busy_threads(), policy(iter(batches), embeddings) as pipeline:
        for step, fetched in enumerate(pipeline):
            embedded = embeddings.embed(fetched.lookup)
            seen.append({name: result.detach().clone() for name, result in results(embedded).items()})
            loss_of(embedded).backward()
            pipeline.update()
            if between is not None:
                between(step, pipeline)
    return seen


def columns(embeddings: Embeddings):
    """All rows with state and clocks, by tier and table, in the order of their keys."""
    found = {}
    for tier, held in embeddings.router.tiers.items():
        for name, store in held.stores().items():
            chunks = list(store.export()) if hasattr(store, "export") else []
            for c in chunks[0] if chunks else ():
                column = np.concatenate([chunk[c] for chunk in chunks])
                order = np.concatenate([chunk["keys"] for chunk in chunks]).argsort()
                found[tier, name, c] = column.reshape(len(order), -1)[order]
    return found


def assert_same_bits(one, two):
    """Of what models saw, or of columns."""
    if isinstance(one, list):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert a.keys() == b.keys()
            assert all(torch.equal(a[name], b[name]) for name in a)
        return
    assert one.keys() == two.keys()
    for name in one:
        assert np.array_equal(one[name], two[name], equal_nan=True), name


def threads_of(work):
    """Runs each in a thread of its own; raises what one of them raised."""
    errors = []

    def guarded(one):
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]
