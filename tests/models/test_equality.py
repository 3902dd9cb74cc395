"""Deduplication on and off: the same losses and gradients, for every model and every form of batch.

Looking up and pooling add in the same order either way: what a model sees is the same bit for bit. Behind that, samples
that share something add their gradients in another order, and matrix products of another height may round in
another way. In float64 that leaves 1e-9 here; in float32, as trained, 2e-5 of the largest value of a tensor.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from hotrow import Batch, Embedded, Embeddings, Feature, Group, Table
from hotrow.lookup import Lookup
from hotrow.models import (
    DCNv2Settings,
    DeepFMSettings,
    DINSettings,
    DLRMSettings,
    ModelInputs,
    ModelSettings,
    TransformerSettings,
    WideDeepSettings,
    build,
)
from hotrow.models.model import RankingModel
from hotrow.store.optimizers import Adagrad
from shapes import GroupShape, batches

MODELS: dict[str, ModelSettings] = {
    "dlrm": DLRMSettings(bottom=(6,), top=(8,)),
    "dcnv2": DCNv2Settings(deep=(8,), layers=2),
    "dcnv2, low rank and stacked": DCNv2Settings(rank=3, structure="stacked", deep=(8,), layers=2),
    "deepfm": DeepFMSettings(deep=(8,)),
    "wide_deep": WideDeepSettings(deep=(8,)),
    "din": DINSettings(targets={"clicked": "item"}, attention=6, deep=(8,)),
    "transformer": TransformerSettings(targets={"clicked": "item"}, deep=(8,), length=3),
}
POOLINGS = {"user": "sum", "tags": "mean", "item": "sum", "seen": "mean", "clicked": "sequence", "read": "sequence"}
TABLES = {"user": "users", "tags": "tags", "item": "items", "seen": "items", "clicked": "items", "read": "pages"}


def embeddings_and_model(
    model: ModelSettings, features: list[Feature], dim: int, dense: int
) -> tuple[Embeddings, RankingModel]:
    names = sorted({feature.table for feature in features})
    tables = [Table(name=name, dim=dim + model.extra_row_values, optimizer=Adagrad(lr=0.1)) for name in names]
    torch.manual_seed(3)
    inputs = ModelInputs(features, {f.name: dim + model.extra_row_values for f in features}, dense=dense)
    return Embeddings(tables, features, seed=7), build(model, inputs)


def in_double(embedded: Embedded) -> Embedded:
    groups = [replace(group, rows=group.rows.double()) for group in embedded.groups]
    names = embedded.sequence_features
    sequences = {n: replace(embedded.sequence(n), values=embedded.sequence(n).values.double()) for n in names}
    return Embedded(groups, sequences)


def loss_of(embeddings: Embeddings, model: RankingModel, batch: Batch) -> tuple[Tensor, Lookup]:
    """The weighted loss as the training loop has it, in the precision of the model."""
    lookup = embeddings.fetch(embeddings.group(batch))
    embedded = embeddings.embed(lookup)
    double = next(model.parameters()).dtype == torch.float64
    embedded = in_double(embedded) if double else embedded
    assert batch.dense is not None and batch.labels is not None and batch.weights is not None
    dense = batch.dense.double() if double else batch.dense
    logits = model(embedded, dense)
    losses = F.binary_cross_entropy_with_logits(logits, batch.labels.to(logits.dtype), reduction="none")
    return (losses * batch.weights).sum() / batch.weights.sum().clamp(min=1e-12), lookup


def gradients(embeddings: Embeddings, model: RankingModel, batch: Batch) -> dict[str, Tensor]:
    """The loss, the gradient of every dense parameter, and of every row, in the order of its keys."""
    loss, lookup = loss_of(embeddings, model, batch)
    loss.backward()
    found = {"loss": loss.detach()}
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    flat, starts = torch.from_numpy(lookup.gradients().flat), lookup.grouping.starts
    for t, (name, table) in enumerate(embeddings.tables.items()):
        order = np.argsort(lookup.grouping.keys(t))
        found[f"keys of {name}"] = torch.from_numpy(lookup.grouping.keys(t)[order])
        found[f"rows of {name}"] = flat[starts[t] : starts[t + 1]].view(-1, table.dim)[torch.from_numpy(order)]
    return found


def assert_equal_within(share: float, one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Within a share of the largest value of each tensor."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.shape == other[name].shape, name
        if value.is_floating_point():
            largest = float(value.abs().max()) if value.numel() else 0.0
            far = float((value - other[name]).abs().max()) if value.numel() else 0.0
            assert far <= share * largest + 1e-12, name
        else:
            assert torch.equal(value, other[name]), name


@st.composite
def deduplicated(draw: st.DrawFn) -> Batch:
    """All features, in groups that repeat, slide, are weighted, or do nothing of the kind."""
    flag = st.booleans()
    groups = [
        GroupShape(("user", "clicked", "read"), False, draw(flag), draw(flag), single=("user",)),
        GroupShape(("tags",), draw(flag), draw(flag), draw(flag)),
        GroupShape(("seen",), draw(flag), draw(flag), draw(flag)),
        GroupShape(("item",), False, draw(flag), False, single=("item",)),
    ]
    batch = draw(batches(groups, st.integers(0, 9)))
    size = len(batch)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    return replace(
        batch,
        dense=torch.randn(size, 2, generator=generator),
        labels=torch.randint(0, 2, (size,), generator=generator).float(),
        weights=torch.rand(size, generator=generator) + 0.1,
    )


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=15)
@given(batch=deduplicated())
def test_losses_and_gradients_are_the_same_deduplicated_and_expanded(name: str, batch: Batch) -> None:
    features = [Feature(name=n, table=TABLES[n], pooling=p) for n, p in POOLINGS.items()]
    results = []
    for form in (batch, batch.expand()):
        embeddings, model = embeddings_and_model(MODELS[name], features, 4, 2)
        results.append(gradients(embeddings, model.double(), form))
    rows = [{k: v for k, v in r.items() if "rows of" in k or "keys of" in k} for r in results]
    dense = [{k: v for k, v in r.items() if k not in rows[0]} for r in results]
    assert_equal_within(1e-9, *dense)
    assert_equal_within(2e-6, *rows)  # they are added in float32, which is what rows are kept in


@given(batch=deduplicated())
def test_what_a_model_sees_is_the_same_bit_for_bit(batch: Batch) -> None:
    features = [Feature(name=n, table=TABLES[n], pooling=p) for n, p in POOLINGS.items()]
    embeddings, _ = embeddings_and_model(MODELS["din"], features, 5, 2)
    embedded, spelled_out = embeddings(batch).expand(), embeddings(batch.expand())
    for name in embedded.pooled_features:
        assert torch.equal(embedded.vector(name), spelled_out.vector(name))
    for name in embedded.sequence_features:
        assert torch.equal(embedded.sequence(name).values, spelled_out.sequence(name).values)
        assert torch.equal(embedded.sequence(name).offsets, spelled_out.sequence(name).offsets)


GLOBO_FIELDS = ("click_environment", "click_deviceGroup", "click_os", "click_country", "click_region")


@pytest.fixture(scope="module")
def globo(shared_data) -> Callable[[], Batch]:
    """Clicks of a real news site, each with three articles not clicked on; a user's history slides along his clicks."""
    file = shared_data / "globo.parquet"
    if not file.is_file():
        pytest.skip("the real data of ../shared/data has no globo.parquet")
    clicks = next(pq.ParquetFile(file).iter_batches(batch_size=400))
    column = {name: clicks[name].to_numpy().astype(np.int64) for name in clicks.schema.names}
    users, articles = column["user_id"], column["click_article_id"]
    assert (np.diff(users) >= 0).all(), "the log is in the order of users"

    def build_batch() -> Batch:
        count, most = len(users), 20
        before = np.arange(count) - np.searchsorted(users, users)  # clicks of the same user before this one
        lengths = np.minimum(before, most)
        single = [users, *(column[name] for name in GLOBO_FIELDS)]
        values = np.concatenate([articles, *single])
        begins = np.concatenate([np.arange(count) - lengths, count + np.arange(count * len(single))])
        offsets = np.concatenate([[0], np.cumsum(np.concatenate([lengths, np.ones(count * len(single), np.int64)]))])
        inverse = torch.arange(count).repeat_interleave(4)
        context = Group(
            ("clicked", "user", *GLOBO_FIELDS),
            torch.from_numpy(values),
            torch.from_numpy(offsets),
            inverse,
            None,
            torch.from_numpy(begins),
        )
        referrer = Group(  # a weighted group beside the other, with the same repeats
            ("referrer",),
            torch.from_numpy(column["click_referrer_type"]),
            torch.arange(count + 1),
            inverse,
            torch.linspace(0.5, 1.5, count),
        )
        rng = np.random.default_rng(0)
        items = np.concatenate([articles[:, None], rng.choice(articles, (count, 3))], axis=1).reshape(-1)
        item = Batch.plain({"item": torch.from_numpy(items)}).groups[0]
        labels = torch.tensor([1.0, 0.0, 0.0, 0.0]).repeat(count)
        dense = torch.from_numpy(np.log1p(np.repeat(before, 4)).astype(np.float32))[:, None]
        return Batch((context, referrer, item), dense=dense, labels=labels, weights=torch.ones(len(labels)))

    return build_batch


@pytest.mark.parametrize("name", MODELS)
def test_a_real_log_trains_alike_deduplicated_and_expanded(name: str, globo: Callable[[], Batch]) -> None:
    batch = globo()
    features = [
        Feature(name="item", table="items"),
        Feature(name="clicked", table="items", pooling="sequence"),
        *(Feature(name=n) for n in ("user", "referrer", *GLOBO_FIELDS)),
    ]
    results, losses = [], []
    for form in (batch, batch.expand()):
        embeddings, model = embeddings_and_model(MODELS[name], features, 8, 1)
        results.append(gradients(embeddings, model, form))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for _ in range(3):
            optimizer.step()
            optimizer.zero_grad()
            embeddings.step()
            loss, _ = loss_of(embeddings, model, form)
            loss.backward()
            losses[-1].append(loss.detach())
    assert_equal_within(2e-5, *results)
    torch.testing.assert_close(losses[0], losses[1], rtol=2e-5, atol=0)
    assert float(losses[0][-1]) < float(results[0]["loss"]), "it learns"
