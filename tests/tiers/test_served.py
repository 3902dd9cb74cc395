"""The served tier: whatever the shards, ranks and wires, rows are those of one process with a plain table."""

import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotrow import Batch, Embeddings, Feature, Table
from hotrow.errors import CheckpointError, SettingsError
from hotrow.plain import PlainEmbeddings
from hotrow.plan import Plan, Share
from hotrow.store.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad
from hotrow.store.store import RowStore
from hotrow.table import ByCount, ByProbability, Eviction
from hotrow.tiers import HostTier
from hotrow.world import World
from serving import embeddings, served, shards
from shapes import KEYS, OPTIMIZERS, Case, cases

COUNTS = st.integers(1, 3)


def initial(table: Table, seed: int, keys: Tensor) -> Tensor:
    return torch.from_numpy(RowStore(table, seed).initial(keys.numpy()))


def loss_of(vectors: Tensor) -> Tensor:
    """Every value has a share of its own, so that no row may take another's place."""
    return (vectors * torch.cos(torch.arange(vectors.numel())).view_as(vectors)).sum()


def train(ours: Embeddings, others: Sequence[Embeddings | PlainEmbeddings], batches: Sequence[Batch]) -> None:
    for batch in batches:
        for each in (ours, *others):
            embedded = each(batch)
            total = torch.zeros(())
            for name in embedded.pooled_features:
                total = total + loss_of(embedded.vector(name))
            for name in embedded.sequence_features:
                total = total + loss_of(embedded.sequence(name).apart().values)
            total.backward()
            each.step()


def assert_same(ours: Embeddings, other: Embeddings, keys: Tensor) -> None:
    for table in ours.tables:
        assert torch.equal(ours.read(table, keys), other.read(table, keys))


def keys_of(case: Case) -> Tensor:
    return torch.cat([g.values for b in case.batches for g in b.groups] + [torch.tensor([2**40 + 17])])


@settings(max_examples=40)
@given(cases(), COUNTS)
def test_every_optimizer_on_any_shards_equals_the_plain_table(case, count):
    with shards(count) as addresses, served(addresses, case.tables, seed=5) as tier:
        ours = embeddings(tier, case.features)
        host = Embeddings(case.tables, case.features, seed=5)
        plain = PlainEmbeddings(case.tables, case.features, initial=initial, seed=5)
        train(ours, [host, plain], case.batches)
        keys = keys_of(case)
        for table in ours.tables:
            torch.testing.assert_close(ours.read(table, keys), plain.read(table, keys), rtol=2e-5, atol=2e-6)
        assert_same(ours, host, keys)
        assert {name: said["rows"] for name, said in ours.stats().items()} == {
            name: said["rows"] for name, said in host.stats().items()
        }


def in_threads(calls: Sequence[Callable[[], None]]) -> None:
    """All at once; raises what one of them raised, without waiting for those that wait for it."""
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(call: Callable[[], None]) -> None:
        try:
            call()
            ended.put(None)
        except BaseException as error:
            ended.put(error)

    for call in calls:
        threading.Thread(target=run, args=(call,), daemon=True).start()
    for _ in calls:
        if (error := ended.get()) is not None:
            raise error


