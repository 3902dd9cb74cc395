"""`hotrow doctor`: what is there is found, what is not comes with the command that gets it."""

import json
import sys
from importlib import metadata

import pytest

from hotrow import doctor
from hotrow.doctor import diagnose


@pytest.fixture
def call(call, monkeypatch):
    """Runs `hotrow doctor`: its exit code and standard output."""
    monkeypatch.setenv("COLUMNS", "160")
    return lambda *arguments: call("doctor", *arguments)[:2]


def finding(data, name):
    return next(f for f in data["findings"] if f["name"] == name)


@pytest.fixture
def without(monkeypatch):
    """Makes packages look absent, or of another version."""

    def hide(**versions):
        real = metadata.version

        def version(name):
            if name not in versions:
                return real(name)
            if versions[name] is None:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(doctor.metadata, "version", version)

    return hide


def test_this_machine_can_train(call):
    code, out = call("--json")
    data = json.loads(out)
    assert code == 0 and data["healthy"] and data["can"]["train on CPU"]
    assert finding(data, "torch")["found"] == metadata.version("torch")
    assert all(f["state"] == "ok" or f["fix"] for f in data["findings"])


def test_the_table_is_for_people(call):
    code, out = call()
    assert code == 0
    for words in ("native core", "train on CPU", "network namespaces", "good for"):
        assert words in out


def test_a_missing_extra_comes_with_its_command_and_is_no_illness(without):
    without(plotly=None)
    data = diagnose()
    assert finding(data, "plotly")["fix"] == "pip install 'hotrow[report]'"
    assert data["healthy"] and not data["can"]["make reports"]


def test_a_library_that_is_too_old_is_one(without, call):
    without(torch="2.9.1")
    code, out = call()
    assert code == 1 and "2.9.1, but 2.11 is needed" in out and "pip install --upgrade 'torch>=2.11'" in out


def test_a_native_core_that_cannot_be_loaded_is_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "hotrow._native", None)
    data = diagnose()
    assert not data["healthy"] and not data["can"]["train on CPU"]
    assert "pip install" in finding(data, "native core")["fix"]


def test_programs_that_are_not_there_are_named(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda program: None)
    data = diagnose()
    assert finding(data, "network namespaces")["fix"] == "apt-get install iproute2"
    assert finding(data, "Chromium")["state"] == finding(data, "compiler")["state"] == "missing"
