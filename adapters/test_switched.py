"""The pairs of programs in tests/switched, trained until they have learnt."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "switched"))
torch.set_num_threads(1)

LEARNT = {  # the mean over the last episodes (or steps) that each has to reach, and how many those are
    "cleanrl_ppo_before": (200, 50),
    "cleanrl_ppo_after": (200, 50),
    "cleanrl_ppo_whole": (200, 50),
    "cleanrl_dqn_before": (120, 20),
    "cleanrl_dqn_after": (120, 20),
    "fast_td3_before": (0.7, 50),
    "fast_td3_after": (0.7, 50),
    "torchrl_before": (100, 20),
    "torchrl_after": (100, 20),
}


@pytest.mark.parametrize("name", LEARNT)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # TorchRL's, of its next version
def test_the_program_learns(name):
    least, count = LEARNT[name]
    scores = import_module(name).main()
    assert sum(scores[-count:]) / count > least