@settings(max_examples=15)
@given(OPTIMIZERS, OPTIMIZERS, st.integers(2, 3), COUNTS, st.data())
def test_ranks_in_sync_equal_one_process_with_the_whole_batch(first, second, ranks, count, data):
    tables = [Table(name="a", dim=5, optimizer=first), Table(name="b", dim=16, optimizer=second)]
    features = [
        Feature(name="f", table="a"),
        Feature(name="g", table="b", pooling="mean"),
        Feature(name="h", table="a"),
    ]
    size, steps = 3, 3
    bags = st.lists(st.lists(KEYS, max_size=3), min_size=ranks * size, max_size=ranks * size)
    drawn = [{f.name: data.draw(bags) for f in features} for _ in range(steps)]
    scale = {f.name: torch.randn(ranks * size, {"a": 5, "b": 16}[f.table]) for f in features}

    def loss(embedded, samples):
        part = sum((embedded.vector(f.name) * scale[f.name][samples]).sum(1) for f in features[:1] + features[2:])
        return (part + (embedded.vector("g") * scale["g"][samples]).sum(1)).mean()

    plain = PlainEmbeddings(tables, features, initial=initial, seed=5)
    for step in drawn:
        loss(plain(Batch.plain(step)), slice(None)).backward()
        plain.step()
    with shards(count) as addresses:

        def rank(r: int) -> None:
            world = World(r, ranks, ranks)
            with served(addresses, tables, seed=5, world=world, group="one") as tier:
                ours = embeddings(tier, features)
                mine = slice(r * size, (r + 1) * size)
                for step in drawn:
                    batch = Batch.plain({name: bags[mine] for name, bags in step.items()})
                    loss(ours(batch), mine).backward()
                    ours.step()

        in_threads([lambda r=r: rank(r) for r in range(ranks)])
        with served(addresses, tables, seed=5) as tier:
            ours = embeddings(tier, features)
            keys = torch.tensor([k for step in drawn for bags in step.values() for bag in bags for k in bag] + [99])
            for table in ours.tables:
                torch.testing.assert_close(ours.read(table, keys), plain.read(table, keys), rtol=2e-5, atol=2e-6)


def test_ranks_in_sync_give_the_same_bits_whoever_comes_first():
    tables = [Table(name="t", dim=8, optimizer=Adam(lr=0.1))]
    found = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        with shards(1) as addresses:
            tiers = [served(addresses, tables, world=World(r, 3, 3), group="g") for r in range(3)]
            with tiers[0] as a, tiers[1] as b, tiers[2] as c:
                rng = np.random.default_rng(0)
                ours = [embeddings(tier, [Feature(name="t")], seed=0) for tier in (a, b, c)]
                grads = torch.from_numpy(rng.normal(size=(3, 4, 8)).astype(np.float32) * [[[1e-6]], [[1]], [[1e5]]])
                seen = [e(Batch.plain({"t": torch.tensor([1, 2, 3, 3 + r])})) for r, e in enumerate(ours)]
                for r in range(3):
                    seen[r].vectors().backward(grads[r].float())
                begun = threading.Barrier(3)

                def step(r: int, ours=ours, begun=begun) -> None:
                    begun.wait()
                    ours[r].step()

                in_threads([lambda r=r: step(r) for r in order])
                found.append(ours[0].read("t", torch.arange(7)))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_without_combine_every_push_is_applied_by_itself():
    tables = [Table(name="t", dim=2, optimizer=SGD(lr=1.0))]
    with shards(2) as addresses, served(addresses, tables, world=World(1, 2, 2), combine=False) as tier:
        ours = embeddings(tier, [Feature(name="t")])
        start = ours.read("t", torch.arange(4))
        ours(Batch.plain({"t": torch.arange(4)})).vectors().sum().backward()
        ours.step()
        assert torch.equal(ours.read("t", torch.arange(4)), start - 0.5), "a half, for there are two workers"


@settings(max_examples=25)
@given(st.sampled_from(["bfloat16", "float16"]), COUNTS, st.integers(0, 2**32), st.floats(-30, 30))
def test_narrow_wires_round_each_value_once(wire, count, seed, exponent):
    """Rows and gradients of any size, from tiny to huge, come within the format's last place of the row's largest."""
    table = Table(name="t", dim=6, optimizer=SGD(lr=1.0))
    rng = np.random.default_rng(seed)
    keys = torch.from_numpy(rng.integers(-(2**62), 2**62, 50))
    with shards(count) as addresses, served(addresses, [table], seed=5, wire=wire) as tier:
        ours = embeddings(tier, [Feature(name="t")])
        host = Embeddings([table], [Feature(name="t")], seed=5)
        grads = torch.from_numpy((rng.normal(size=(50, 6)) * 2.0**exponent).astype(np.float32))
        grads[0] = 0
        rows = [e(Batch.plain({"t": keys})).vectors() for e in (ours, host)]
        step = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[wire]
        within(rows[0], rows[1], step)
        for each, out in zip((ours, host), rows, strict=True):
            out.backward(grads)
            each.step()
        exact = RowStore(table, 5).initial(keys.numpy())
        with served(addresses, [table], seed=5) as wide:
            moved = embeddings(wide, [Feature(name="t")]).read("t", keys)
        rounding = np.spacing(np.abs(exact) + np.abs(grads.numpy()))
        allowed = step * (np.abs(grads.numpy()) if wire == "bfloat16" else np.abs(grads.numpy()).max(1, keepdims=True))
        assert (np.abs(exact - grads.numpy() - moved.numpy()) <= allowed + 2 * rounding).all()


