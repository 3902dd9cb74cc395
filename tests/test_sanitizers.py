"""Built with GCC's sanitizers, the native core goes through the tests of rows, caches, wire and journal.

Building takes a minute on two cores, in `build/`, once; optimising nothing makes that a third. A short part of the
tests runs always, with AddressSanitizer and UndefinedBehaviorSanitizer; all of them, and ThreadSanitizer, are slow.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOO_LONG = ["altered_at_rest", "many_", "any_number", "searching", "killed", "away_for", "bit_for_bit", "split_tables"]
SHORT = [
    *("tests/store/test_store.py", "tests/store/test_durable.py", "tests/store/test_journal.py"),
    *("tests/store/test_exchange.py", "tests/service/test_wire.py", "tests/tiers/test_cached.py"),
    *("-k", " and ".join(f"not {long}" for long in TOO_LONG)),
]
LONG = [
    *("tests/store", "tests/service", "tests/test_grouping.py", "tests/test_embeddings.py"),
    *("tests/tiers/test_cached.py", "tests/tiers/test_exact_cache.py", "tests/tiers/test_served.py"),
    *("-k", "not metrics_are_exact"),  # a million rows within a shard's twenty seconds
]
ADDRESS, THREAD = "address,undefined", "thread"


def runtime(name: str) -> str:
    """A library of GCC's that is to be loaded before all others."""
    ask = ["g++", f"-print-file-name={name}"]
    found = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"{name} is not here (it comes with GCC)")
    return found


def build(sanitize: str) -> Path:
    """The native core with these sanitizers."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    tools = [shutil.which(tool, path=path) for tool in ("cmake", "ninja", "g++")]
    if sys.platform != "linux" or None in tools or importlib.util.find_spec("nanobind") is None:
        pytest.skip("needs Linux, g++, cmake, ninja and nanobind to build the native core with sanitizers")
    folder = ROOT / "build" / f"sanitized-{sanitize.replace(',', '-')}"
    settings = {"HOTROW_SANITIZE": sanitize, "Python_EXECUTABLE": sys.executable, "CMAKE_CXX_COMPILER": "g++"}
    cmake = [str(tools[0]), "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools[1]}"]
    for command in ([*cmake, *(f"-D{k}={v}" for k, v in settings.items())], [str(tools[1]), "-C", str(folder)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return next(folder.glob("_native*.so"))


def run_sanitized(sanitize: str, tests: list[str]) -> None:
    native = build(sanitize)
    libraries = [runtime("libasan.so" if sanitize == ADDRESS else "libtsan.so"), runtime("libstdc++.so")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "HOTROW_SLOW"))} | {
        "LD_PRELOAD": " ".join(libraries),
        "HOTROW_NATIVE": str(native),
        "PYTHONPATH": f"{ROOT / 'tests' / 'sanitized'}:{ROOT / 'src'}",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps what it needs to its end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": f"exitcode=66 halt_on_error=1 suppressions={ROOT / 'tests' / 'sanitized' / 'threads.txt'}",
        "OMP_NUM_THREADS": "1",
    }
    loaded = "import hotrow._native as native; print(native.__file__)"
    first = subprocess.run([sys.executable, "-c", loaded], env=environment, capture_output=True, text=True, check=False)
    assert first.stdout.strip() == str(native), first.stderr[-4000:]
    command = [sys.executable, "-m", "pytest", "-x", "-s", "-p", "no:xdist", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-12_000:]


def test_no_access_out_of_bounds_and_nothing_undefined():
    run_sanitized(ADDRESS, SHORT)


@pytest.mark.slow
def test_no_access_out_of_bounds_and_nothing_undefined_in_all_tests_of_the_core():
    run_sanitized(ADDRESS, LONG)


@pytest.mark.slow
def test_threads_do_not_race():
    run_sanitized(THREAD, LONG)
