"""What every model promises, whatever it computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch.nn import functional as F

from hotrow.data.batch import Batch
from hotrow.embedded import Embedded, JaggedRows, PooledGroup
from hotrow.errors import BatchError, SettingsError
from hotrow.models import (
    DCNv2Settings,
    DeepFMSettings,
    DINSettings,
    DLRMSettings,
    Model,
    ModelInputs,
    ModelSettings,
    TransformerSettings,
    WideDeepSettings,
    build,
    joint,
)
from hotrow.plain import PlainEmbeddings
from hotrow.store.optimizers import Adam
from hotrow.table import Feature, Normal, Table

CASES: dict[str, ModelSettings] = {
    "dlrm": DLRMSettings(),
    "dcnv2": DCNv2Settings(),
    "dcnv2, low rank and stacked": DCNv2Settings(rank=3, structure="stacked"),
    "dcnv2, cross layers only": DCNv2Settings(deep=()),
    "deepfm": DeepFMSettings(),
    "wide_deep": WideDeepSettings(),
    "din": DINSettings(),
    "din, prelu": DINSettings(activation="prelu"),
    "transformer": TransformerSettings(),
    "transformer, wider, one layer": TransformerSettings(width=12, heads=3, layers=1),
}
CaseOf = Callable[[ModelSettings], Any]


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_gradients_reach_every_parameter_and_every_table(settings: ModelSettings, case_of: CaseOf) -> None:
    torch.manual_seed(0)
    case = case_of(settings)
    model, embeddings = build(settings, case.inputs), case.embeddings()
    keys = {"items": [3, 4, 5, 6], "users": [10, 11, 12], "tags": [1, 2, 3], "pages": [70, 71]}
    for _ in range(2):  # Dice starts as x times a sigmoid, and the bottom ReLUs may sleep for a step
        logits = model(embeddings(case.batch), case.batch.dense)
        assert logits.shape == (7,)
        F.binary_cross_entropy_with_logits(logits, case.batch.labels).backward()
        before = {table: embeddings.read(table, torch.tensor(of)) for table, of in keys.items()}
        embeddings.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.abs().sum() > 0), name
    for table, of in keys.items():
        moved = (embeddings.read(table, torch.tensor(of)) - before[table]).abs().sum(dim=1)
        assert bool((moved > 0).all()), table


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_deduplication_changes_neither_logits_nor_learning(settings: ModelSettings, case_of: CaseOf) -> None:
    case = case_of(settings)
    results = []
    for batch in (case.batch, case.batch.expand()):
        torch.manual_seed(0)
        model, embeddings = build(settings, case.inputs), case.embeddings()
        for _ in range(2):
            logits = model(embeddings(batch), batch.dense)
            F.binary_cross_entropy_with_logits(logits, batch.labels).backward()
            embeddings.step()
        rows = [embeddings.read(name, torch.arange(80)) for name in ("items", "users", "tags", "pages")]
        results.append([logits.detach(), *(p.grad for p in model.parameters()), *model.buffers(), *rows])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_a_sample_scores_the_same_whatever_stands_beside_it(settings: ModelSettings, case_of: CaseOf) -> None:
    torch.manual_seed(0)
    case = case_of(settings)
    model, embeddings = build(settings, case.inputs).eval(), case.embeddings().eval()
    expanded = case.batch.expand()
    whole = model(embeddings(expanded), expanded.dense)
    for i in range(len(expanded)):
        bags = {name: [expanded[name].values[slice(*expanded[name].offsets[i : i + 2])].tolist()] for name in expanded}
        alone = Batch.plain(bags, dense=expanded.dense[i : i + 1])
        torch.testing.assert_close(model(embeddings(alone), alone.dense)[0], whole[i])


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_a_model_can_learn_what_only_two_features_together_tell(settings: ModelSettings) -> None:
    torch.manual_seed(0)
    user, item = (t.reshape(-1) for t in torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij"))
    labels = ((user + item) % 2).to(torch.float32)
    dim = 8 + settings.extra_row_values
    features = [
        Feature(name="user"),
        Feature(name="item"),
        Feature(name="history", table="item", pooling="sequence"),
    ]
    tables = [Table(name=n, dim=dim, optimizer=Adam(lr=0.05), init=Normal(std=0.3)) for n in ("user", "item")]
    embeddings = PlainEmbeddings(
        tables, features, initial=lambda table, seed, keys: 0.3 * torch.randn(len(keys), table.dim)
    )
    model = build(settings, ModelInputs(features, {f.name: dim for f in features}))
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    batch = Batch.plain({"user": user, "item": item, "history": torch.stack([user % 8, item], dim=1)}, labels=labels)
    for _ in range(60):
        loss = F.binary_cross_entropy_with_logits(model(embeddings(batch)), labels)
        dense.zero_grad()
        loss.backward()
        dense.step()
        embeddings.step()
    assert float(loss.detach()) < 0.1, "guessing costs 0.69"


def test_a_sequence_without_other_use_is_averaged_behind_the_pooled_features() -> None:
    features = [Feature(name="s", pooling="sequence"), Feature(name="a")]
    model = build(DCNv2Settings(), ModelInputs(features, {"s": 2, "a": 1}))
    values = torch.tensor([[1.0, 2.0], [3.0, 6.0], [5.0, 5.0]])
    sequence = JaggedRows(values, torch.tensor([0, 2, 2, 3]), torch.tensor([2, 0, 1, 0]))
    pooled = PooledGroup(("a",), (1,), torch.tensor([[7.0], [8.0]]), torch.tensor([0, 1, 1, 0]))
    got = model.joint(Embedded([pooled], {"s": sequence}), None).expanded()
    expected = [[7.0, 5.0, 5.0], [8.0, 2.0, 4.0], [8.0, 0.0, 0.0], [7.0, 2.0, 4.0]]
    torch.testing.assert_close(got, torch.tensor(expected))


def test_settings_find_their_model_by_name() -> None:
    settings = TypeAdapter(Model).validate_python({"name": "dcnv2", "rank": 4, "deep": [32]})
    assert settings == DCNv2Settings(rank=4, deep=(32,))
    assert [s.name for s in (DeepFMSettings(), WideDeepSettings()) if s.extra_row_values] == ["deepfm", "wide_deep"]
    for wrong in ({"name": "dcn"}, {"name": "dlrm", "deep": [3]}, {"name": "dlrm", "top": [0]}):
        with pytest.raises(ValidationError):
            TypeAdapter(Model).validate_python(wrong)


def test_the_seed_is_torchs() -> None:
    inputs = ModelInputs([Feature(name="a"), Feature(name="b")], {"a": 4, "b": 4}, dense=1)
    weights = []
    for _ in range(2):
        torch.manual_seed(5)
        weights.append(torch.nn.utils.parameters_to_vector(build(DLRMSettings(), inputs).parameters()))
    assert torch.equal(*weights)


@pytest.mark.parametrize("settings", [DLRMSettings(), DeepFMSettings()], ids=["dlrm", "deepfm"])
def test_dot_products_refuse_rows_of_several_dims(settings: ModelSettings) -> None:
    inputs = ModelInputs([Feature(name="a"), Feature(name="b")], {"a": 4, "b": 8})
    with pytest.raises(SettingsError, match="a has 4, b has 8"):
        build(settings, inputs)


def test_wrong_inputs_are_refused(case_of: CaseOf) -> None:
    with pytest.raises(SettingsError, match="at least one feature"):
        ModelInputs([], {})
    with pytest.raises(SettingsError, match="Feature a has no dim"):
        ModelInputs([Feature(name="a")], {"b": 3})
    case = case_of(DLRMSettings())
    model = build(DLRMSettings(), case.inputs)
    with pytest.raises(BatchError, match="takes 2 dense inputs, the batch has 0"):
        model(case.embeddings()(case.batch), None)


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_a_model_evaluated_in_inference_mode_can_be_trained_afterwards(
    settings: ModelSettings, case_of: CaseOf
) -> None:
    joint._columns.cache_clear()
    case = case_of(settings)
    model, embeddings = build(settings, case.inputs), case.embeddings()
    with torch.inference_mode():
        model.eval()(embeddings.eval()(case.batch), case.batch.dense)
    model.train()(embeddings.train()(case.batch), case.batch.dense).sum().backward()