def within(got: Tensor, wanted: Tensor, step: float) -> None:
    assert ((got - wanted).abs() <= step * wanted.abs().max(1, keepdim=True).values).all()


def test_rows_of_bfloat16_tables_travel_as_bfloat16_unchanged():
    table = Table(name="t", dim=6, dtype="bfloat16")
    with shards(2) as addresses, served(addresses, [table], wire="bfloat16") as tier:
        ours = embeddings(tier, [Feature(name="t")], seed=0)
        assert torch.equal(ours.read("t", torch.arange(99)), Embeddings([table], []).read("t", torch.arange(99)))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "bounds",
    [
        {"admission": ByProbability(probability=0.5)},
        {"admission": ByCount(count=2)},
        {"eviction": Eviction(ttl=2)},
    ],
)
def test_a_key_without_a_row_never_shifts_the_gradient_of_another(count, bounds):
    tables = [Table(name="t", dim=3, optimizer=RowWiseAdagrad(lr=0.5), **bounds)]
    with shards(count) as addresses, served(addresses, tables, seed=5) as tier:
        ours, host = embeddings(tier, [Feature(name="t")]), Embeddings(tables, [Feature(name="t")], seed=5)
        rng = np.random.default_rng(1)
        batches = [Batch.plain({"t": torch.from_numpy(rng.integers(0, 60, 40))}) for _ in range(6)]
        train(ours, [host], batches)
        assert_same(ours, host, torch.arange(60))
        assert 0 < ours.stats()["t"]["rows"] < 60


def test_rows_may_be_split_between_this_process_and_shards_and_move_between_them():
    tables = [Table(name="t", dim=4, optimizer=Adagrad(lr=0.3))]
    features = [Feature(name="t")]
    with shards(2) as addresses, served(addresses, tables, seed=5) as tier:

        def plan(hot: range) -> Plan:
            return Plan({"t": (Share("host", np.array(hot, np.int64)), Share("served"))})

        tiers = {"host": HostTier(tables, 5), "served": tier}
        ours = Embeddings(tables, features, seed=5, tiers=tiers, plan=plan(range(10)))
        host = Embeddings(tables, features, seed=5)
        rng = np.random.default_rng(2)
        batches = [Batch.plain({"t": torch.from_numpy(rng.integers(0, 30, 20))}) for _ in range(4)]
        train(ours, [host], batches[:2])
        ours.replan(plan(range(5, 20)))
        train(ours, [host], batches[2:])
        assert_same(ours, host, torch.arange(30))
        assert len(tiers["host"].stores()["t"]) <= 15


def test_evaluation_reads_and_changes_nothing():
    tables = [Table(name="t", dim=4)]
    with shards(2) as addresses, served(addresses, tables, seed=5) as tier:
        ours = embeddings(tier, [Feature(name="t")]).eval()
        ours(Batch.plain({"t": torch.arange(10)}))
        assert ours.stats()["t"]["rows"] == 0


SNAPSHOT_TABLES = [
    Table(name="item", dim=3, optimizer=Adam(lr=0.1), admission=ByCount(count=2, bytes=1 << 20)),
    Table(name="a/b c", dim=5, dtype="bfloat16", optimizer=SGD(lr=1.0)),
]
SNAPSHOT_FEATURES = [Feature(name="item"), Feature(name="other", table="a/b c")]


