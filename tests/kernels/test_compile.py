"""Every kernel compiles, and loads its rows in wide pieces."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotrow.kernels.backend import triton


@pytest.mark.skipif(triton is None, reason="Triton is not installed")
def test_every_kernel_compiles_for_an_accelerator_and_loads_rows_in_wide_pieces(tmp_path: Path) -> None:
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = {**without, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    script = Path(__file__).with_name("compile_all.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    wide = [line.split(" wide loads: ") for line in done.stdout.splitlines()]
    rows = {"lookup", "update", "join", "contract", "select", "select_backward", "gather", "scatter"}
    assert {kernel.removesuffix("_kernel") for kernel, _ in wide} > rows
    for kernel, count in wide:
        assert kernel.removesuffix("_kernel") not in rows or int(count) > 0, kernel
