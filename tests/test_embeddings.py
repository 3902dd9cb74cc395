"""The core test: whatever the shape, `Embeddings` gives what one process with plain PyTorch tables gives."""

import gc
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hotrow import Batch, Embedded, Embeddings, Feature, Group, Table, _native
from hotrow.errors import BatchError, HotrowError, SettingsError
from hotrow.plain import PlainEmbeddings
from hotrow.plan import Plan, Share
from hotrow.store.optimizers import SGD, Adam
from hotrow.store.store import RowStore
from hotrow.table import ByProbability, Eviction, Fill
from hotrow.tiers import HostTier
from shapes import Case, cases


def initial(table: Table, seed: int, keys: Tensor) -> Tensor:
    return torch.from_numpy(RowStore(table, seed).initial(keys.numpy()))


def both(case: Case, **kwargs: object) -> tuple[Embeddings, PlainEmbeddings]:
    plain = PlainEmbeddings(case.tables, case.features, initial=initial, seed=5)
    return Embeddings(case.tables, case.features, seed=5, **kwargs), plain  # type: ignore[arg-type]


def results(embedded: Embedded) -> dict[str, Tensor]:
    """Every result under its feature's name, expanded, and unique too; on the host."""
    found = {name: embedded.vector(name) for name in embedded.pooled_features}
    found |= {name + ".unique": embedded.unique(name)[0] for name in embedded.pooled_features}
    for name in embedded.sequence_features:
        sequence = embedded.sequence(name).apart()
        found[name] = sequence.values
        found[name + ".lengths"] = sequence.lengths
    return {name: result.cpu() for name, result in found.items()}


def loss_of(embedded: Embedded) -> Tensor:
    """Something every result has a different share in; linear, so that rounding does not grow over the steps."""
    total = torch.zeros(())
    for i, (name, result) in enumerate(sorted(results(embedded).items())):
        if result.is_floating_point() and not name.endswith(".unique"):
            total = total + (result * torch.cos(torch.arange(i, i + result.numel())).view_as(result)).sum()
    return total


def assert_same_rows(case: Case, ours: Embeddings, plain: PlainEmbeddings) -> None:
    for table in case.tables:
        keys = torch.cat([g.values for b in case.batches for g in b.groups] + [torch.tensor([2**40 + 17])])
        torch.testing.assert_close(ours.read(table.name, keys), plain.read(table.name, keys), rtol=2e-5, atol=2e-6)


def train(case: Case, ours: Embeddings, plain: PlainEmbeddings) -> None:
    for batch in case.batches:
        seen = [e(batch) for e in (ours, plain)]
        torch.testing.assert_close(results(seen[0]), results(seen[1]), rtol=2e-5, atol=2e-6)
        for embeddings, embedded in zip((ours, plain), seen, strict=True):
            loss_of(embedded).backward()
            embeddings.step()


@pytest.mark.parametrize("durable", [False, True])
@given(case=cases())
def test_every_optimizer_pooling_and_form_equals_the_plain_table(tmp_path_factory, durable, case):
    folder = tmp_path_factory.mktemp("rows") if durable else None
    tier = HostTier(case.tables, seed=5, folder=folder)
    ours, plain = both(case, tiers={"host": tier})
    train(case, ours, plain)
    assert_same_rows(case, ours, plain)
    if durable:
        tier.close()
        again = both(case, tiers={"host": HostTier(case.tables, seed=5, folder=folder)})[0]
        assert_same_rows(case, again, plain)


@given(cases(), st.data())
def test_rows_split_over_two_tiers_equal_one_plain_table(case, data):
    tiers = {"hot": HostTier(case.tables, seed=5), "cold": HostTier(case.tables, seed=5)}
    shares = {}
    for table in case.tables:
        hot = data.draw(st.lists(st.integers(-5, 20)))
        shares[table.name] = (Share("hot", np.array(hot, np.int64)), Share("cold"))
    ours, plain = both(case, tiers=tiers, plan=Plan(shares))
    train(case, ours, plain)
    assert_same_rows(case, ours, plain)
    for table, (hot, _) in shares.items():
        keys = np.concatenate([c["keys"] for c in tiers["hot"].stores()[table].export()] or [np.empty(0)])
        assert set(keys.tolist()) <= set(hot.keys.tolist())


@given(cases(steps=2))
def test_several_lookups_before_a_step_make_one_update(case):
    ours, plain = both(case)
    for embeddings in (ours, plain):
        sum(loss_of(embeddings(batch)) for batch in case.batches).backward()
        embeddings.step()
    assert_same_rows(case, ours, plain)


