"""Building from source: where it cannot work, it says in a sentence what is missing."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_without_a_compiler_the_build_says_what_to_install(tmp_path):
    tools = {
        name: shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        for name in ("cmake", "ninja")
    }
    if None in tools.values():
        pytest.skip("cmake or ninja is not here to build with")
    (tmp_path / "bin").mkdir()
    for name, place in tools.items():
        (tmp_path / "bin" / name).symlink_to(place)
    environment = {k: v for k, v in os.environ.items() if k not in ("CC", "CXX")} | {"PATH": str(tmp_path / "bin")}
    command = [str(tools["cmake"]), "-S", str(ROOT), "-B", str(tmp_path / "build"), "-G", "Ninja"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert "needs a C++20 compiler, and none was found" in said and "apt-get install g++" in said


def test_the_licence_is_the_one_that_is_named():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0" and project["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


def test_the_version_is_the_same_everywhere():
    from hotrow import __version__

    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == __version__
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
