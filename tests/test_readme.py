"""What the README shows, run as it stands there."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotrow.cli import app

README = (Path(__file__).parents[1] / "README.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_python_example_trains_a_step():
    names: dict[str, object] = {}
    exec(block("python"), names)
    assert names["embeddings"].steps == 1  # type: ignore[attr-defined]
    assert names["embeddings"].stats()["item"]["rows"] == 3  # type: ignore[attr-defined]


def test_the_commands_and_the_run_file_work_in_the_order_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(block("toml"))
    lines = [line.split("#")[0].strip() for line in block("sh").splitlines()]
    skipped = ("hotrow demo", "hotrow bench")  # these have tests of their own
    for line in lines:
        if line.startswith(skipped):
            continue
        words = ["4000" if word == "400000" else word for word in shlex.split(line)[1:]]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{line}: {result.output}"


@pytest.mark.parametrize("command", ["synth", "prepare", "train", "evaluate", "inspect", "bench", "demo"])
def test_every_command_has_help_with_an_example(command):
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Example" in result.output
    assert "--json" in result.output
