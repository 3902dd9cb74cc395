"""What this machine has, what of Hotrow it can run, and the command that gets what is missing.

Nothing is installed or changed. Each finding says what it is good for, so that "missing" is no reproach: only what
training itself needs counts as broken.
"""

from __future__ import annotations

import importlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

from hotrow import __version__
from hotrow.sizes import size_text

State = Literal["ok", "missing", "broken"]

_LIBRARIES = {"torch": "2.11", "numpy": "2.0", "pyarrow": "17", "duckdb": "2.0", "pydantic": "2.7"}
_EXTRAS = {
    "plotly": ("report", "hotrow report, --picture"),
    "tensorboard": ("tensorboard", "TensorBoard events of runs"),
    "ray": ("ray", "prepare --engine ray, clusters"),
    "torchrec": ("torchrec", "hotrow.torchrec, the drop-in for TorchRec"),
    "pyzmq": ("", "shards: rows served to other processes and hosts"),
}


@dataclass(frozen=True)
class Finding:
    """One thing: whether it is there, what was found, what it is good for, and how to get it."""

    group: str
    name: str
    state: State
    found: str
    good_for: str
    fix: str = ""


def diagnose() -> dict[str, Any]:
    """All findings as plain data; `can` says what works here."""
    findings = [finding for look in _LOOKS for finding in look()]
    there = {f.name for f in findings if f.state == "ok"}
    return {
        "hotrow": __version__,
        "healthy": not any(f.state == "broken" for f in findings),
        "can": {
            "train on CPU": {"native core", "torch"} <= there,
            "train on GPU": {"native core", "torch", "CUDA", "Triton"} <= there,
            "make reports": "plotly" in there,
            "serve rows": "pyzmq" in there,
            "prepare on a cluster": "ray" in there,
            "measure on links of a set speed": "network namespaces" in there,
        },
        "findings": [asdict(f) for f in findings],
    }


def _machine() -> Iterator[Finding]:
    from hotrow.data.prepare.memory import cores, machine_memory

    python = platform.python_version()
    new = sys.version_info >= (3, 11)
    yield Finding(
        "machine", "Python", "ok" if new else "broken", f"{python}, {platform.system()} {platform.machine()}",
        "everything", "" if new else "Install Python 3.11 or newer.",
    )  # fmt: skip
    yield Finding("machine", "cores", "ok", f"{cores()} that this process may use", "reading, rows, models")
    memory = machine_memory()
    enough = memory >= 2 << 30
    yield Finding("machine", "memory", "ok" if enough else "missing", size_text(memory), "tables in host memory",
                  "" if enough else "Bound tables by eviction.capacity, or use a larger machine.")  # fmt: skip


def _core() -> Iterator[Finding]:
    yield _native()
    for name, least in _LIBRARIES.items():
        version = _version(name)
        if version is None:
            yield Finding("needed", name, "broken", "not installed", "everything", f"pip install '{name}>={least}'")
        elif _numbers(version) < _numbers(least):
            fix = f"pip install --upgrade '{name}>={least}'"
            yield Finding("needed", name, "broken", f"{version}, but {least} is needed", "everything", fix)
        else:
            yield Finding("needed", name, "ok", version, "everything")


def _native() -> Finding:
    try:
        core = importlib.import_module("hotrow._native")
    except ImportError as error:
        fix = "pip install --force-reinstall --no-deps hotrow; in a clone, with a C++20 compiler: pip install -e ."
        return Finding("needed", "native core", "broken", f"cannot be loaded: {error}", "everything", fix)
    return Finding("needed", "native core", "ok", f"loaded, {core.threads()} threads", "rows, lookups, counts")


def _accelerators() -> Iterator[Finding]:
    good_for = "training with device = cuda, hot rows on the device"
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # a torch that is installed but broken raises what it likes
        yield Finding("accelerator", "CUDA", "missing", f"torch cannot be imported: {error}", good_for)
        return
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        found = ", ".join(f"{d.name} with {size_text(d.total_memory)}" for d in devices)
        yield Finding("accelerator", "CUDA", "ok", found, good_for)
    elif torch.version.cuda is None:
        fix = "With an NVIDIA GPU: pip install --force-reinstall torch (its CUDA build)."
        yield Finding("accelerator", "CUDA", "missing", "this torch is built for CPUs only", good_for, fix)
    else:
        fix = "nvidia-smi says what the driver sees."
        yield Finding("accelerator", "CUDA", "missing", "torch finds no GPU", good_for, fix)
    version, good_for = _version("triton"), "kernels on the device; without it their PyTorch twins run"
    linux = sys.platform == "linux"
    fix = "pip install triton" if linux else "Triton is made for Linux only."
    yield Finding("accelerator", "Triton", "ok" if version else "missing", version or "not installed", good_for,
                  "" if version else fix)  # fmt: skip


def _extras() -> Iterator[Finding]:
    for name, (extra, good_for) in _EXTRAS.items():
        version = _version(name)
        fix = f"pip install 'hotrow[{extra}]'" if extra else f"pip install {name}"
        yield Finding("extra", name, "ok" if version else "missing", version or "not installed", good_for,
                      "" if version else fix)  # fmt: skip


def _tools() -> Iterator[Finding]:
    yield _program("compiler", ("c++", "g++", "clang++"), "building Hotrow from source", "g++")
    yield _namespaces()
    chromium = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    yield _program("Chromium", chromium, "testing pages while working on Hotrow", "chromium")


def _program(name: str, programs: tuple[str, ...], good_for: str, package: str) -> Finding:
    place = next((found for program in programs if (found := shutil.which(program))), None)
    fix = f"apt-get install {package}" if sys.platform == "linux" else f"brew install {package}"
    return Finding("tool", name, "ok" if place else "missing", place or "not found", good_for, "" if place else fix)


def _namespaces() -> Finding:
    """Whether hosts with links of a set speed can be made of this machine."""
    name, good_for = "network namespaces", "benchmarks of shards and ranks on links of a set speed"
    if sys.platform != "linux":
        return Finding("tool", name, "missing", "Linux has them", good_for, "Run these benchmarks on Linux.")
    lacking = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if lacking:
        found = f"{' and '.join(lacking)} not found"
        return Finding("tool", name, "missing", found, good_for, "apt-get install iproute2")
    if not _succeeds(["unshare", "--net", "true"]):
        alone = _succeeds(["unshare", "--map-root-user", "--net", "true"])
        found = "only below a user namespace" if alone else "not allowed to make one"
        return Finding("tool", name, "missing", found, good_for, "Run as root, or in a container with CAP_NET_ADMIN.")
    return Finding("tool", name, "ok", "ip, tc, and allowed to make them", good_for)


def _succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


_LOOKS: tuple[Callable[[], Iterator[Finding]], ...] = (_machine, _core, _accelerators, _extras, _tools)
