"""DIN's attention, written out, and in every way samples can share histories and targets."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hotrow.data.batch import Batch
from hotrow.embedded import JaggedRows, expand
from hotrow.errors import SettingsError
from hotrow.models import DINSettings, ModelInputs
from hotrow.models.din import Attention, Dice
from hotrow.plain import PlainEmbeddings
from hotrow.store.optimizers import Adam
from hotrow.table import Feature, Table

OFFSETS = torch.tensor([0, 2, 2, 5])


def by_loops(attention: Attention, histories: list[Tensor], targets: Tensor) -> Tensor:
    """Sample by sample and row by row."""
    out = []
    for history, target in zip(histories, targets, strict=True):
        total = torch.zeros(history.shape[1])
        for row in history:
            hidden = attention.of_history(row) + attention.of_target(target) + attention.of_product(row * target)
            total = total + attention.weigh(attention.activation(hidden[None]))[0] * row
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("activation", ["dice", "prelu"])
@pytest.mark.parametrize(
    ("history_inverse", "target_inverse"),
    [
        (None, None),
        ([0, 0, 2, 1], None),
        (None, [1, 0, 1]),
        ([0, 0, 2, 1], [1, 1, 0, 1]),
        ([2, 2, 2], [0, 0, 0]),
    ],
)
def test_attention_equals_loops_however_samples_share(
    activation: str, history_inverse: list[int] | None, target_inverse: list[int] | None
) -> None:
    torch.manual_seed(0)
    attention = Attention(4, 6, activation).eval()
    values = torch.randn(5, 4)
    size = len(history_inverse or target_inverse or [0, 0, 0])
    targets = torch.randn(2 if target_inverse else size, 4)
    history_B = torch.tensor(history_inverse) if history_inverse else None
    target_B = torch.tensor(target_inverse) if target_inverse else None
    got = expand(*attention(JaggedRows(values, OFFSETS, history_B), targets, target_B))
    of_sample = [int(history_B[b]) if history_B is not None else b for b in range(size)]
    histories = [values[OFFSETS[s] : OFFSETS[s + 1]] for s in of_sample]
    expected = by_loops(attention, histories, targets if target_B is None else targets[target_B])
    torch.testing.assert_close(got, expected)


def test_one_group_for_history_and_target_is_computed_on_its_unique_samples() -> None:
    torch.manual_seed(0)
    attention = Attention(4, 6, "dice")
    values, targets = torch.randn(5, 4), torch.randn(3, 4)
    inverse = torch.tensor([2, 2, 2, 0, 1, 2])
    seen: list[int] = []
    attention.weigh.register_forward_hook(lambda _, given, __: seen.append(len(given[0])))
    got = expand(*attention(JaggedRows(values, OFFSETS, inverse), targets, inverse))
    assert seen == [5], "one hidden vector for each unique history row"

    attention.activation.mean.zero_()
    attention.activation.variance.fill_(1)
    lengths = (OFFSETS[1:] - OFFSETS[:-1])[inverse]
    expanded = torch.cat([values[OFFSETS[s] : OFFSETS[s + 1]] for s in inverse])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    torch.testing.assert_close(got, attention(JaggedRows(expanded, offsets, None), targets[inverse], None)[0])


def test_a_long_history_beside_a_short_one_does_not_change_it() -> None:
    torch.manual_seed(0)
    attention = Attention(4, 6, "prelu")
    values, targets = torch.randn(9, 4), torch.randn(2, 4)
    short, _ = attention(JaggedRows(values[:1], torch.tensor([0, 1]), None), targets[:1], None)
    beside, _ = attention(JaggedRows(values, torch.tensor([0, 1, 9]), None), targets, None)
    torch.testing.assert_close(beside[0], short[0])


def test_histories_that_are_all_empty_give_zeros_and_leave_the_statistics_alone() -> None:
    attention = Attention(4, 6, "dice")
    empty = JaggedRows(torch.zeros(0, 4), torch.tensor([0, 0, 0]), None)
    assert torch.equal(attention(empty, torch.randn(2, 4), None)[0], torch.zeros(2, 4))
    assert torch.equal(attention.activation.mean, torch.zeros(6))


def test_dice_normalizes_by_the_batch_and_later_by_what_it_remembers() -> None:
    dice = Dice(2, momentum=1.0)
    torch.nn.init.constant_(dice.alpha, 0.25)
    x = torch.randn(50, 2)
    p = torch.sigmoid(F.batch_norm(x, None, None, training=True, eps=1e-8))
    expected = p * x + (1 - p) * 0.25 * x
    torch.testing.assert_close(dice(x), expected)
    torch.testing.assert_close(dice.eval()(x), expected)


def test_a_history_tells_which_items_are_liked() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    history = torch.stack([torch.randperm(10, generator=generator)[:3] for _ in range(200)])
    item = torch.randint(0, 10, (200,), generator=generator)
    labels = (history == item[:, None]).any(dim=1).to(torch.float32)
    features = [Feature(name="item", table="items"), Feature(name="seen", table="items", pooling="sequence")]
    embeddings = PlainEmbeddings(
        [Table(name="items", dim=8, optimizer=Adam(lr=0.02))],
        features,
        initial=lambda table, seed, keys: 0.3 * torch.randn(len(keys), table.dim),
    )
    model = DINSettings().build(ModelInputs(features, {"item": 8, "seen": 8}))
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    batch = Batch.plain({"item": item, "seen": history}, labels=labels)
    for _ in range(100):
        loss = F.binary_cross_entropy_with_logits(model(embeddings(batch)), labels)
        dense.zero_grad()
        loss.backward()
        dense.step()
        embeddings.step()
    assert float(loss.detach()) < 0.1, "the mean label alone costs 0.61"


def features() -> list[Feature]:
    return [
        Feature(name="item", table="items"),
        Feature(name="other", table="others"),
        Feature(name="seen", table="items", pooling="sequence"),
        Feature(name="read", table="pages", pooling="sequence"),
    ]


def test_targets_are_found_by_table_or_taken_from_the_settings() -> None:
    dims = {"item": 4, "other": 4, "seen": 4, "read": 4}
    found = DINSettings().build(ModelInputs(features(), dims))
    assert found.targets == {"seen": "item"} and found.others == ("item", "other", "read")
    named = DINSettings(targets={"read": "other"}).build(ModelInputs(features(), dims))
    assert named.targets == {"read": "other"} and named.others == ("item", "other", "seen")


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"sen": "item"}, 'no sequence feature "sen". Did you mean "seen"'),
        ({"seen": "itm"}, 'no pooled feature "itm". Did you mean "item"'),
        ({"seen": "other"}, "need one dim, not 4 and 8"),
    ],
)
def test_targets_that_cannot_be_are_refused(targets: dict[str, str], message: str) -> None:
    inputs = ModelInputs(features(), {"item": 4, "other": 8, "seen": 4, "read": 4})
    with pytest.raises(SettingsError, match=message):
        DINSettings(targets=targets).build(inputs)


def test_a_model_without_a_history_is_refused() -> None:
    with pytest.raises(SettingsError, match="din found no history"):
        DINSettings().build(ModelInputs(features()[:2], {"item": 4, "other": 4}))
