"""The transformer written out sample by sample, and in every way samples can share histories and targets."""

import math
from collections.abc import Sequence

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.nn import functional as F

from hotrow.data.batch import Batch
from hotrow.embedded import JaggedRows, expand
from hotrow.errors import SettingsError
from hotrow.models import Model, ModelInputs, TransformerSettings
from hotrow.models.transformer import Block, Encoder, _turned
from hotrow.plain import PlainEmbeddings
from hotrow.store.optimizers import Adam
from hotrow.table import Feature, Table

DIM = 8


def encoder(**settings: object) -> Encoder:
    torch.manual_seed(0)
    made = Encoder(DIM, TransformerSettings(**settings)).double()
    for parameter in made.parameters():  # biases and norms too, so that leaving one out is seen
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def turned(x: Tensor, position: int) -> Tensor:
    """One head's query or key: each two neighbours turned by an angle that grows with the position."""
    out = x.clone()
    for i in range(len(x) // 2):
        angle = position * 10_000.0 ** (-i / (len(x) // 2))
        c, s = math.cos(angle), math.sin(angle)
        out[2 * i], out[2 * i + 1] = c * x[2 * i] - s * x[2 * i + 1], s * x[2 * i] + c * x[2 * i + 1]
    return out


def written_out(block: Block, rows: list[Tensor]) -> list[Tensor]:
    """A block on one history and its target as the last token: each attends to the history so far."""
    d = block.width // block.heads
    queries, keys, values = torch.stack([block.queries_keys_values(block.norm(row)) for row in rows]).chunk(3, dim=1)
    out = []
    for i, row in enumerate(rows):
        seen = range(i + 1) if i < len(rows) - 1 else range(i)  # the target is no part of the history it asks
        heads = []
        for head in (slice(h * d, (h + 1) * d) for h in range(block.heads)):
            query = turned(queries[i, head], i)
            scores = torch.stack([query @ turned(keys[j, head], j) for j in seen]) / math.sqrt(d)
            heads.append(scores.softmax(0) @ torch.stack([values[j, head] for j in seen]))
        row = row + block.mix(torch.cat(heads))
        out.append(row + block.feedforward(row))
    return out


def by_loops(model: Encoder, histories: Sequence[Tensor], targets: Tensor) -> Tensor:
    out = []
    for history, target in zip(histories, targets, strict=True):
        rows = [model.first[0], *(model.project(row * DIM**0.5) for row in [*history[-model.length :], target])]
        for block in model.blocks:
            rows = written_out(block, rows)
        out.append(model.norm(rows[-1]))
    return torch.stack(out)


OFFSETS = torch.tensor([0, 2, 2, 5, 12])
WINDOWS = torch.tensor([3, 0, 4, 3])  # the first and the last begin alike: one is the other's prefix


@pytest.mark.parametrize(
    "settings", [{}, {"layers": 1}, {"width": 12, "heads": 3, "layers": 3}, {"length": 3}], ids=str
)
@pytest.mark.parametrize("begins", [None, WINDOWS], ids=["apart", "windows"])
@pytest.mark.parametrize(
    ("history_inverse", "target_inverse"),
    [
        (None, None),
        ([0, 0, 2, 1, 3, 3, 3], None),
        (None, [1, 0, 1, 1]),
        ([0, 0, 2, 1, 3, 3], [1, 1, 0, 1, 0, 0]),
        ([2, 2, 2], [0, 0, 0]),
        ([1], None),
    ],
)
def test_encoding_equals_loops_however_samples_share(settings, begins, history_inverse, target_inverse) -> None:
    model = encoder(**settings)
    values = torch.randn(12, DIM, dtype=torch.float64, requires_grad=True)
    size = len(history_inverse or target_inverse or OFFSETS[1:])
    targets = torch.randn(2 if target_inverse else size, DIM, dtype=torch.float64, requires_grad=True)
    history_B = torch.tensor(history_inverse) if history_inverse else None
    target_B = torch.tensor(target_inverse) if target_inverse else None
    history = JaggedRows(values, OFFSETS, history_B, begins)
    of_sample = range(size) if history_B is None else history_B.tolist()
    lengths, starts = history.lengths.tolist(), history.starts.tolist()
    results = []
    for got in (
        expand(*model(history, targets, target_B)),
        by_loops(model, [values[starts[s] :][: lengths[s]] for s in of_sample], expand(targets, target_B)),
    ):
        loss = (got * torch.cos(torch.arange(got.numel())).view_as(got)).sum()
        grads = torch.autograd.grad(loss, [values, targets, *model.parameters()], materialize_grads=True)
        results.append([got, *grads])
    torch.testing.assert_close(results[0], results[1])


def rows_through(model: Encoder, block: int) -> list[int]:
    """Counts the rows of histories, then of targets, that the feed-forward layer of a block sees."""
    seen: list[int] = []
    model.blocks[block].feedforward.register_forward_hook(lambda _, given, __: seen.append(len(given[0])))
    return seen


def test_a_history_is_encoded_once_for_all_its_samples() -> None:
    model = encoder()
    first, last = rows_through(model, 0), rows_through(model, 1)
    inverse = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])
    history = JaggedRows(torch.randn(5, DIM).double(), OFFSETS[:4], inverse)
    model(history, torch.randn(8, DIM).double(), None)
    assert first == [8, 5 + 2], "targets; five rows, and a first row for two: the empty history is a prefix of the next"
    assert last == [8], "nobody asks for the history's rows behind the last block"


def test_a_history_that_grows_is_encoded_once() -> None:
    model = encoder()
    seen = rows_through(model, 0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(7).cumsum(0)])
    history = JaggedRows(torch.randn(6, DIM).double(), offsets, None, torch.zeros(7, dtype=torch.int64))
    model(history, torch.randn(7, DIM).double(), None)
    assert seen == [7, 6 + 1]


