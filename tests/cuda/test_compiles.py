"""The kernels compile for a GPU, wherever the tests run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import rlstore.kernels.cuda as kernels_of_cuda

PROGRAM = Path(__file__).with_name("compile_program.py")


def launched() -> set[str]:
    """The kernels that launchers are made for."""
    source = "\n".join(path.read_text() for path in Path(kernels_of_cuda.__file__).parent.glob("*.py"))
    return set(re.findall(r"(?:Launcher|_launcher)\(([a-z]\w+), ", source)) - {"kernel", "key", "self"}


def test_every_kernel_compiles(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, PROGRAM],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(launched()) == 25
    assert set(done.stdout.split()) == launched()
