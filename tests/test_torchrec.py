"""Hotrow's collections against TorchRec's own, and keyed jagged tensors there and back."""

import functools
import importlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

with warnings.catch_warnings():  # importing TorchRec without an accelerator warns of kernels that are not there
    warnings.simplefilter("ignore")
    theirs = pytest.importorskip("torchrec", reason="torchrec is not installed", exc_type=ImportError)

from torchrec import DataType, EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, PoolingType

from hotrow import torchrec as ours
from hotrow.data.batch import Batch, Group
from hotrow.errors import BatchError, CheckpointError, SettingsError
from hotrow.store.optimizers import SGD, Adagrad, Optimizer, RowWiseAdagrad
from hotrow.table import Fill, Normal, Uniform

ROWS = 12
FEATURES = ("a", "b", "c", "d")
OPTIMIZERS: dict[str, tuple[Optimizer, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (SGD(lr=0.1), functools.partial(torch.optim.SGD, lr=0.1)),
    "adagrad": (Adagrad(lr=0.1), functools.partial(torch.optim.Adagrad, lr=0.1)),
}


@dataclass(frozen=True)
class Case:
    """Tables by the features they serve, and the batches of some steps."""

    tables: tuple[tuple[int, tuple[str, ...], PoolingType], ...]
    batches: tuple[KeyedJaggedTensor, ...]


def bags(draw: Any, count: int) -> tuple[Tensor, Tensor]:
    """Keys and lengths of `count` bags, empty ones and repeated keys among them."""
    lengths = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    keys = draw(st.lists(st.integers(0, ROWS - 1), min_size=sum(lengths), max_size=sum(lengths)))
    return torch.tensor(keys, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64)


def drawn_weights(draw: Any, count: int) -> Tensor:
    whole = draw(st.lists(st.integers(1, 8), min_size=count, max_size=count))
    return torch.tensor(whole, dtype=torch.float32) / 4


@st.composite
def kjts(draw: Any, keys: tuple[str, ...] = FEATURES, weighted: bool = False) -> KeyedJaggedTensor:
    size = draw(st.integers(1, 5))
    values, lengths = bags(draw, size * len(keys))
    if draw(st.booleans()):
        values, lengths = values.int(), lengths.int()
    weights = drawn_weights(draw, len(values)) if weighted else None
    return KeyedJaggedTensor.from_lengths_sync(list(keys), values, lengths, weights)


@st.composite
def repeating_kjts(draw: Any) -> KeyedJaggedTensor:
    """A stride for each key, and inverse indices: some keys share one, in any order of names."""
    size = draw(st.integers(1, 6))
    strides = draw(st.lists(st.integers(1, 4), min_size=len(FEATURES), max_size=len(FEATURES)))
    values, lengths = bags(draw, sum(strides))
    inverse = {k: [draw(st.integers(0, s - 1)) for _ in range(size)] for k, s in zip(FEATURES, strides, strict=True)}
    if strides[0] == strides[1] and draw(st.booleans()):
        inverse["b"] = inverse["a"]
    names = draw(st.permutations(FEATURES))
    return KeyedJaggedTensor(
        list(FEATURES),
        values,
        lengths=lengths,
        stride_per_key_per_rank=[[stride] for stride in strides],
        inverse_indices=(list(names), torch.tensor([inverse[name] for name in names])),
    )


@st.composite
def cases(
    draw: Any, weighted: bool = False, same_dim: bool = False, batch: st.SearchStrategy[Any] | None = None
) -> Case:
    """One to three tables with any features in any order: some share a table, some have several or none."""
    pooling = st.just(PoolingType.SUM) if weighted else st.sampled_from([PoolingType.SUM, PoolingType.MEAN])
    served = st.lists(st.sampled_from(FEATURES), min_size=1, max_size=3, unique=True).map(tuple)
    tables = draw(st.lists(st.tuples(st.integers(1, 5), served, pooling), min_size=1, max_size=3))
    if same_dim:
        tables = [(tables[0][0], names, pooling) for _, names, pooling in tables]
    steps = draw(st.lists(kjts(weighted=weighted) if batch is None else batch, min_size=1, max_size=3))
    return Case(tuple(tables), tuple(steps))


def bag_configs(case: Case) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(ROWS, dim, name=f"t{i}", feature_names=list(names), pooling=pooling)
        for i, (dim, names, pooling) in enumerate(case.tables)
    ]


