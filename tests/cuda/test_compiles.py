"""The kernels compile for a GPU, wherever the tests run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rlstore.kernels.cuda import gather_kernels, moments_kernels, rows_kernels, scans_kernels, segments_kernels

PROGRAM = Path(__file__).with_name("compile_program.py")
SHARED = {"add_pairs", "store_moments"}  # called by kernels of other files, and never launched


def kernels() -> set[str]:
    """Those that are launched; a name with an underscore is called by others."""
    modules = (gather_kernels, moments_kernels, rows_kernels, scans_kernels, segments_kernels)
    return {
        name
        for module in modules
        for name, part in vars(module).items()
        if not name.startswith("_") and name not in SHARED and hasattr(part, "fn")
    }


def test_every_kernel_of_rollouts_compiles(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, PROGRAM],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(kernels()) >= 12
    assert set(done.stdout.split()) == kernels()
