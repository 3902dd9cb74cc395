"""What tests share: how hypothesis runs, real data where it is, and where Triton's interpreter is on."""

import os
import sys
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


_LONG = ("test_rank_dies.py", "test_planned_ranks.py", "test_ray_cluster.py", "test_survives.py")
"""Tests of many processes over minutes, which a busy machine cannot promise to end in time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("HOTROW_SLOW"):
        return
    for item in items:
        if item.path.name in _LONG:
            item.add_marker(pytest.mark.skip(reason="takes minutes: HOTROW_SLOW=1 runs it"))