@given(cases())
def test_deduplicated_and_expanded_batches_train_alike(case):
    ours, other = both(case)[0], both(case)[0]
    for batch in case.batches:
        first, second = ours(batch), other(batch.expand())
        for name in first.pooled_features:
            torch.testing.assert_close(first.vector(name), second.vector(name))
        for embedded in (first, second):
            for name in embedded.pooled_features:
                embedded.vector(name).square().sum().backward(retain_graph=True)
        ours.step()
        other.step()
    for table in case.tables:
        keys = torch.cat([g.values for b in case.batches for g in b.groups])
        torch.testing.assert_close(ours.read(table.name, keys), other.read(table.name, keys), rtol=2e-5, atol=2e-6)


@given(cases(steps=1))
def test_gradients_of_shared_rows_are_the_same_bit_for_bit_where_sums_are_exact(case):
    """With whole numbers for gradients and halves for weights no order of summation rounds: every term must show."""
    features = [f.model_copy(update={"pooling": "sum"}) if f.pooling == "mean" else f for f in case.features]
    (batch,) = case.batches
    found = []
    for form in (batch, batch.expand()):
        ours = Embeddings(case.tables, features, seed=5)
        lookup = ours.fetch(ours.group(form))
        embedded = ours.embed(lookup).expand()
        total = torch.zeros(())
        for i, (name, result) in enumerate(sorted(results(embedded).items())):
            if result.is_floating_point() and not name.endswith(".unique"):
                total = total + (result * (torch.arange(result.numel()) % 7 - i).view_as(result)).sum()
        total.backward()
        flat, starts = lookup.gradients().flat, lookup.grouping.starts
        for t, table in enumerate(case.tables):
            order = np.argsort(lookup.grouping.keys(t))
            found.append(lookup.grouping.keys(t)[order])
            found.append(flat[starts[t] : starts[t + 1]].reshape(-1, table.dim)[order])
    half = len(found) // 2
    for one, other in zip(found[:half], found[half:], strict=True):
        assert np.array_equal(one, other)


def test_a_module_may_ask_for_rows_on_unique_samples_apart_or_expanded():
    ours = Embeddings(
        [Table(name="t", dim=2)],
        [Feature(name="user", table="t"), Feature(name="clicks", table="t", pooling="sequence")],
    )
    group = Group(
        ("user", "clicks"),
        torch.tensor([1, 2, 3, 4, 5, 6]),
        torch.tensor([0, 1, 2, 4, 7]),
        torch.tensor([0, 1, 1]),
        None,
        torch.tensor([0, 1, 2, 3]),
    )
    embedded = ours(Batch((group,)))
    row = dict(zip(range(1, 7), ours.read("t", torch.arange(1, 7)), strict=True))
    rows, inverse = embedded.unique("user")
    assert torch.equal(rows, torch.stack([row[1], row[2]])) and inverse is group.inverse
    assert torch.equal(embedded.expand().vector("user"), embedded.vector("user"))

    clicks = embedded.sequence("clicks")
    assert torch.equal(clicks.values, torch.stack([row[k] for k in (3, 4, 5, 6)])), "each stored key once"
    assert clicks.starts.tolist() == [0, 1] and clicks.lengths.tolist() == [2, 3]
    assert torch.equal(clicks.apart().values, torch.stack([row[k] for k in (3, 4, 4, 5, 6)]))
    assert torch.equal(clicks.expand().values, torch.stack([row[k] for k in (3, 4, 4, 5, 6, 4, 5, 6)]))
    assert clicks.expand().offsets.tolist() == [0, 2, 5, 8]
    padded, mask = clicks.padded(2)
    assert torch.equal(padded, torch.stack([row[k] for k in (3, 4, 5, 6)]).view(2, 2, 2)) and bool(mask.all())


@given(cases())
def test_evaluation_changes_nothing_and_reads_what_training_left(case):
    ours, plain = both(case)
    train(case, ours, plain)
    before = ours.stats()
    unseen = Batch.plain({f.name: torch.arange(100, 104) for f in case.features})
    ours.eval()
    plain.eval()
    torch.testing.assert_close(results(ours(unseen)), results(plain(unseen)), rtol=2e-5, atol=2e-6)
    ours.train()
    with torch.no_grad():
        torch.testing.assert_close(results(ours(unseen)), results(plain(unseen)), rtol=2e-5, atol=2e-6)
    assert ours.stats() == before