def configs(case: Case) -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(ROWS, dim, name=f"t{i}", feature_names=list(names))
        for i, (dim, names, _) in enumerate(case.tables)
    ]


def bag(**settings: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        **{"num_embeddings": ROWS, "embedding_dim": 3, "name": "t", "feature_names": ["a"]} | settings
    )


def tensor(**features: list[list[int]]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(
        list(features),
        torch.tensor([key for bags in features.values() for bag in bags for key in bag], dtype=torch.int64),
        torch.tensor([len(bag) for bags in features.values() for bag in bags]),
    )


def coefficients(values: Tensor) -> Tensor:
    """Away from zero and of one sign, so that no gradient vanishes but by rounding."""
    return 1 + torch.arange(values.numel(), dtype=torch.float32).reshape(values.shape) % 7 / 7


def same_state(mine: nn.Module, original: nn.Module) -> None:
    state, wanted = mine.state_dict(), original.state_dict()
    assert list(state) == list(wanted)
    for name, weight in wanted.items():
        torch.testing.assert_close(state[name], weight, rtol=1e-5, atol=1e-6)


def train_alike(mine: Any, original: Any, case: Case, optimizer: str, compare: Callable[[Any, Any], Tensor]) -> None:
    """Steps of both on the same batches; `compare` takes both outputs and gives the tensors to learn from."""
    mine.load_state_dict(original.state_dict())
    dense = OPTIMIZERS[optimizer][1](original.parameters())
    for kjt in case.batches:
        dense.zero_grad()
        mine_out, original_out = compare(mine(kjt), original(kjt))
        for out in (mine_out, original_out):
            (out * coefficients(out)).sum().backward()
        mine.step()
        dense.step()
    same_state(mine, original)


def same_keyed(mine: Any, original: Any) -> tuple[Tensor, Tensor]:
    assert mine.keys() == original.keys()
    assert mine.length_per_key() == original.length_per_key()
    assert mine.offset_per_key() == original.offset_per_key()
    torch.testing.assert_close(mine.values(), original.values())
    return mine.values(), original.values()


def same_jagged(mine: Any, original: Any) -> tuple[Tensor, Tensor]:
    assert list(mine) == list(original)
    for name, wanted in original.items():
        torch.testing.assert_close(mine[name].values(), wanted.values())
        assert torch.equal(mine[name].lengths(), wanted.lengths())
        assert mine[name].lengths().dtype == wanted.lengths().dtype
        assert torch.equal(mine[name].offsets(), wanted.offsets())
        if wanted.weights_or_none() is None:
            assert mine[name].weights_or_none() is None
        else:
            assert torch.equal(mine[name].weights(), wanted.weights())
    return tuple(torch.cat([out[name].values() for name in original]) for out in (mine, original))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@given(cases())
def test_bags_give_and_learn_what_torchrecs_do(optimizer: str, case: Case) -> None:
    mine = ours.EmbeddingBagCollection(bag_configs(case), optimizer=OPTIMIZERS[optimizer][0])
    train_alike(mine, theirs.EmbeddingBagCollection(bag_configs(case)), case, optimizer, same_keyed)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@given(cases(weighted=True))
def test_weighted_bags_give_and_learn_what_torchrecs_do(optimizer: str, case: Case) -> None:
    mine = ours.EmbeddingBagCollection(bag_configs(case), is_weighted=True, optimizer=OPTIMIZERS[optimizer][0])
    original = theirs.EmbeddingBagCollection(bag_configs(case), is_weighted=True)
    train_alike(mine, original, case, optimizer, same_keyed)


@given(cases(batch=repeating_kjts()))
def test_bags_of_deduplicated_samples_give_and_learn_what_torchrecs_do(case: Case) -> None:
    mine = ours.EmbeddingBagCollection(bag_configs(case), optimizer=OPTIMIZERS["sgd"][0])
    train_alike(mine, theirs.EmbeddingBagCollection(bag_configs(case)), case, "sgd", same_keyed)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@given(cases(same_dim=True), st.booleans())
def test_sequences_give_and_learn_what_torchrecs_do(optimizer: str, case: Case, need_indices: bool) -> None:
    made = OPTIMIZERS[optimizer][0]
    mine = ours.EmbeddingCollection(configs(case), need_indices=need_indices, optimizer=made)
    original = theirs.EmbeddingCollection(configs(case), need_indices=need_indices)
    train_alike(mine, original, case, optimizer, same_jagged)


@given(cases(same_dim=True, batch=repeating_kjts()))
def test_sequences_of_deduplicated_samples_give_and_learn_what_torchrecs_do(case: Case) -> None:
    mine = ours.EmbeddingCollection(configs(case), optimizer=OPTIMIZERS["sgd"][0])
    train_alike(mine, theirs.EmbeddingCollection(configs(case)), case, "sgd", same_jagged)


def test_weights_are_passed_over_where_torchrec_passes_them_over() -> None:
    kjt = tensor(a=[[1, 2]])
    weighted = KeyedJaggedTensor(["a"], kjt.values(), torch.tensor([3.0, 4.0]), lengths=kjt.lengths())
    bags = ours.EmbeddingBagCollection([bag()])
    assert torch.equal(bags(weighted).values(), bags(kjt).values())
    rows = ours.EmbeddingCollection([EmbeddingConfig(ROWS, 3, name="t", feature_names=["a"])])
    assert torch.equal(rows(weighted)["a"].values(), rows(kjt)["a"].values())


def test_what_the_originals_say_of_themselves_is_said_too() -> None:
    tables = [bag(), bag(name="u", feature_names=["a", "b"]), bag(name="c", feature_names=[])]
    mine, original = ours.EmbeddingBagCollection(tables, True), theirs.EmbeddingBagCollection(tables, True)
    assert isinstance(mine, theirs.EmbeddingBagCollectionInterface)
    assert mine.embedding_bag_configs() == original.embedding_bag_configs()
    assert (mine.is_weighted(), mine.device) == (original.is_weighted(), original.device)

    tables = [
        EmbeddingConfig(ROWS, 3, name=n, feature_names=f) for n, f in (("t", ["a"]), ("u", ["a", "b"]), ("c", []))
    ]
    mine, original = (
        ours.EmbeddingCollection(tables, None, True),
        theirs.EmbeddingCollection(tables, None, True),
    )
    assert mine.embedding_configs() == original.embedding_configs()
    assert mine.embedding_names_by_table() == original.embedding_names_by_table()
    assert (mine.embedding_dim(), mine.need_indices()) == (original.embedding_dim(), original.need_indices())


def test_a_config_without_feature_names_is_not_changed() -> None:
    config = bag(feature_names=[])
    assert ours.EmbeddingBagCollection([config])(tensor(t=[[1]])).keys() == ["t"]
    assert config.feature_names == []


def test_keys_outside_num_embeddings_learn_like_others() -> None:
    mine = ours.EmbeddingBagCollection([bag()], optimizer=SGD(lr=0.5))
    kjt = tensor(a=[[-5, 2**40]])
    before = mine(kjt).values()
    before.sum().backward()
    mine.step()
    torch.testing.assert_close(mine(kjt).values(), before.detach() - 2 * 0.5)
    with pytest.raises(CheckpointError, match=r"Table t has 2 rows with keys outside 0 to 11.*snapshot"):
        mine.state_dict()


def test_new_rows_start_within_torchrecs_bounds() -> None:
    mine = ours.EmbeddingBagCollection([bag(num_embeddings=400, embedding_dim=16)])
    weight = mine.state_dict()["embedding_bags.t.weight"]
    assert weight.shape == (400, 16)
    assert 0.045 < weight.abs().max() <= 0.05
    assert abs(weight.mean()) < 0.005


def test_evaluation_reads_and_changes_nothing() -> None:
    mine = ours.EmbeddingBagCollection([bag()]).eval()
    out = mine(tensor(a=[[1]])).values()
    assert not out.requires_grad
    assert mine.rows.stats()["t"]["rows"] == 0


def test_outputs_go_to_the_device_given() -> None:
    mine = ours.EmbeddingBagCollection([bag()], device="cpu")
    assert mine.device == torch.device("cpu")
    assert mine(tensor(a=[[1]])).values().device == torch.device("cpu")


class Model(nn.Module):
    """A dense layer over a collection: names in its state dict have a prefix."""

    def __init__(self, sparse: nn.Module) -> None:
        super().__init__()
        self.sparse, self.dense = sparse, nn.Linear(3, 1)


def test_weights_move_both_ways_inside_a_model() -> None:
    mine, original = (
        Model(ours.EmbeddingBagCollection([bag()])),
        Model(theirs.EmbeddingBagCollection([bag()])),
    )
    original.load_state_dict(mine.state_dict())
    same_state(mine, original)
    with torch.no_grad():
        original.sparse.embedding_bags["t"].weight.add_(1)
    mine.load_state_dict(original.state_dict())
    same_state(mine, original)
    learned = sorted(name for name, p in mine.named_parameters() if p.requires_grad)
    assert learned == ["dense.bias", "dense.weight"]


def test_loading_forgets_the_optimizer_state_of_the_rows() -> None:
    kjt, optimizer = tensor(a=[[1]]), RowWiseAdagrad(lr=0.1, initial=0.5)
    used, new = (ours.EmbeddingBagCollection([bag()], optimizer=optimizer) for _ in range(2))
    start = new.state_dict()
    for mine in (used, used, new):
        mine.load_state_dict(start)
        mine(kjt).values().sum().backward()
        mine.step()
    same_state(used, new)


def test_a_state_dict_that_does_not_fit_is_refused() -> None:
    mine = ours.EmbeddingBagCollection([bag()])
    weight = torch.zeros(ROWS, 3)
    with pytest.raises(
        RuntimeError, match=r"embedding_bags.t.weight is \[5, 3\], but the table's config says \[12, 3\]"
    ):
        mine.load_state_dict({"embedding_bags.t.weight": weight[:5]})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*embedding_bags\.u\.weight"):
        mine.load_state_dict({"embedding_bags.t.weight": weight, "embedding_bags.u.weight": weight})
    with pytest.raises(RuntimeError, match=r"Missing key.*embedding_bags\.t\.weight"):
        mine.load_state_dict({})
    assert mine.load_state_dict({}, strict=False).missing_keys == ["embedding_bags.t.weight"]


def test_asking_for_a_state_dict_takes_nothing_from_snapshots(tmp_path: Any) -> None:
    mine = ours.EmbeddingBagCollection([bag()], optimizer=SGD(lr=0.5))
    mine.rows.snapshot(tmp_path / "full").write()
    mine(tensor(a=[[1, 2]])).values().sum().backward()
    mine.step()
    snapshot = mine.rows.snapshot(tmp_path / "more", base=tmp_path / "full")
    state = mine.state_dict()
    snapshot.write()
    other = ours.EmbeddingBagCollection([bag()], optimizer=SGD(lr=0.5))
    other.rows.restore(tmp_path / "more")
    assert other.rows.stats()["t"]["rows"] == 2
    assert torch.equal(other.state_dict()["embedding_bags.t.weight"], state["embedding_bags.t.weight"])


def test_bfloat16_rows_come_and_go_as_bfloat16() -> None:
    mine = ours.EmbeddingBagCollection([bag(data_type=DataType.BF16)])
    weight = torch.randn(ROWS, 3)
    mine.load_state_dict({"embedding_bags.t.weight": weight})
    state = mine.state_dict()["embedding_bags.t.weight"]
    assert state.dtype == torch.bfloat16
    assert torch.equal(state, weight.bfloat16())
    out = mine(tensor(a=[[4]])).values()
    assert out.dtype == torch.float32
    assert torch.equal(out[0], weight[4].bfloat16().float())


@pytest.mark.parametrize(
    ("settings", "init"),
    [
        ({"weight_init_min": -0.25, "weight_init_max": 0.25}, Uniform(scale=0.25)),
        ({"weight_init_min": 0.5, "weight_init_max": 0.5}, Fill(value=0.5)),
        ({"init_fn": functools.partial(nn.init.uniform_, a=-2, b=2)}, Uniform(scale=2)),
        ({"init_fn": functools.partial(nn.init.normal_, std=0.02)}, Normal(std=0.02)),
        ({"init_fn": functools.partial(nn.init.normal_, 0.0, 0.3)}, Normal(std=0.3)),
        ({"init_fn": functools.partial(nn.init.constant_, val=7.0)}, Fill(value=7)),
        ({"init_fn": nn.init.zeros_}, Fill(value=0)),
        ({"init_fn": nn.init.ones_}, Fill(value=1)),
    ],
)
def test_rows_start_as_the_config_says(settings: dict[str, Any], init: Any) -> None:
    assert ours.EmbeddingBagCollection([bag(**settings)]).rows.tables["t"].init == init


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"data_type": DataType.FP16}, "Table t: data_type FP16 is not supported"),
        ({"data_type": DataType.INT8}, "Table t: data_type INT8 is not supported"),
        ({"pooling": PoolingType.NONE}, "Table t: pooling NONE"),
        ({"weight_init_max": 0.5}, r"Table t: rows cannot start from uniform_\(a=-0.28.*, b=0.5\)"),
        ({"init_fn": nn.init.uniform_}, r"Table t: rows cannot start from uniform_\(\)"),
        ({"init_fn": functools.partial(nn.init.normal_, mean=1.0)}, r"start from normal_\(mean=1.0\)"),
        ({"init_fn": functools.partial(nn.init.normal_, generator=torch.Generator())}, "without a generator"),
        ({"init_fn": nn.init.xavier_uniform_}, "Table t: rows cannot start from xavier_uniform_"),
        ({"num_embeddings_post_pruning": 4}, "Table t: num_embeddings_post_pruning=4 is not supported"),
        ({"need_pos": True}, "Table t: need_pos=True is not supported"),
        ({"total_num_buckets": 8}, "Table t: total_num_buckets=8 is not supported"),
        ({"enable_embedding_update": True}, "Table t: enable_embedding_update=True is not supported"),
        ({"feature_names": ["a", "b", "a"]}, "Table t: feature a is given twice"),
        ({"num_embeddings": 0, "init_fn": nn.init.zeros_}, "Table t: num_embeddings must be at least 1"),
        ({"embedding_dim": 0}, r"Table t\.dim"),
        ({"name": ""}, r"name"),
    ],
)
def test_what_a_config_asks_for_in_vain_is_refused_by_name(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        ours.EmbeddingBagCollection([bag(**settings)])


def test_collections_that_cannot_be_are_refused() -> None:
    with pytest.raises(SettingsError, match="at least one table"):
        ours.EmbeddingBagCollection([])
    with pytest.raises(SettingsError, match="must be given as EmbeddingBagConfig, not EmbeddingConfig"):
        ours.EmbeddingBagCollection([EmbeddingConfig(ROWS, 3, name="t")])
    with pytest.raises(SettingsError, match="two tables called"):
        ours.EmbeddingBagCollection([bag(), bag(feature_names=["b"])])
    with pytest.raises(SettingsError, match="Table t: MEAN pooling"):
        ours.EmbeddingBagCollection([bag(pooling=PoolingType.MEAN)], is_weighted=True)
    with pytest.raises(SettingsError, match="Table u has embedding_dim 4 and table t 3"):
        ours.EmbeddingCollection([EmbeddingConfig(ROWS, 3, name="t"), EmbeddingConfig(ROWS, 4, name="u")])
    with pytest.raises(SettingsError, match="optimizer"):
        ours.EmbeddingBagCollection([bag()], optimizer=torch.optim.SGD)


def test_features_that_cannot_be_looked_up_are_refused() -> None:
    mine, weighted = (ours.EmbeddingBagCollection([bag()], is_weighted=w) for w in (False, True))
    kjt = tensor(a=[[1, 2]])
    with pytest.raises(BatchError, match='has no feature "a"'):
        mine(tensor(b=[[1]]))
    with pytest.raises(BatchError, match="must be a KeyedJaggedTensor, not dict"):
        mine({"a": torch.tensor([1])})
    with pytest.raises(BatchError, match="has no weights"):
        weighted(kjt)
    learned = nn.Parameter(torch.ones(2))
    with pytest.raises(BatchError, match="take gradients"):
        weighted(KeyedJaggedTensor(["a"], kjt.values(), learned, lengths=kjt.lengths()))
    with pytest.raises(BatchError, match="1 weights for 2 values"):
        weighted(KeyedJaggedTensor(["a"], kjt.values(), torch.ones(1), lengths=kjt.lengths()))
    with pytest.raises(BatchError, match="whole numbers"):
        mine(KeyedJaggedTensor(["a"], torch.tensor([0.5]), lengths=torch.tensor([1])))
    with pytest.raises(BatchError, match="has 2 values, but its lengths add up to 1"):
        mine(KeyedJaggedTensor(["a"], kjt.values(), lengths=torch.tensor([1])))
    with pytest.raises(BatchError, match=r"3 bags, but strides for 2 \(a 2\)"):
        mine(KeyedJaggedTensor(["a"], torch.tensor([1, 2, 3]), lengths=torch.ones(3, dtype=torch.int64), stride=2))


def test_features_of_different_sizes_without_an_inverse_are_refused() -> None:
    parts = {"values": torch.tensor([1, 2, 3]), "lengths": torch.tensor([1, 1, 1])}
    with pytest.raises(BatchError, match=r"different numbers of samples \(a 2, b 1\)"):
        ours.from_kjt(KeyedJaggedTensor(["a", "b"], **parts, stride_per_key_per_rank=[[2], [1]]))
    with pytest.raises(BatchError, match='inverse_indices of the KeyedJaggedTensor lack feature "b"'):
        ours.from_kjt(
            KeyedJaggedTensor(
                ["a", "b"],
                **parts,
                stride_per_key_per_rank=[[2], [1]],
                inverse_indices=(["a"], torch.tensor([[0, 1]])),
            )
        )


def same_kjt(one: KeyedJaggedTensor, other: KeyedJaggedTensor) -> None:
    assert one.keys() == other.keys()
    assert one.stride_per_key() == other.stride_per_key()
    assert torch.equal(one.values(), other.values().long())
    assert torch.equal(one.offsets(), other.offsets().long())
    assert torch.equal(one.lengths(), other.lengths().long())
    assert (one.weights_or_none() is None) == (other.weights_or_none() is None)
    if other.weights_or_none() is not None:
        assert torch.equal(one.weights(), other.weights())


@given(st.booleans().flatmap(lambda weighted: kjts(weighted=weighted)))
def test_a_keyed_jagged_tensor_comes_back_as_it_was(kjt: KeyedJaggedTensor) -> None:
    batch = ours.from_kjt(kjt)
    assert (batch.size, batch.features, len(batch.groups)) == (kjt.stride(), tuple(kjt.keys()), 1)
    for key, bags in kjt.to_dict().items():
        assert torch.equal(batch[key].values, bags.values().long())
        assert torch.equal(batch[key].offsets, bags.offsets().long())
    same_kjt(ours.to_kjt(batch), kjt)


@given(repeating_kjts())
def test_a_deduplicated_tensor_comes_back_as_it_was(kjt: KeyedJaggedTensor) -> None:
    batch = ours.from_kjt(kjt)
    assert batch.size == kjt.stride()
    back = ours.to_kjt(batch, expand=False)
    same_kjt(back, kjt)
    names, inverse = kjt.inverse_indices()
    assert torch.equal(back.inverse_indices()[1], inverse[[names.index(key) for key in FEATURES]])

    whole = ours.to_kjt(batch)
    assert whole.inverse_indices_or_none() is None
    for key, bags in kjt.to_dict().items():
        dense = [bags.to_dense()[i].tolist() for i in inverse[names.index(key)]]
        assert [bag.tolist() for bag in whole[key].to_dense()] == dense


def test_windows_that_overlap_are_spelled_out() -> None:
    sliding = Group(
        ("f",), torch.tensor([1, 2, 3]), torch.tensor([0, 2, 4]), torch.tensor([0, 1, 1]), None, torch.tensor([0, 1])
    )
    kept = ours.to_kjt(Batch((sliding,)), expand=False)
    assert kept.values().tolist() == [1, 2, 2, 3] and kept.inverse_indices()[1].tolist() == [[0, 1, 1]]
    assert ours.to_kjt(Batch((sliding,))).values().tolist() == [1, 2, 2, 3, 2, 3]


def test_features_that_repeat_together_become_one_group() -> None:
    kjt = KeyedJaggedTensor(
        ["a", "b", "c"],
        torch.tensor([1, 2, 3, 4, 5]),
        lengths=torch.tensor([1, 1, 1, 1, 1]),
        stride_per_key_per_rank=[[2], [2], [1]],
        inverse_indices=(["a", "b", "c"], torch.tensor([[0, 1, 1], [0, 1, 1], [0, 0, 0]])),
    )
    assert [group.features for group in ours.from_kjt(kjt).groups] == [("a", "b"), ("c",)]


def test_keys_and_weights_are_shared_and_not_copied() -> None:
    kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), torch.ones(3), lengths=torch.tensor([1, 0, 1, 1]))
    batch = ours.from_kjt(kjt)
    (group,) = batch.groups
    back = ours.to_kjt(batch)
    for other in (group.values, back.values()):
        assert other.data_ptr() == kjt.values().data_ptr()
    for other in (group.weights, back.weights()):
        assert other.data_ptr() == kjt.weights().data_ptr()
    assert back.offsets().data_ptr() == kjt.offsets().data_ptr()


