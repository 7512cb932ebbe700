"""The programs of docs/cuda.md run as they stand; without a GPU those that need none run on the CPU."""

import re
from pathlib import Path

import pytest
import torch

TEXT = (Path(__file__).parents[2] / "docs" / "cuda.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
NAMES = ["a learner on the GPU", "graph", "compiled step"]


@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
def test_the_programs_about_cuda_run(program):
    if not torch.cuda.is_available():
        if "CUDAGraph" in program:
            pytest.skip("no CUDA device")
        program = program.replace('"cuda"', '"cpu"').replace("fullgraph=True", 'fullgraph=True, backend="eager"')
    exec(compile(program, "docs/cuda.md", "exec"), {"__name__": "documented"})
    torch._dynamo.reset()
