"""DecoupledRolloutStorage: returns and advantages, worked by hand and against a plain Python model."""

from __future__ import annotations

import math
import random

import pytest
import torch
from decoupled_ids import fill, make_step, make_storage, naive_advantages, normalised

NAN = float("nan")


def rollout(rewards, values, terminated, truncated, final_values=None, **options):
    """A storage that was given these lists [step][env]."""
    storage = make_storage(len(rewards), len(rewards[0]), **options)
    for t in range(len(rewards)):
        storage.add(
            **make_step(
                t,
                len(rewards[0]),
                rewards=rewards[t],
                values=values[t],
                terminateds=terminated[t],
                truncateds=truncated[t],
                final_values=None if final_values is None else final_values[t],
            )
        )
    return storage


# Rewards 1, 2; values 4, 8; last value 16; gamma = lambda = 1/2, so gamma * lambda = 1/4. In each case:
# flags of step 0, flags of step 1 ("t" terminated, "c" cut off), final values (None: not given), advantages A0, A1.
WORKED = {
    # A1 = 2 + 16/2 - 8 = 2; A0 = 1 + 8/2 - 4 + A1/4 = 1.5
    "nothing ends": ("", "", None, (1.5, 2)),
    # A0 = 1 - 4
    "terminated": ("t", "", None, (-3, 2)),
    "terminated, final value not read": ("t", "", (100, 100), (-3, 2)),
    # A0 = 1 + 10/2 - 4
    "cut off, final value known": ("c", "", (10, NAN), (2, 2)),
    "cut off, final value not given": ("c", "", None, (0, 2)),
    "cut off, final value nan": ("c", "", (NAN, NAN), (0, 2)),
    # termination wins: A0 = 1 - 4
    "both": ("tc", "", None, (-3, 2)),
    "both, final value not read": ("tc", "", (10, 10), (-3, 2)),
    "final value of a step that goes on is not read": ("", "", (10, 10), (1.5, 2)),
    # A1 = 2 - 8 = -6; A0 = 1 - 6/4
    "last step terminated": ("", "t", None, (-0.5, -6)),
    # A1 = 2 + 20/2 - 8 = 4; A0 = 1 + 4/4
    "last step cut off, final value known": ("", "c", (NAN, 20), (2, 4)),
    # A1 = 0; A0 = 1 + 0/4
    "last step cut off, final value not given": ("", "c", None, (1, 0)),
    "last step both": ("", "tc", (20, 20), (-0.5, -6)),
    # A1 = 2 + 20/2 - 8; A0 = 1 + 10/2 - 4
    "both steps cut off": ("c", "c", (10, 20), (2, 4)),
    "both steps terminated": ("t", "t", None, (-3, -6)),
}


@pytest.mark.parametrize("case", WORKED)
@pytest.mark.parametrize("column", [False, True], ids=["(N,)", "(N, 1)"])
def test_returns_and_advantages_worked_by_hand(case, column):
    first, second, final_values, (a0, a1) = WORKED[case]
    storage = rollout(
        [[1.0], [2.0]],
        [[4.0], [8.0]],
        [["t" in first], ["t" in second]],
        [["c" in first], ["c" in second]],
        None if final_values is None else [[[value]] if column else [value] for value in final_values],
        discount=0.5,
        gae_lambda=0.5,
    )
    storage.compute_returns_and_advantages(torch.tensor([[16.0]] if column else [16.0]))
    assert storage.returns.tolist() == [[a0 + 4], [a1 + 8]]
    half = abs(a1 - a0) / 2
    expected = half / (half * math.sqrt(2) + 1e-5)  # two numbers lie half * sqrt(2) apart in the unbiased sense
    sign = (a0 > a1) - (a0 < a1)
    torch.testing.assert_close(storage.advantages, torch.tensor([[sign * expected], [-sign * expected]]))


def test_the_standard_deviation_is_unbiased_and_epsilon_is_1e_5():
    # Every step terminates, so A = r - V: 0 and 2e-5. Mean 1e-5, unbiased std sqrt(2) * 1e-5.
    storage = rollout([[0.0], [2e-5]], [[0.0], [0.0]], [[True]] * 2, [[False]] * 2)
    storage.compute_returns_and_advantages(torch.zeros(1))
    expected = 1 / (math.sqrt(2) + 1)
    torch.testing.assert_close(storage.advantages, torch.tensor([[-expected], [expected]]))


def test_normalisation_is_over_all_steps_and_environments():
    # A = r: 1, 2, 3, 6. Mean 3, unbiased variance (4 + 1 + 0 + 9) / 3.
    storage = rollout([[1.0, 2.0], [3.0, 6.0]], [[0.0] * 2] * 2, [[True] * 2] * 2, [[False] * 2] * 2)
    storage.compute_returns_and_advantages(torch.zeros(2))
    std = math.sqrt(14 / 3) + 1e-5
    torch.testing.assert_close(storage.advantages, torch.tensor([[-2 / std, -1 / std], [0, 3 / std]]))
    assert storage.returns.tolist() == [[1, 2], [3, 6]]


def test_equal_advantages_become_zero():
    storage = rollout([[2.0, 2.0]] * 2, [[1.0, 1.0]] * 2, [[True] * 2] * 2, [[False] * 2] * 2)
    storage.compute_returns_and_advantages(torch.zeros(2))
    assert storage.advantages.tolist() == [[0, 0], [0, 0]]
    assert storage.returns.tolist() == [[2, 2], [2, 2]]