@given(st.integers(0, 1000), st.lists(st.integers(0, 30), min_size=1, max_size=40))
def test_keys_without_a_row_do_not_disturb_those_with_one(seed, keys):
    """Against a plain table in which the keys that were not admitted are put back after every step."""
    table = Table(name="t", dim=3, optimizer=SGD(lr=0.5), admission=ByProbability(probability=0.5))
    ours = Embeddings([table], [Feature(name="f", table="t")], seed=seed)
    plain = ours.read("t", torch.arange(31))
    for step in range(3):
        batch = Batch.plain({"f": torch.tensor(keys)})
        out = ours(batch).vector("f")
        torch.testing.assert_close(out, plain[torch.tensor(keys)])
        (out * (step + 1)).sum().backward()
        ours.step()
        store = ours.router.tiers["host"].stores()["t"]
        held = np.concatenate([c["keys"] for c in store.export()] or [np.empty(0, np.int64)])
        for key in set(keys) & set(held.tolist()):
            plain[key] -= 0.5 * (step + 1) * keys.count(key)
        torch.testing.assert_close(ours.read("t", torch.arange(31)), plain)


def test_an_evicted_key_trains_as_if_new_and_others_as_before():
    table = Table(name="t", dim=2, optimizer=SGD(lr=1.0), eviction=Eviction(capacity=2))
    ours = Embeddings([table], [Feature(name="f", table="t")])
    start = ours.read("t", torch.arange(4))
    for key in (0, 1, 0, 2):  # 2 takes the place of 1, the least recently used
        ours(Batch.plain({"f": torch.tensor([key])})).vector("f").sum().backward()
        ours.step()
    expected = start.clone()
    expected[0] -= 2
    expected[2] -= 1
    torch.testing.assert_close(ours.read("t", torch.arange(4)), expected)


def test_two_features_on_one_table_share_its_rows():
    ours = Embeddings(
        [Table(name="item", dim=2, optimizer=SGD(lr=1.0))],
        [Feature(name="seen", table="item"), Feature(name="bought", table="item")],
    )
    start = ours.read("item", torch.tensor([7]))
    embedded = ours(Batch.plain({"seen": torch.tensor([7]), "bought": torch.tensor([7])}))
    (embedded.vector("seen") + 2 * embedded.vector("bought")).sum().backward()
    ours.step()
    torch.testing.assert_close(ours.read("item", torch.tensor([7])), start - 3)


def test_group_and_fetch_may_run_ahead_one_by_one():
    ours = Embeddings([Table(name="t", dim=2)], [Feature(name="t")])
    batches = [Batch.plain({"t": torch.tensor([i, i + 1])}) for i in range(3)]
    lookups = [ours.group(batch) for batch in batches]
    for lookup in lookups:
        ours.embed(ours.fetch(lookup)).vectors().sum().backward()
        ours.step()
    assert ours.steps == 3
    with pytest.raises(BatchError, match="no rows yet"):
        ours.embed(ours.group(batches[0]))
    once = ours.fetch(ours.group(batches[0]), once=True)
    ours.embed(once)
    with pytest.raises(BatchError, match="to be embedded once and has been"):
        ours.embed(once)


SIZES = {"one": 1, "a few": 300, "more than one thread's": 20_000}


