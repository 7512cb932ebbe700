"""The kernels of replay compile for a GPU, wherever the tests run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import rlstore.kernels.cuda as kernels_of_cuda

PROGRAM = Path(__file__).with_name("compile_replay_program.py")
LAUNCHED = {
    *("write_step", "summarise", "draw_rows", "gather_rows"),
    *("sum_leaves", "draw_leaves", "finish_draw", "settle_rows", "update_leaves"),
    *("follow_rows", "count_windows", "draw_windows"),
}


def test_every_kernel_of_replay_compiles(tmp_path):
    launchers = Path(kernels_of_cuda.__file__).parent.glob("replay_*.py")
    told = "\n".join(path.read_text() for path in launchers if not path.stem.endswith("_kernels"))
    assert all(f"Launcher({name}, " in told for name in LAUNCHED)
    assert told.count("Launcher(") == len(LAUNCHED)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, PROGRAM],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert set(done.stdout.split()) == LAUNCHED
