"""What tuning finds is kept, and a cache that cannot be read or written costs nothing but time."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hotrow.kernels import BatchShape, FeatureSpec, GroupSpec, Tables, TableSpec, tuning
from hotrow.kernels.tuning import DEFAULTS, Config

WHERE = ("lookup", "cpu", (128,), torch.float32, "10|4")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOTROW_CACHE", str(tmp_path / "cache"))
    tuning.forget()
    yield
    tuning.forget()


def test_the_fastest_is_chosen_and_known_to_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []
    monkeypatch.setattr(tuning, "_milliseconds", lambda run, repeats: run())
    tried = [Config(512, 2, 1), Config(1024, 4, 2, across=True), Config(256, 1, 1)]
    speed = dict(zip(tried, (2.0, 1.0, 3.0), strict=True))
    assert tuning.chosen(*WHERE) == DEFAULTS["lookup"]
    best = tuning.choose(tuning.key_of(*WHERE), tried, lambda c: (seen.append(c), speed[c])[1])
    assert best == tried[1] and seen == tried
    tuning.forget()
    assert tuning.chosen(*WHERE) == best
    assert tuning.chosen("lookup", "cpu", (128,), torch.float32, "20|4") == DEFAULTS["lookup"]
    assert tuning.chosen("lookup", "cpu", (128,), torch.float32, "10|8") == DEFAULTS["lookup"]


@pytest.mark.parametrize(
    ("pooling", "lookups", "kind"), [("sum", 40, "6|2"), ("sum", 20, "5|1"), ("sequence", 40, "6|s")]
)
def test_batches_of_other_kinds_are_tuned_apart(pooling: str, lookups: int, kind: str) -> None:
    tables = Tables([TableSpec(9, 4)], "cpu")
    shape = BatchShape(tables, [GroupSpec([FeatureSpec(0, pooling, lookups)], 20, lookups)])
    assert shape.kind == kind
    own = tuning.chosen("lookup", "cpu", (4,), torch.float32, kind)
    assert own == (DEFAULTS["lookup"] if kind == "6|2" else tuning.ONE_ROW_EACH)
    assert tuning.chosen("lookup", "cpu", (4,), torch.float32, kind + "+") == own
    assert tuning.chosen("update", "cpu", (4,), torch.float32, kind) == DEFAULTS["update"]


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', '{"a": ["x"]}', '{"a": [1]}', '{"a": [1, 2, 3, 4]}'])
def test_a_cache_that_is_not_ours_is_passed_over(text: str) -> None:
    tuning.cache_file().parent.mkdir(parents=True)
    tuning.cache_file().write_text(text)
    assert tuning.chosen(*WHERE) == DEFAULTS["lookup"]


def test_wide_rows_always_have_one_warp_and_all_registers() -> None:
    """Their sums of squares have one order only with one, whatever was tuned; and few registers do not hold them."""
    for kernel in ("lookup", "update"):
        assert {(c.warps, c.registers) for c in tuning.candidates(kernel, [64, 512])} == {(1, 0)}
        chosen = tuning.chosen(kernel, "cpu", (512,), torch.float32, "3|1")
        assert (chosen.warps, chosen.registers) == (1, 0)
    assert {c.registers for c in tuning.candidates("update", [64, 128])} == {0, 80, 128}


def test_a_tile_fits_every_class() -> None:
    assert Config(1024, 4, 1).tiles([4, 128, 1024]) == (256, 8, 1)
    assert Config(16, 4, 2).tiles([4, 128, 1024]) == (64, 2, 1)
    assert Config(1024, 4, 2).tiles([4, 128, 1024], 128) == (64, 2, 1)
