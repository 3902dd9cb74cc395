"""Kernels run on an accelerator if there is one, else in Triton's interpreter (see `tests/conftest.py`)."""

import pytest
import torch


@pytest.fixture
def device() -> str:
    """Where kernels are tested: on the accelerator if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"