@pytest.mark.parametrize("keys", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("lookups", [0, 80, 40_000])
@pytest.mark.parametrize("admission", [None, ByProbability(probability=0.5)])
def test_rows_pooled_by_their_tier_are_those_fetched_and_pooled_apart(keys, lookups, admission):
    """Bit for bit: tables that one thread brings and pools, tables in several pieces, tables whose rows come late."""
    draw = torch.Generator().manual_seed(keys + lookups)

    def group(*features: str, length: int, weights: bool = False) -> Group:
        lengths = torch.full((40 * len(features),), length)
        if length > 1:
            lengths[::7] = 0
        total = int(lengths.sum())
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        given = torch.rand(total, generator=draw) if weights else None
        return Group(features, torch.randint(keys, (total,), generator=draw), offsets, weights=given)

    tables = [Table(name="a", dim=8), Table(name="b", dim=5, admission=admission)]
    features = [
        Feature(name="sum", table="a"),
        Feature(name="again", table="a", pooling="mean"),
        Feature(name="weighted", table="b"),
        Feature(name="history", table="b", pooling="sequence"),
        Feature(name="single", table="a"),
    ]
    straight, apart = (Embeddings(tables, features, seed=5) for _ in range(2))
    for training in (True, True, False):
        length = lookups // 40
        batch = Batch(
            [
                group("sum", "again", length=length),
                group("weighted", length=length, weights=True),
                group("history", length=length),
                group("single", length=min(length, 1)),
            ]
        )
        for embeddings in (straight, apart):
            embeddings.train(training)
        seen = straight(batch), apart.embed(apart.fetch(apart.group(batch)))
        torch.testing.assert_close(results(seen[0]), results(seen[1]), rtol=0, atol=0)
        if training:
            for embeddings, embedded in zip((straight, apart), seen, strict=True):
                loss_of(embedded).backward()
                embeddings.step()
    for table in tables:
        every = torch.arange(keys)
        torch.testing.assert_close(straight.read(table.name, every), apart.read(table.name, every), rtol=0, atol=0)
    assert straight.stats() == apart.stats()


def test_results_that_are_kept_are_not_written_over_and_memory_let_go_is_used_again():
    embeddings = Embeddings([Table(name="t", dim=64, optimizer=SGD(lr=1.0))], [Feature(name="t")])
    batch = Batch.plain({"t": torch.arange(8192)})
    first = embeddings(batch).vectors()  # 2 MB: of the memory that is kept
    seen = first.detach().clone()
    where = set()
    for _ in range(4):
        result = embeddings(batch).vectors()
        where.add(result.data_ptr())
        result.sum().backward()
        embeddings.step()
        del result
    torch.testing.assert_close(first, seen, rtol=0, atol=0)
    torch.testing.assert_close(embeddings(batch).vectors(), seen - 4, rtol=0, atol=1e-6)
    assert first.data_ptr() not in where
    assert len(where) == 1
    held = [_native.spare_floats(32 << 20) for _ in range(4)]  # 128 MiB each, never touched
    assert _native.spare_bytes() <= 256 << 20
    del held
    assert 0 < _native.spare_bytes() <= 256 << 20


def test_a_lookup_embedded_twice_counts_its_gradient_once():
    ours = Embeddings([Table(name="t", dim=1, optimizer=SGD(lr=1.0))], [Feature(name="t")])
    start = ours.read("t", torch.tensor([1]))
    lookup = ours.fetch(ours.group(Batch.plain({"t": torch.tensor([1])})))
    (ours.embed(lookup).vectors() + ours.embed(lookup).vectors()).sum().backward()
    ours.step()
    torch.testing.assert_close(ours.read("t", torch.tensor([1])), start - 2)


def test_a_lookup_without_backward_is_no_step_for_its_rows():
    ours = Embeddings([Table(name="t", dim=2, optimizer=Adam())], [Feature(name="t")])
    start = ours.read("t", torch.tensor([1]))
    ours(Batch.plain({"t": torch.tensor([1])}))
    ours.step()
    assert (ours.read("t", torch.tensor([1])) == start).all()
    assert ours.steps == 1


def test_features_of_the_batch_that_nobody_looks_up_are_passed_over():
    ours = Embeddings([Table(name="t", dim=2)], [Feature(name="b", table="t")])
    batch = Batch.plain({"a": torch.tensor([1, 2]), "b": torch.tensor([3, 4]), "c": [[1, 2], []]})
    embedded = ours(batch)
    assert embedded.pooled_features == ("b",)
    torch.testing.assert_close(embedded.vector("b"), ours.read("t", torch.tensor([3, 4])))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Embeddings([Table(name="item", dim=2)], [Feature(name="f", table="itme")]),
            'Feature f looks up table "itme", which there is not. Did you mean "item"?',
        ),
        (
            lambda: Embeddings([Table(name="t", dim=2), Table(name="t", dim=3)], []),
            'There are two tables called "t".',
        ),
        (
            lambda: Embeddings([Table(name="t", dim=2)], [], plan=Plan.all_on("hots", [Table(name="t", dim=2)])),
            'The plan puts table t on tier "hots", which there is not. Did you mean "host"?',
        ),
        (
            lambda: Plan({"t": (Share("hot", np.arange(3)),)}),
            "the last share must take the keys no other names",
        ),
        (
            lambda: Embeddings([Table(name="t", dim=2)], []).read("s", torch.arange(2)),
            'There is no table "s".',
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(make, message):
    with pytest.raises(SettingsError) as error:
        make()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch.plain({"g": torch.tensor([1])}), 'The batch has no feature "f"; it has g.'),
        (
            Batch((Group(("f",), torch.tensor([1]), torch.tensor([0, 1]), None, torch.ones(1)),)),
            "Feature f is a sequence, which has no use for the weights",
        ),
    ],
)
def test_batches_that_do_not_fit_are_refused(batch, message):
    ours = Embeddings([Table(name="t", dim=2)], [Feature(name="f", table="t", pooling="sequence")])
    with pytest.raises(BatchError) as error:
        ours(batch)
    assert message in str(error.value)


