"""What tests share: how hypothesis runs, real data where it is, and batches of every shape."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

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
