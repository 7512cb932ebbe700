"""The programs of docs/cuda.md run as they stand; without a GPU those that need none run on the CPU.

That of the guide about simulators takes the GPU if there is one; tests/test_docs.py runs it on the CPU.
"""

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)


PROGRAMS = blocks("cuda.md")
NAMES = ["a learner on the GPU", "graph", "compiled step"]


@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
def test_the_programs_about_cuda_run(program):
    if not torch.cuda.is_available():
        if "CUDAGraph" in program:
            pytest.skip("no CUDA device")
        program = program.replace('"cuda"', '"cpu"').replace("fullgraph=True", 'fullgraph=True, backend="eager"')
    exec(compile(program, "docs/cuda.md", "exec"), {"__name__": "documented"})
    torch._dynamo.reset()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_guide_about_simulators_runs_on_a_gpu():
    names = {"__name__": "documented"}
    exec(compile("\n".join(blocks("guides/gpu-simulators.md")), "docs/guides/gpu-simulators.md", "exec"), names)
    assert names["device"] == "cuda"
    assert all(batch.advantages.isfinite().all() for batch in names["batches"])