def test_a_lookup_fetched_again_brings_only_its_new_gradient():
    table = Table(name="a", dim=2, optimizer=SGD(lr=1.0), init=Fill(value=0.0))
    embeddings = Embeddings([table], [Feature(name="a")])
    lookup = embeddings.group(Batch.plain({"a": torch.tensor([1])}))
    for expected in (-1, -2, -3):
        embeddings.fetch(lookup)
        embeddings.embed(lookup).vectors().sum().backward()
        embeddings.step()
        assert embeddings.read("a", torch.tensor([1])).tolist() == [[expected, expected]]


def test_rows_are_read_by_keys_only():
    embeddings = Embeddings([Table(name="a", dim=2)], [Feature(name="a")])
    for keys in (torch.tensor([1.7]), torch.tensor([[1]]), [1]):
        with pytest.raises(BatchError, match="keys must"):
            embeddings.read("a", keys)


def test_there_are_no_vectors_where_nothing_is_pooled():
    embeddings = Embeddings([Table(name="a", dim=2)], [Feature(name="a", pooling="sequence")])
    with pytest.raises(BatchError, match="No feature is pooled"):
        embeddings(Batch.plain({"a": torch.tensor([1])})).vectors()


def one_row(lr: float = 1.0, **settings: Any) -> Embeddings:
    """A table of one value a row, all zeros at first, so that a row says what was taken off it."""
    table = Table(name="t", dim=1, optimizer=SGD(lr=lr), init=Fill(value=0.0))
    return Embeddings([table], [Feature(name="t")], **settings)


DEVICES = {"host": {}, "device": {"plan": Plan({"t": (Share("device", np.arange(1, 3)), Share("host"))})}}


@pytest.mark.parametrize("where", DEVICES.values(), ids=DEVICES)
def test_a_backward_after_a_step_is_applied_by_the_next(where):
    ours = one_row(**where)
    first, second = (ours(Batch.plain({"t": torch.tensor([key, 7])})).vectors() for key in (1, 2))
    first.sum().backward()
    ours.step()
    second.sum().backward()
    assert ours.read("t", torch.tensor([1, 2, 7])).tolist() == [[-1], [0], [-1]]
    ours.step()
    assert ours.read("t", torch.tensor([1, 2, 7])).tolist() == [[-1], [-1], [-2]]


@pytest.mark.parametrize("where", DEVICES.values(), ids=DEVICES)
def test_a_second_backward_needs_a_retained_graph_and_then_adds(where):
    ours, batch = one_row(**where), Batch.plain({"t": torch.tensor([1, 7])})
    out = ours(batch).vectors().sum()
    out.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()
    ours.step()
    assert ours.read("t", torch.tensor([1, 7])).tolist() == [[-1], [-1]]
    out = ours(batch).vectors().sum()
    out.backward(retain_graph=True)
    out.backward(retain_graph=True)
    ours.step()
    assert ours.read("t", torch.tensor([1, 7])).tolist() == [[-3], [-3]]
    out.backward()
    ours.step()
    assert ours.read("t", torch.tensor([1, 7])).tolist() == [[-4], [-4]]


def test_a_backward_after_rows_moved_finds_them():
    ours = one_row(plan=Plan({"t": (Share("device", np.array([1])), Share("host"))}))
    late = ours(Batch.plain({"t": torch.tensor([1, 2, 7])})).vectors()
    ours.replan(Plan({"t": (Share("device", np.array([2])), Share("host"))}))
    ours.step()
    late.sum().backward()
    ours.step()
    assert ours.read("t", torch.tensor([1, 2, 7])).tolist() == [[-1], [-1], [-1]]


def test_a_lookup_whose_results_are_dropped_goes_with_them():
    ours = one_row()
    lookup = ours.fetch(ours.group(Batch.plain({"t": torch.tensor([1])})))
    alive, out = weakref.ref(lookup), ours.embed(lookup).vectors().sum()
    del lookup
    assert alive() is not None
    del out
    gc.collect()
    assert alive() is None


def test_gradients_that_no_step_applies_are_said_and_bounded():
    ours, batch = one_row(), Batch.plain({"t": torch.tensor([1])})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(32):
            ours(batch).vectors().sum().backward()
    with pytest.warns(UserWarning, match=r"32 lookups have gradients that no step has applied.*Call step\(\)") as said:
        for _ in range(224):
            ours(batch).vectors().sum().backward()
    assert len(said) == 1
    with pytest.raises(HotrowError, match=r"256 lookups have gradients.*most_pending"):
        ours(batch)
    ours.eval()
    ours(batch)
    ours.step()
    assert ours.read("t", torch.tensor([1])).tolist() == [[-256]]
    ours.train()(batch)
