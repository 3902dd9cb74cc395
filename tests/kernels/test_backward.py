"""Backward and optimizer: what the twins do, in float64, within rounding; the same bits each time."""

import pytest
import torch
from cases import Case, make

from hotrow.errors import BatchError, SettingsError
from hotrow.kernels import BatchShape, FeatureSpec, GroupSpec, Rule, Tables, TableSpec, group, ops, update
from hotrow.kernels.backend import kernel, tl, triton
from hotrow.kernels.backward import _parts
from hotrow.kernels.chunks import SPAN_SIZE
from hotrow.kernels.rounding import random_bits_twin, rounded_twin
from hotrow.kernels.tuning import Config

KINDS = ("sgd", "adagrad", "rowwise_adagrad", "adam")


def updated(case: Case, grads: torch.Tensor, seed: int = 0, config: Config | None = None) -> None:
    if case.handed is not None:
        case.handed.fill_(float("nan"))
    update(
        case.tables,
        case.shape,
        case.grouping,
        grads,
        members=case.members,
        staged=case.staged,
        handed=case.handed,
        seed=torch.tensor([seed], device=grads.device),
        config=config,
    )


def check(case: Case, device: str) -> None:
    grads = torch.randn(case.shape.size).to(device)
    values, state, handed = case.expected_update(grads)
    updated(case, grads)
    torch.testing.assert_close(case.tables.values.cpu(), values, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(case.tables.state.cpu(), state, rtol=2e-5, atol=2e-5)
    if case.handed is not None:
        touched = ~torch.isnan(case.handed.cpu())
        torch.testing.assert_close(case.handed.cpu()[touched], handed[touched], rtol=2e-5, atol=2e-5)
        assert (handed[~touched] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_each_optimizer_steps_as_its_twin(device: str, kind: str) -> None:
    case = make(device, [TableSpec(40, 12, Rule(kind))], [([(0, "sum"), (0, "sequence")], 16, None)])
    case.tables.set_step(3)
    check(case, device)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_clipped_decayed_and_rows_bounded(device: str, kind: str) -> None:
    rule = Rule(kind, weight_decay=0.1, clip_value=0.8, clip_norm=1.5, bound=0.9)
    check(make(device, [TableSpec(40, 12, rule)], [([(0, "mean")], 16, None)]), device)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("expanded", [None, 30])
def test_all_kinds_of_tables_and_features_update_in_one_launch(
    device: str, weighted: bool, expanded: int | None
) -> None:
    specs = [
        TableSpec(40, 20, Rule("adam")),
        TableSpec(5, 4, staged=9),
        TableSpec(9, 20, Rule("sgd"), staged=4),
        TableSpec(3, 100),
        TableSpec(8, 4),
    ]
    groups = [
        ([(0, "sum"), (1, "mean"), (2, "sequence")], 12, expanded),
        ([(1, "sequence"), (3, "sum"), (2, "mean"), (4, "sum")], 12, None),
    ]
    check(make(device, specs, groups, weighted=weighted), device)


@pytest.mark.parametrize("dims", [(6, 8), (24, 32), (64, 64), (100, 128)])
def test_unlike_tables_of_one_class_share_spans_of_more_rows_than_a_tile(device: str, dims: tuple[int, int]) -> None:
    specs = [TableSpec(90, dim, Rule("adagrad", lr=0.1 * (t + 1)), staged=20) for t, dim in enumerate(dims)]
    case = make(device, specs, [([(0, "sum"), (1, "sum")], 40, None)], longest=6)
    assert [c.segments for c in case.tables.classes] == [2]
    check(case, device)


@pytest.mark.parametrize("hot", [0.0, 0.5, 1.0])
def test_rows_of_any_number_of_lookups_are_summed(device: str, hot: float) -> None:
    """From one to hundreds: within a block of sorted lookups, over the border of two, over many."""
    specs = [TableSpec(60, 8, Rule("sgd", lr=1.0)), TableSpec(200, 4, Rule("sgd", lr=1.0))]
    case = make(device, specs, [([(0, "sum"), (1, "sum")], 120, None)], longest=9, hot=hot)
    check(case, device)


@pytest.mark.parametrize(("dims", "longest", "parts"), [((8,), 400, 130), ((6, 8), 60, 20), ((200, 12), 60, 20)])
def test_rows_of_many_parts_are_joined(
    device: str, dims: tuple[int, ...], longest: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than are searched for, or summed, at once; beside rows of a few parts, that the same program joins."""
    monkeypatch.setattr(ops, "JOIN_PROGRAMS", 2)
    specs = [TableSpec(2, dim, Rule("sgd", lr=0.01 * (t + 1)), staged=1) for t, dim in enumerate(dims)]
    case = make(device, specs, [([(t, "sum") for t in range(len(dims))], 64, None)], longest=longest, hot=0.7)
    counts = torch.unique(case.slots.cpu(), return_counts=True)[1]
    assert counts.max() > parts * SPAN_SIZE and counts.min() > 2 * SPAN_SIZE and len(counts) == 3 * len(dims)
    check(case, device)


@kernel("lookups")
def parts_kernel(out, rows, lookups):  # type: ignore[no-untyped-def]
    """How many parts the row of slot 5 has, which begins in the second block."""
    tl.store(out, _parts(rows, lookups, 1, 5))


@pytest.mark.parametrize("parts", [2, 64, 65, 66, 576, 577, 578, 1100])
def test_parts_of_a_row_are_counted_however_many_they_are(device: str, parts: int) -> None:
    if triton is None:
        pytest.skip("Triton is not installed")
    rows = torch.full((SPAN_SIZE * (parts + 3),), 9, dtype=torch.int32, device=device)
    rows[: SPAN_SIZE + 7] = 2
    rows[SPAN_SIZE + 7 : SPAN_SIZE * parts + 1] = 5
    out = torch.zeros(1, dtype=torch.int32, device=device)
    parts_kernel[(1,)](out, rows, len(rows))
    assert int(out) == parts


@pytest.mark.parametrize("dim", [1, 10, 64, 128, 1000])
def test_any_dim_is_updated(device: str, dim: int) -> None:
    check(make(device, [TableSpec(7, dim)], [([(0, "sum")], 6, None)]), device)


def test_low_gradients_of_low_results_are_taken(device: str) -> None:
    case = make(device, [TableSpec(40, 12)], [([(0, "sum")], 16, None)])
    grads = torch.randn(case.shape.size).to(torch.bfloat16).to(device)
    values, _, _ = case.expected_update(grads)
    updated(case, grads)
    torch.testing.assert_close(case.tables.values.cpu(), values, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_rows_round_up_or_down_by_the_twins_bits(device: str, dtype: torch.dtype) -> None:
    case = make(device, [TableSpec(40, 12)], [([(0, "sum")], 16, None)], dtype=dtype)
    before = case.tables.values.clone()
    grads = torch.randn(case.shape.size).to(device)
    values, _, _ = case.expected_update(grads, seed=7)
    updated(case, grads, seed=7)
    same = (case.tables.values.cpu() == values).float().mean()
    assert same > 0.995  # a last bit of the float32 sum may tip a rounding
    torch.testing.assert_close(case.tables.values.cpu(), values, rtol=1e-2, atol=1e-3)
    assert not torch.equal(before, case.tables.values)


def test_an_update_of_rounded_rows_without_a_seed_is_refused(device: str) -> None:
    case = make(device, [TableSpec(8, 4)], [([(0, "sum")], 4, None)], dtype=torch.bfloat16)
    with pytest.raises(BatchError, match="changes from step to step"):
        update(case.tables, case.shape, case.grouping, torch.zeros(case.shape.size, device=device))


@pytest.mark.parametrize(("dtype", "x"), [(torch.bfloat16, 1.003), (torch.float16, -1.0003), (torch.float16, 3.3e-7)])
def test_rounding_is_right_on_average(dtype: torch.dtype, x: float) -> None:
    bits = random_bits_twin(3, torch.arange(20000), 8)
    values = rounded_twin(torch.full((20000, 8), x), bits, dtype)
    assert len(values.unique()) == 2
    assert values.double().mean().item() == pytest.approx(x, rel=1e-3)


def test_rounding_keeps_what_is_not_finite_and_what_is_exact() -> None:
    given = torch.tensor([[float("inf"), float("-inf"), float("nan"), 1.5, 0.0, 1e6, -1e6]])
    bits = random_bits_twin(0, torch.arange(1), 7)
    bf16, fp16 = rounded_twin(given, bits, torch.bfloat16), rounded_twin(given, bits, torch.float16)
    assert bf16[0, 0] == float("inf") and bf16[0, 1] == float("-inf") and bf16[0, 2].isnan()
    assert fp16[0, 3] == 1.5 and fp16[0, 4] == 0 and fp16[0, 5] == 65504 and fp16[0, 6] == -65504


def test_two_runs_give_the_same_bits_whatever_the_tiles(device: str) -> None:
    results = []
    for config in (
        None,
        None,
        Config(128, 1, share=1),
        Config(1024, 4, share=64),
        Config(512, 1, share=9, registers=96),
    ):
        specs = [TableSpec(30, 16), TableSpec(50, 24, Rule("adam"))]
        case = make(device, specs, [([(0, "sum"), (1, "mean")], 40, None)], longest=9)
        updated(
            case, torch.randn(case.shape.size, generator=torch.Generator().manual_seed(1)).to(device), config=config
        )
        results.append((case.tables.values.cpu(), case.tables.state.cpu()))
    for values, state in results[1:]:
        assert torch.equal(values, results[0][0]) and torch.equal(state, results[0][1])


@pytest.mark.parametrize("count", range(1, 14))
def test_the_sign_of_a_zero_is_the_same_whatever_is_unrolled(device: str, count: int) -> None:
    bits = []
    for unroll in (1, 4, 8):
        tables = Tables([TableSpec(1, 4, Rule("sgd", lr=1.0))], device)
        tables.values.fill_(-0.0)
        shape = BatchShape(tables, [GroupSpec([FeatureSpec(0, "sequence", count)], 1, count)])
        slots, offsets = torch.zeros(count, dtype=torch.int32), torch.tensor([0, count])
        grouping = group(tables, shape, slots.to(device), offsets.to(device))
        update(tables, shape, grouping, torch.full((shape.size,), -0.0, device=device), config=Config(512, unroll))
        bits.append(tables.values.cpu().view(torch.int32).tolist())
    assert bits[0] == bits[1] == bits[2]


def test_an_empty_batch_changes_nothing(device: str) -> None:
    case = make(device, [TableSpec(7, 8)], [([(0, "sum")], 5, None)], longest=0)
    before = case.tables.values.clone()
    updated(case, torch.randn(case.shape.size, device=device))
    assert torch.equal(before, case.tables.values)


def test_wrong_gradients_and_settings_are_refused(device: str) -> None:
    case = make(device, [TableSpec(7, 8, staged=3)], [([(0, "sum")], 5, None)])
    with pytest.raises(BatchError, match="values, the results"):
        update(case.tables, case.shape, case.grouping, torch.zeros(3, device=device))
    with pytest.raises(BatchError, match="come together"):
        update(case.tables, case.shape, case.grouping, torch.zeros(case.shape.size, device=device), staged=case.staged)
    with pytest.raises(SettingsError, match="know no optimizer"):
        Rule("lion")
    with pytest.raises(SettingsError, match="dims from 1 to"):
        Tables([TableSpec(1, 5000)])
    with pytest.raises(SettingsError, match="more than kernels can number"):
        Tables([TableSpec(0, 1, staged=2**31)])