def test_samples_that_share_history_and_target_are_computed_once() -> None:
    model = encoder()
    seen = rows_through(model, 0)
    history = JaggedRows(torch.randn(5, DIM).double(), OFFSETS[:4], torch.tensor([0, 0, 2, 2, 0]))
    model(history, torch.randn(2, DIM).double(), torch.tensor([0, 0, 1, 1, 1]))
    assert seen[0] == 3, "targets: one for each distinct pair"


def test_what_counts_is_how_far_back_a_row_lies() -> None:
    values, target = torch.randn(4, DIM).double(), torch.randn(1, DIM).double()

    def encoded(rows: list[int], **settings: int) -> Tensor:
        model = encoder(**settings)
        return model(JaggedRows(values[rows], torch.tensor([0, len(rows)]), None), target, None)[0][0]

    assert not torch.allclose(encoded([0, 1, 2]), encoded([1, 0, 2])), "the order is seen"
    torch.testing.assert_close(encoded([3, 0, 1], length=2), encoded([0, 1], length=2))


def test_the_last_click_can_be_told_from_the_others() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    histories = [torch.randperm(8, generator=generator)[: 2 + i % 4].tolist() for i in range(200)]
    item = torch.tensor([h[-1] if i % 2 else h[0] for i, h in enumerate(histories)])
    labels = torch.tensor([float(i % 2) for i in range(200)])
    features = [Feature(name="item", table="items"), Feature(name="seen", table="items", pooling="sequence")]
    embeddings = PlainEmbeddings(
        [Table(name="items", dim=DIM, optimizer=Adam(lr=0.02))],
        features,
        initial=lambda table, seed, keys: 0.3 * torch.randn(len(keys), table.dim),
    )
    model = TransformerSettings().build(ModelInputs(features, {"item": DIM, "seen": DIM}))
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    batch = Batch.plain({"item": item, "seen": histories}, labels=labels)
    for _ in range(60):
        loss = F.binary_cross_entropy_with_logits(model(embeddings(batch)), labels)
        dense.zero_grad()
        loss.backward()
        dense.step()
        embeddings.step()
    assert float(loss.detach()) < 0.1, "without the order there is nothing to tell them by: 0.69"


def test_settings_of_a_run_file_are_enough() -> None:
    given = {"name": "transformer", "layers": 1, "heads": 4, "targets": {"seen": "item"}, "deep": [16]}
    settings = TypeAdapter(Model).validate_python(given)
    assert settings == TransformerSettings(layers=1, heads=4, targets={"seen": "item"}, deep=(16,))


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    features = [Feature(name="item", table="items"), Feature(name="seen", table="items", pooling="sequence")]
    with pytest.raises(SettingsError, match="3 heads do not divide the width 8 of the encoder of seen"):
        TransformerSettings(heads=3).build(ModelInputs(features, {"item": 8, "seen": 8}))
    with pytest.raises(SettingsError, match="transformer found no history"):
        TransformerSettings().build(ModelInputs(features[:1], {"item": 8}))


def test_bfloat16_queries_are_turned_in_float32_and_stay_bfloat16() -> None:
    """On a GPU a linear layer gives bfloat16 under autocast, of which there are no complex numbers."""
    exact = torch.randn(3, 8)
    turn = torch.polar(torch.ones(3, 1, 2), torch.rand(3, 1, 2))
    turned = _turned(exact.bfloat16(), turn)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned.float(), _turned(exact.bfloat16().float(), turn), rtol=1e-2, atol=1e-2)
