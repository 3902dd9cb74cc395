"""What tests share: how hypothesis runs, real data where it is, and where Triton's interpreter is on."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before triton is imported

settings.register_profile(
    "hotrow", deadline=None, max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("hotrow")

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the repository."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the real data of ../shared/data is not here")
    return SHARED_DATA


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _interpreter(request: pytest.FixtureRequest) -> None:
    """Triton's interpreter is slow: only the kernels' own tests run in it, all others take the kernels' twins."""
    if "triton" in sys.modules and not torch.cuda.is_available():
        sys.modules["triton"].knobs.runtime.interpret = request.path.parent.name == "kernels"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command of `hotrow`: its exit code, standard output and standard error."""
    from hotrow.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hotrow", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that take minutes run where they are asked for."""
    if "HOTROW_SLOW" not in os.environ:
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: HOTROW_SLOW=1 runs it"))