def test_a_single_row_has_a_finite_advantage():
    storage = rollout([[3.0]], [[1.0]], [[True]], [[False]])
    storage.compute_returns_and_advantages(torch.zeros(1))
    assert storage.returns.tolist() == [[3]]
    assert torch.isfinite(storage.advantages).all()


@pytest.mark.parametrize("seed", range(12))
def test_random_rollouts_agree_with_the_model(seed):
    numbers = random.Random(seed)
    steps, envs = numbers.choice([(1, 5), (7, 1), (5, 3), (16, 4), (33, 17)])
    gamma, lam = numbers.choice([(0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0.0, 0.5), (0.5, 1.0)])

    def table(draw):
        return [[draw() for _ in range(envs)] for _ in range(steps)]

    rewards, values = table(lambda: numbers.gauss(0, 1)), table(lambda: numbers.gauss(0, 3))
    terminated, truncated = table(lambda: numbers.random() < 0.2), table(lambda: numbers.random() < 0.2)
    final = table(lambda: numbers.gauss(0, 3) if numbers.random() < 0.6 else None)
    last = [numbers.gauss(0, 3) for _ in range(envs)]
    given = [[NAN if value is None else value for value in row] for row in final]
    storage = rollout(rewards, values, terminated, truncated, given, discount=gamma, gae_lambda=lam)
    storage.compute_returns_and_advantages(torch.tensor(last))

    expected = naive_advantages(rewards, values, last, terminated, truncated, final, gamma, lam)
    targets = torch.tensor(expected) + torch.tensor(values)
    torch.testing.assert_close(storage.returns, targets, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(storage.advantages, torch.tensor(normalised(expected)), rtol=1e-3, atol=1e-4)


def test_computing_again_gives_the_same_and_reads_what_the_blocks_hold_now():
    storage = make_storage(3, 2, discount=0.5, gae_lambda=0.5)
    fill(storage)
    storage.compute_returns_and_advantages(torch.zeros(2))
    first = (storage.returns.clone(), storage.advantages.clone())
    storage.compute_returns_and_advantages(torch.zeros(2))
    assert torch.equal(storage.returns, first[0])
    assert torch.equal(storage.advantages, first[1])
    storage.rewards += 4
    storage.compute_returns_and_advantages(torch.zeros(2))
    # Each reward enters with (1/4)^k: 4, 4 + 1, 4 + 1 + 1/4 more.
    assert (storage.returns - first[0]).tolist() == [[5.25, 5.25], [5, 5], [4, 4]]


def test_the_flags_before_the_first_step_play_no_part():
    storage = make_storage(2, 1, discount=0.5, gae_lambda=0.5)
    fill(storage, terminated=(0,))
    storage.update()
    assert storage.terminateds[0].tolist() == [1]
    for step, reward in enumerate((1.0, 2.0)):
        storage.add(**make_step(step, 1, rewards=[reward], values=[4.0 * 2**step]))
    storage.compute_returns_and_advantages([16.0])
    assert storage.returns.tolist() == [[5.5], [10]]


@pytest.mark.parametrize(
    "given",
    [torch.tensor([16.0]), torch.tensor([[16.0]]), torch.tensor([16]), [16.0], [[16]], torch.tensor([16.0]).numpy()],
)
def test_last_values_come_in_any_form(given):
    storage = rollout([[1.0], [2.0]], [[4.0], [8.0]], [[False]] * 2, [[False]] * 2, discount=0.5, gae_lambda=0.5)
    storage.compute_returns_and_advantages(given)
    assert storage.returns.tolist() == [[5.5], [10]]


def test_values_with_a_gradient_leave_none_behind():
    storage = make_storage(2, 2)
    for step in range(2):
        storage.add(**make_step(step, values=torch.ones(2, 1, requires_grad=True)))
    storage.compute_returns_and_advantages(torch.ones(2, 1, requires_grad=True))
    assert not storage.returns.requires_grad
    assert not storage.advantages.requires_grad


@pytest.mark.parametrize("name", ["gae_lamdba", "gae_lambda"])
def test_discount_and_lambda_are_taken_for_one_call(name):
    """Rewards 1, 2; values 4, 8; last value 16, and gamma 1/2: A1 = 2 + 8 - 8 = 2; A0 = 1 + 4 - 4 + lambda * A1 / 2."""
    storage = rollout([[1.0], [2.0]], [[4.0], [8.0]], [[0], [0]], [[0], [0]], discount=1.0, gae_lambda=1.0)
    last = torch.tensor([16.0])
    storage.compute_returns_and_advantages(last, gamma=0.5, **{name: 0.5})
    assert (storage.returns - storage.values).flatten().tolist() == [1.5, 2]
    storage.compute_returns_and_advantages(last, 0.5, 0.0)
    assert (storage.returns - storage.values).flatten().tolist() == [1, 2]
    storage.compute_returns_and_advantages(last, gamma=0.5)
    assert (storage.returns - storage.values).flatten().tolist() == [2, 2]
    assert (storage.discount, storage.gae_lambda) == (1.0, 1.0)
    storage.compute_returns_and_advantages(last, **{name: 0})  # gamma 1: A1 = 10, A0 = 5
    assert (storage.returns - storage.values).flatten().tolist() == [5, 10]
    before = storage.returns.clone()
    for wrong in ({"gamma": 1.5}, {name: -0.5}, {"gamma": "1"}, {"gae_lamdba": 0.5, "gae_lambda": 0.5}):
        with pytest.raises(ValueError, match=r"gamma|lam"):
            storage.compute_returns_and_advantages(last, **wrong)
    assert torch.equal(storage.returns, before)