def test_groups_are_spelled_out_and_keys_without_weights_weigh_one() -> None:
    repeats = Group(("h",), torch.tensor([7, 8, 9]), torch.tensor([0, 2, 3]), inverse=torch.tensor([1, 0, 1]))
    weighted = Group(("w",), torch.tensor([5]), torch.tensor([0, 0, 1, 1]), weights=torch.tensor([0.5]))
    kjt = ours.to_kjt(Batch((repeats, weighted)))
    assert (kjt.keys(), kjt.stride()) == (["h", "w"], 3)
    assert kjt.values().tolist() == [9, 7, 8, 9, 5]
    assert kjt.lengths().tolist() == [1, 2, 1, 0, 1, 0]
    assert kjt.weights().tolist() == [1, 1, 1, 1, 0.5]


def test_labels_and_dense_features_ride_along() -> None:
    dense, labels, weights, users = torch.rand(2, 3), torch.ones(2), torch.rand(2), torch.tensor([4, 4])
    batch = ours.from_kjt(tensor(a=[[1], []]), dense=dense, labels=labels, weights=weights, users=users)
    assert (batch.dense is dense, batch.labels is labels, batch.weights is weights, batch.users is users) == (True,) * 4
    with pytest.raises(BatchError, match="labels has 3 samples, the batch has 2"):
        ours.from_kjt(tensor(a=[[1], []]), labels=torch.ones(3))


def test_a_batch_without_features_or_samples_converts() -> None:
    assert ours.to_kjt(Batch((), labels=torch.ones(2))).keys() == []
    assert ours.from_kjt(ours.to_kjt(Batch((), labels=torch.ones(2))), labels=torch.ones(2)).size == 2
    nobody = Batch.plain({"a": torch.empty(0, dtype=torch.int64)})
    assert ours.from_kjt(ours.to_kjt(nobody)).size == 0
    empty = KeyedJaggedTensor(["a"], torch.tensor([]), lengths=torch.tensor([0, 0]))
    assert [part.tolist() for part in ours.from_kjt(empty)["a"][:2]] == [[], [0, 0, 0]]


def test_without_torchrec_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchrec", None)
    monkeypatch.delitem(sys.modules, "hotrow.torchrec")
    with pytest.raises(ImportError, match=r"pip install 'hotrow\[torchrec\]'"):
        importlib.import_module("hotrow.torchrec")
