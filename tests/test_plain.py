"""The plain twin against torch's own optimizers and against explicit loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hotrow.data.batch import Batch, Group, Jagged
from hotrow.errors import BatchError, SettingsError
from hotrow.plain import PlainEmbeddings
from hotrow.schedule import Linear
from hotrow.store.optimizers import SGD, Adagrad, Adam, Momentum, Optimizer, RowWiseAdagrad
from hotrow.table import Eviction, Feature, Table

DIM = 3


def initial(table: Table, seed: int, keys: Tensor) -> Tensor:
    """Any function of seed, table and key alone will do: here sines of the key."""
    phase = torch.arange(1, table.dim + 1) * (1.0 + seed + len(table.name))
    return torch.sin((keys % 1009).to(torch.float32)[:, None] * phase)


def one_table(optimizer: Optimizer | None = None, pooling: str = "sum", **table: object) -> PlainEmbeddings:
    made = Table(name="t", dim=DIM, optimizer=optimizer or SGD(lr=0.1), **table)
    return PlainEmbeddings([made], [Feature(name="f", table="t", pooling=pooling)], initial=initial)


def train(embeddings: PlainEmbeddings, keys: Tensor, grad: Tensor) -> None:
    """One step with the given gradient for each looked-up key."""
    embeddings(Batch.plain({"f": keys})).vector("f").backward(grad)
    embeddings.step()


OPTIMIZERS = {
    "sgd": (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "sgd with decay": (
        SGD(lr=0.1, weight_decay=0.02),
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.02),
    ),
    "momentum": (Momentum(lr=0.1, momentum=0.8), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8)),
    "momentum, dampened": (
        Momentum(lr=0.1, momentum=0.8, dampening=0.3, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, dampening=0.3, weight_decay=0.01),
    ),
    "nesterov": (
        Momentum(lr=0.1, momentum=0.8, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True),
    ),
    "adagrad": (
        Adagrad(lr=0.1, initial=0.2, weight_decay=0.02),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.2, weight_decay=0.02, eps=1e-10),
    ),
    "adam": (Adam(lr=0.1, beta1=0.8), lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.999))),
    "adam with decay": (
        Adam(lr=0.1, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_equals_torchs_where_every_row_is_touched(name: str) -> None:
    ours, theirs = OPTIMIZERS[name]
    keys = torch.tensor([7, -1, 2**40, 0])
    embeddings = one_table(ours)
    dense = nn.Parameter(embeddings.read("t", keys).clone())
    optimizer = theirs([dense])
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        grad = torch.randn(4, DIM, generator=generator)
        dense.grad = grad.clone()
        optimizer.step()
        train(embeddings, keys, grad)
    torch.testing.assert_close(embeddings.read("t", keys), dense.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
@settings(max_examples=20, deadline=None)
@given(steps=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=5))
def test_an_optimizer_equals_torchs_sparse_one_where_some_rows_are_touched(name: str, steps: list) -> None:
    ours = {"sgd": SGD(lr=0.1), "adagrad": Adagrad(lr=0.1), "adam": Adam(lr=0.1)}[name]
    keys = torch.arange(6)
    embeddings = one_table(ours)
    theirs = nn.Embedding.from_pretrained(embeddings.read("t", keys), freeze=False, sparse=True)
    optimizer = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
        "adam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1),
    }[name](theirs.parameters())
    for step, looked_up in enumerate(steps):
        grad = torch.cos(torch.arange(len(looked_up) * DIM) + step).view(-1, DIM)
        optimizer.zero_grad()
        theirs(torch.tensor(looked_up)).backward(grad)
        optimizer.step()
        train(embeddings, torch.tensor(looked_up), grad)
    torch.testing.assert_close(embeddings.read("t", keys), theirs.weight.detach(), rtol=1e-5, atol=1e-6)


def test_row_wise_adagrad_shrinks_a_row_by_its_mean_squared_gradients() -> None:
    embeddings = one_table(RowWiseAdagrad(lr=0.5, eps=0.1, initial=1.0))
    start = embeddings.read("t", torch.tensor([3]))
    grads = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.0, 1.0]])
    train(embeddings, torch.tensor([3]), grads[:1])
    train(embeddings, torch.tensor([3]), grads[1:])
    first = 0.5 / (math.sqrt(1 + 14 / 3) + 0.1)
    second = 0.5 / (math.sqrt(1 + 14 / 3 + 2 / 3) + 0.1)
    expected = start - first * grads[:1] - second * grads[1:]
    torch.testing.assert_close(embeddings.read("t", torch.tensor([3])), expected)


def test_momentum_starts_anew_for_a_row_first_touched_late() -> None:
    embeddings = one_table(Momentum(lr=0.1, momentum=0.5, dampening=0.5))
    ones = torch.ones(1, DIM)
    train(embeddings, torch.tensor([1]), ones)
    train(embeddings, torch.tensor([2]), ones)
    keys = torch.tensor([1, 2])
    change = embeddings.read("t", keys) - initial(Table(name="t", dim=DIM), 0, keys)
    torch.testing.assert_close(change, torch.full((2, DIM), -0.1))


def test_a_step_clips_values_then_norms_then_decays_then_bounds() -> None:
    grad = torch.tensor([[30.0, 4.0, 0.0]])
    start = initial(Table(name="t", dim=DIM), 0, torch.tensor([5]))

    def after(**settings: float) -> Tensor:
        embeddings = one_table(SGD(lr=1.0, **settings))
        train(embeddings, torch.tensor([5]), grad)
        return embeddings.read("t", torch.tensor([5]))

    torch.testing.assert_close(after(clip_value=3.0), start - torch.tensor([[3.0, 3.0, 0.0]]))
    torch.testing.assert_close(after(clip_norm=1.0), start - grad / grad.norm())
    torch.testing.assert_close(after(clip_norm=100.0), start - grad)
    both = torch.tensor([[3.0, 3.0, 0.0]]) / math.sqrt(18)
    torch.testing.assert_close(after(clip_value=3.0, clip_norm=1.0), start - both)
    torch.testing.assert_close(after(clip_value=3.0, clip_norm=1.0, weight_decay=2.0), start - both - 2 * start)
    torch.testing.assert_close(after(bound=0.5), (start - grad).clamp(-0.5, 0.5))


def test_the_learning_rate_follows_the_schedule_by_steps_whether_or_not_a_step_touched_rows() -> None:
    embeddings = one_table(SGD(lr=1.0, schedule=Linear(steps=4)))
    start = embeddings.read("t", torch.tensor([1]))
    embeddings.step()
    embeddings.step()
    train(embeddings, torch.tensor([1]), torch.ones(1, DIM))
    torch.testing.assert_close(embeddings.read("t", torch.tensor([1])), start - 0.5)


def test_several_forwards_make_one_update_with_the_summed_gradient() -> None:
    keys = torch.tensor([1, 2, 1])
    grad = torch.arange(9.0).view(3, DIM)
    at_once, in_parts = one_table(Adagrad(lr=0.1)), one_table(Adagrad(lr=0.1))
    train(at_once, keys, grad)
    for key, part in zip(keys, grad, strict=True):
        in_parts(Batch.plain({"f": key[None]})).vector("f").backward(part[None])
    in_parts.step()
    torch.testing.assert_close(in_parts.read("t", keys), at_once.read("t", keys))


def test_a_forward_without_backward_touches_nothing() -> None:
    embeddings = one_table(SGD(lr=0.1, weight_decay=0.5))
    embeddings(Batch.plain({"f": torch.tensor([1])}))
    train(embeddings, torch.tensor([2]), torch.ones(1, DIM))
    start = initial(Table(name="t", dim=DIM), 0, torch.tensor([1, 2]))
    torch.testing.assert_close(embeddings.read("t", torch.tensor([1])), start[:1])
    assert not torch.equal(embeddings.read("t", torch.tensor([2])), start[1:])


def test_a_key_looked_up_beside_used_ones_is_touched_though_its_gradient_is_zero() -> None:
    optimizer = SGD(lr=0.1, weight_decay=0.5)
    table, other = (Table(name=name, dim=DIM, optimizer=optimizer) for name in ("t", "other"))
    features = [
        Feature(name="used", table="t"),
        Feature(name="unused", table="t", pooling="sequence"),
        Feature(name="aside", table="other", pooling="sequence"),
    ]
    embeddings = PlainEmbeddings([table, other], features, initial=initial)
    keys = {"used": torch.tensor([1, 3]), "unused": torch.tensor([2, 2]), "aside": torch.tensor([4, 4])}
    embedded = embeddings(Batch.plain(keys))
    embedded.vector("used")[:1].sum().backward()
    embeddings.step()
    start = initial(table, 0, torch.tensor([1, 2, 3]))
    expected = start * (1 - 0.05) - torch.tensor([[0.1], [0.0], [0.0]])
    torch.testing.assert_close(embeddings.read("t", torch.tensor([1, 2, 3])), expected)
    start = initial(other, 0, torch.tensor([4]))
    torch.testing.assert_close(embeddings.read("other", torch.tensor([4])), start * (1 - 0.05))


bags = st.lists(
    st.lists(st.sampled_from([0, 1, -3, 2**33 + 1, -(2**63), 2**63 - 1]), max_size=4), min_size=1, max_size=5
)


@settings(max_examples=40, deadline=None)
@given(bags, st.sampled_from(["sum", "mean"]), st.booleans())
def test_pooling_equals_a_loop_over_samples(bags: list[list[int]], pooling: str, weighted: bool) -> None:
    embeddings = one_table(pooling=pooling)
    plain = Batch.plain({"f": bags})
    values, offsets, _ = plain["f"]
    weights = (torch.arange(len(values)) % 3).to(torch.float32) if weighted else None
    got = embeddings(Batch.plain({"f": Jagged(values, offsets, weights)})).vector("f")
    rows = embeddings.read("t", values)
    factor = torch.ones(len(values)) if weights is None else weights
    for s in range(len(bags)):
        part = slice(int(offsets[s]), int(offsets[s + 1]))
        expected = (rows[part] * factor[part, None]).sum(0)
        if pooling == "mean" and factor[part].sum() > 0:
            expected = expected / factor[part].sum()
        torch.testing.assert_close(got[s], expected, msg=f"sample {s}")


def test_a_weighted_mean_gives_each_key_its_share_of_the_gradient() -> None:
    embeddings = one_table(SGD(lr=1.0), pooling="mean")
    keys, weights = torch.tensor([1, 2, 3]), torch.tensor([1.0, 3.0, 0.0])
    before = embeddings.read("t", keys)
    embedded = embeddings(Batch.plain({"f": Jagged(keys, torch.tensor([0, 2, 3]), weights)}))
    embedded.vector("f").sum().backward()
    embeddings.step()
    change = before - embeddings.read("t", keys)
    torch.testing.assert_close(change, torch.tensor([0.25, 0.75, 0.0])[:, None].expand(3, DIM))


def test_a_sequence_has_one_row_for_each_key_and_its_gradients_add_up() -> None:
    embeddings = one_table(SGD(lr=1.0), pooling="sequence")
    embedded = embeddings(Batch.plain({"f": [[4, 5], [], [4]]}))
    sequence = embedded.sequence("f")
    before = embeddings.read("t", torch.tensor([4, 5]))
    assert torch.equal(sequence.values, before[[0, 1, 0]])
    assert sequence.lengths.tolist() == [2, 0, 1]
    sequence.values.sum().backward()
    embeddings.step()
    after = embeddings.read("t", torch.tensor([4, 5]))
    torch.testing.assert_close(before - after, torch.tensor([[2.0] * DIM, [1.0] * DIM]))


def test_a_batch_without_any_keys_gives_zeros_and_can_be_stepped() -> None:
    for pooling in ("sum", "mean"):
        embeddings = one_table(pooling=pooling)
        vector = embeddings(Batch.plain({"f": [[], []]})).vector("f")
        assert torch.equal(vector.detach(), torch.zeros(2, DIM))
        vector.sum().backward()
        embeddings.step()


def grouped_batch() -> Batch:
    values = torch.tensor([1, 2, 2, 9, 8, 7])
    repeated = Group(("a", "b"), values, torch.tensor([0, 2, 3, 4, 6]), torch.tensor([0, 1, 1, 0, 1]))
    plain = Batch.plain({"c": torch.tensor([1, 2, 3, 1, 7])}).groups[0]
    return Batch((repeated, plain))


def test_a_deduplicated_batch_gives_and_learns_what_its_expanded_form_does() -> None:
    tables = [Table(name="t", dim=DIM, optimizer=Adagrad(lr=0.1)), Table(name="u", dim=2)]
    features = [
        Feature(name="a", table="t", pooling="mean"),
        Feature(name="b", table="u", pooling="sequence"),
        Feature(name="c", table="t"),
    ]
    batch = grouped_batch()
    outputs = []
    for form in (batch, batch.expand()):
        embeddings = PlainEmbeddings(tables, features, initial=initial, seed=3)
        for _ in range(3):
            embedded = embeddings(form)
            padded, _ = embedded.sequence("b").padded()
            inverse = embedded.sequence("b").inverse
            padded = padded if inverse is None else padded[inverse]
            vectors = embedded.vectors(["a", "c"])
            scale = torch.arange(1.0, 6.0)
            ((vectors**2).sum(1) @ scale + (padded**2).sum((1, 2)) @ scale).backward()
            embeddings.step()
        keys = torch.tensor([1, 2, 3, 7, 8, 9])
        outputs.append((vectors.detach(), embeddings.read("t", keys), embeddings.read("u", keys)))
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other)


def test_pooled_features_of_a_group_stand_in_the_groups_order() -> None:
    features = [Feature(name="b", table="t"), Feature(name="a", table="t"), Feature(name="c", table="t")]
    embeddings = PlainEmbeddings([Table(name="t", dim=DIM)], features, initial=initial)
    embedded = embeddings(grouped_batch())
    assert embedded.pooled_features == ("a", "b", "c")
    rows, inverse = embedded.unique("a")
    assert rows.shape == (2, DIM) and inverse is not None and inverse.tolist() == [0, 1, 1, 0, 1]


@pytest.mark.parametrize("quietly", ["eval", "no_grad"])
def test_unknown_keys_read_as_they_would_start_and_make_no_row_outside_training(quietly: str) -> None:
    asked: list[list[int]] = []

    def counting(table: Table, seed: int, keys: Tensor) -> Tensor:
        asked.append(keys.tolist())
        return initial(table, seed, keys)

    table, feature = Table(name="t", dim=DIM, optimizer=SGD(lr=1.0)), Feature(name="f", table="t")
    embeddings = PlainEmbeddings([table], [feature], initial=counting)
    batch = Batch.plain({"f": torch.tensor([1, 2])})
    if quietly == "eval":
        vector = embeddings.eval()(batch).vector("f")
    else:
        with torch.no_grad():
            vector = embeddings(batch).vector("f")
    assert not vector.requires_grad
    assert torch.equal(vector, initial(table, 0, torch.tensor([1, 2])))
    embeddings.train()(batch)
    embeddings(batch)
    assert asked == [[1, 2], [1, 2]], "the first training lookup makes the rows, the second finds them"


def test_the_order_in_which_keys_come_does_not_matter() -> None:
    keys = torch.tensor([5, 1, 3])
    grad = torch.arange(9.0).view(3, DIM)
    forward, backward = one_table(Adam(lr=0.1)), one_table(Adam(lr=0.1))
    for _ in range(2):
        train(forward, keys, grad)
        train(backward, keys.flip(0), grad.flip(0))
    assert torch.equal(forward.read("t", keys), backward.read("t", keys))


def test_bfloat16_rows_are_rounded_whenever_they_are_written() -> None:
    embeddings = one_table(SGD(lr=0.3), dtype="bfloat16")
    key = torch.tensor([11])
    start = initial(Table(name="t", dim=DIM), 0, key).bfloat16().float()
    assert torch.equal(embeddings.read("t", key), start)
    train(embeddings, key, torch.ones(1, DIM))
    assert torch.equal(embeddings.read("t", key), (start - 0.3).bfloat16().float())


def test_wrong_tables_and_features_are_refused_by_name() -> None:
    table, feature = Table(name="items", dim=2), Feature(name="item", table="items")
    with pytest.raises(SettingsError, match=r'looks up table "item".*Did you mean "items"'):
        PlainEmbeddings([table], [Feature(name="item")], initial=initial)
    with pytest.raises(SettingsError, match="Table items is given twice"):
        PlainEmbeddings([table, table], [feature], initial=initial)
    with pytest.raises(SettingsError, match="Feature item is given twice"):
        PlainEmbeddings([table], [feature, feature], initial=initial)
    with pytest.raises(SettingsError, match="items: plain tables keep every row"):
        bounded = Table(name="items", dim=2, eviction=Eviction(capacity=3))
        PlainEmbeddings([bounded], [feature], initial=initial)
    embeddings = PlainEmbeddings([table], [feature], initial=initial)
    with pytest.raises(BatchError, match='no feature "item"'):
        embeddings(Batch.plain({"items": torch.tensor([1])}))
    with pytest.raises(SettingsError, match='no table "item"'):
        embeddings.read("item", torch.tensor([1]))


def test_weights_for_a_sequence_are_refused() -> None:
    embeddings = one_table(pooling="sequence")
    weighted = Jagged(torch.tensor([1]), torch.tensor([0, 1]), torch.tensor([2.0]))
    with pytest.raises(BatchError, match="Feature f is a sequence"):
        embeddings(Batch.plain({"f": weighted}))
