"""The docs: every command in them works in the order shown, every link leads somewhere, and settings.md is current.

A page is run in a folder of its own: files that it shows (```toml run.toml) are written, then ```sh and ```python
blocks run in their order. Sizes are made small. A block under <!-- not run: reason --> is left out.
"""

import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hotrow import reference
from hotrow.cli import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")])
ELSEWHERE = {
    "README.md": "test_readme.py",
    "docs/dedup.md": "bench/test_bench_dedup.py",
    "examples/ray_cluster/README.md": "cluster/test_ray_cluster.py",
}
"""Pages with tests of their own."""
EXAMPLES = "".join(path.read_text("utf-8") for path in (ROOT / "examples").rglob("*.py"))
SOURCES = "".join(path.read_text("utf-8") for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py"))
_ELSEWHERE = {"--strict"}
"""Options of other programs."""
_BLOCK = re.compile(r"(<!-- not run: [^>]+ -->\n)?^```(\w+)[ ]*([\w.]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SIZES = re.compile(r"(--(?:samples|lines|events)) \d+")
_STEPS = " --set train.steps=4"
_FEW = {"examples/session_log_recd/README.md": _STEPS, "examples/own_model/README.md": _STEPS}


def name(page):
    return str(page.relative_to(ROOT))


def blocks(page):
    """Language, file name and text of what a page shows and a test can run.

    TOML that bears no name is the first file that the page's commands name and no other block is.
    """
    found = [
        (language, file, text)
        for not_run, language, file, text in _BLOCK.findall(page.read_text("utf-8"))
        if not not_run
    ]
    commands = "".join(text for language, _, text in found if language == "sh")
    given = {file for _, file, _ in found}
    wanted = iter([file for file in dict.fromkeys(re.findall(r"[\w-]+\.toml", commands)) if file not in given])
    return [
        (language, file or (next(wanted, "") if language == "toml" else ""), text) for language, file, text in found
    ]


def runnable(page):
    shown = blocks(page)
    commands = any(language == "sh" for language, _, _ in shown)
    return name(page) not in ELSEWHERE and (commands or any(language == "python" for language, _, _ in shown))


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=name)
def test_what_a_page_shows_works_in_the_order_shown(page, tmp_path, monkeypatch):
    if page.name == "torchrec.md":
        _needs_torchrec()
    run_page(page, tmp_path, monkeypatch)


def run_page(page, tmp_path, monkeypatch):
    """Does in a folder what a page shows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    for source in (ROOT / "examples").rglob("*"):
        if source.suffix in (".py", ".toml"):
            copy = tmp_path / source.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(source.read_text("utf-8"), "utf-8")
    names: dict[str, object] = {}
    shown = blocks(page)
    for _, file, text in shown:
        if file:
            (tmp_path / file).write_text(text, "utf-8")
    for language, _, text in shown:
        if language == "python":
            exec(compile(text, name(page), "exec"), names)
        elif language == "sh":
            for line in text.splitlines():
                _run(line, _FEW.get(name(page), ""))


def _needs_torchrec():
    with warnings.catch_warnings():  # importing TorchRec without an accelerator warns of kernels that are not there
        warnings.simplefilter("ignore")
        pytest.importorskip("torchrec", reason="torchrec is not installed", exc_type=ImportError)


def _run(line, few):
    """A command of a page, made small."""
    words = shlex.split(_SIZES.sub(r"\1 3000", line), comments=True)
    if not words:
        return
    if words[0] == "hotrow":
        more = few.split() if words[1] == "train" else []
        result = CliRunner().invoke(app, words[1:] + more)
        assert result.exit_code == 0, f"{line}: {result.output} {result.exception!r}"
    else:
        assert words[0] == "python", f"{line}: a page shows commands of hotrow and python only"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *words[1:]], capture_output=True, text=True, timeout=120, env=environment, check=False
        )
        assert done.returncode == 0, f"{line}: {done.stdout} {done.stderr}"


def test_pages_that_are_tested_elsewhere_are():
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / "tests" / test).read_text("utf-8")


def test_every_example_is_on_the_page_of_examples():
    listed = (ROOT / "examples" / "README.md").read_text("utf-8")
    for path in (ROOT / "examples").iterdir():
        if path.name != "README.md" and not path.name.startswith((".", "__")):
            assert f"[{path.name}]" in listed, path.name
            assert path.suffix == ".py" or (path / "README.md").is_file()


def test_an_example_of_an_own_loop_learns_and_reads_itself_back():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / "own_loop.py"), "--samples", "10000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "the same scores" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_options_and_variables_that_a_page_names_are_there(page):
    commands = typer.main.get_command(app).commands
    options = {
        option for command in commands.values() for p in command.params for option in (*p.opts, *p.secondary_opts)
    }
    others = {"--help", "--version", *re.findall(r'"(--[a-z-]+)"', EXAMPLES)}
    text = page.read_text("utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if not line.split("hotrow ")[0].lstrip().startswith("torchrun")]
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(lines))) <= options | others | _ELSEWHERE
    for shown in re.findall(r"^hotrow ([a-z]+)|`hotrow ([a-z]+)", text, re.MULTILINE):
        assert (shown[0] or shown[1]) in commands
    assert all(variable in SOURCES for variable in re.findall(r"\bHOTROW_[A-Z_]+", text))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        if re.match(r"[a-z]+:", target):
            assert target.startswith(("https://", "mailto:")), f"{name(page)}: {target}"
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{name(page)} leads to {target}, which is not there"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", place.read_text("utf-8"), re.MULTILINE)
            assert anchor in {reference.slug(heading) for heading in headings}, f"{name(page)}: no heading for {target}"


def test_the_page_of_settings_is_current():
    page = (ROOT / "docs" / "settings.md").read_text("utf-8")
    assert page == reference.page(), "settings have changed: python -m hotrow.reference > docs/settings.md"