def snapshot_batches(seed: int, steps: int = 3) -> list[Batch]:
    rng = np.random.default_rng(seed)
    return [
        Batch.plain({f.name: torch.from_numpy(rng.integers(0, 200, 100)) for f in SNAPSHOT_FEATURES})
        for _ in range(steps)
    ]


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 0), (0, 2)])
def test_a_checkpoint_moves_between_any_number_of_shards_and_one_process(tmp_path, before, after):
    """And training goes on as if nothing had happened. Zero shards: rows in this process."""
    host = Embeddings(SNAPSHOT_TABLES, SNAPSHOT_FEATURES, seed=5)
    train(host, [], snapshot_batches(0) + snapshot_batches(1) + snapshot_batches(2))

    def somewhere(count: int, work: Callable[[Embeddings], None]) -> None:
        if count == 0:
            work(Embeddings(SNAPSHOT_TABLES, SNAPSHOT_FEATURES, seed=5))
            return
        with shards(count) as addresses, served(addresses, SNAPSHOT_TABLES, seed=5) as tier:
            work(embeddings(tier, SNAPSHOT_FEATURES))

    def first(ours: Embeddings) -> None:
        train(ours, [], snapshot_batches(0))
        ours.snapshot(tmp_path / "full").write()
        train(ours, [], snapshot_batches(1))
        ours.snapshot(tmp_path / "changed", base=tmp_path / "full").write()
        train(ours, [], snapshot_batches(99))  # after the cut: must not show

    def second(ours: Embeddings) -> None:
        ours.restore(tmp_path / "changed")
        assert ours.steps == 6
        train(ours, [], snapshot_batches(2))
        assert_same(ours, host, torch.arange(200))
        assert ours.stats()["item"]["rows"] == host.stats()["item"]["rows"]

    somewhere(before, first)
    somewhere(after, second)


def test_a_snapshot_over_shards_is_of_its_moment_while_training_goes_on(tmp_path):
    with shards(2) as addresses, served(addresses, SNAPSHOT_TABLES, seed=5) as tier:
        ours = embeddings(tier, SNAPSHOT_FEATURES)
        train(ours, [], snapshot_batches(0))
        at_cut = {table: ours.read(table, torch.arange(200)) for table in ours.tables}
        snapshot = ours.snapshot(tmp_path / "cut")
        train(ours, [], snapshot_batches(1))
        snapshot.write()
        one = Embeddings(SNAPSHOT_TABLES, SNAPSHOT_FEATURES, seed=5)
        one.restore(tmp_path / "cut")
        for table, rows in at_cut.items():
            assert torch.equal(one.read(table, torch.arange(200)), rows)


def test_a_snapshot_of_changes_is_refused_if_another_client_took_one_meanwhile(tmp_path):
    tables = [Table(name="t", dim=2)]
    with (
        shards(2) as addresses,
        served(addresses, tables, seed=5) as one,
        served(addresses, tables, seed=5) as two,
    ):
        ours, other = embeddings(one, [Feature(name="t")]), embeddings(two, [Feature(name="t")])
        ours.snapshot(tmp_path / "0").write()
        other.snapshot(tmp_path / "1").write()
        with pytest.raises(CheckpointError, match="is not the last snapshot of table t"):
            ours.snapshot(tmp_path / "2", base=tmp_path / "0")
        ours.snapshot(tmp_path / "2", base=tmp_path / "1").write()


@pytest.mark.parametrize(
    ("addresses", "settings", "message"),
    [
        ([], {}, "needs the address of a shard"),
        (["tcp://127.0.0.1:1"], {"world": World(0, 2, 2)}, "need a group"),
        (["http://127.0.0.1:1"], {}, '"http://127.0.0.1:1" is no address of a shard'),
        (["tcp://10.1.2.3:7700"], {}, "can be reached from other machines, so a key is needed"),
    ],
)
def test_settings_that_cannot_be_are_refused(addresses, settings, message):
    from hotrow.tiers.served import ServedTier

    with pytest.raises(SettingsError, match=message):
        ServedTier(addresses, [Table(name="t", dim=2)], **settings)
