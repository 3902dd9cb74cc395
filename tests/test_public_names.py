"""What pages, examples and the tutorial import is public: `hotrow`, and three packages that have pages of their own."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import hotrow

ROOT = Path(__file__).parents[1]
PUBLIC = {"hotrow", "hotrow.kernels", "hotrow.tiers", "hotrow.torchrec"}
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
SOURCES = [*PAGES, *(ROOT / "examples").rglob("*.py")]
_BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def imported(source):
    """The modules of Hotrow that a page or program imports, and the names it takes of them."""
    text = source.read_text("utf-8")
    for code in _BLOCK.findall(text) if source.suffix == ".md" else [text]:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Import):
                yield from ((alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((node.module or "", alias.name) for alias in node.names)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_public_names_are_shown(source):
    for module, name in imported(source):
        if module.partition(".")[0] != "hotrow":
            continue
        assert module in PUBLIC, f"from {module} import {name}: {module} is not public"
        if name is not None and module != "hotrow.torchrec":  # which needs TorchRec
            assert name in importlib.import_module(module).__all__, f"from {module} import {name}: it is not public"


def test_every_public_name_is_there():
    for name in hotrow.__all__:
        assert getattr(hotrow, name).__name__ == name
    assert set(hotrow._HOME) | {"HotrowError"} == set(hotrow.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Tabel'"):
        _ = hotrow.Tabel


def test_every_class_of_tiers_is_given_by_the_package():
    tiers = importlib.import_module("hotrow.tiers")
    for path in Path(tiers.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Tier") and not node.name.startswith("_"):
                assert node.name in tiers.__all__
