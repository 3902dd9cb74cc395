"""Kernels run in Triton's interpreter where there is no accelerator; it must be on before triton is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> str:
    """Where kernels are tested: on the accelerator if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"
