"""What is planned once for tensors of a kind."""

from __future__ import annotations

import pytest
import torch

from rlstore.kernels.plans import planned

ALIKE = {
    "another tensor": lambda: torch.ones(2, 3),
    "a part of a larger one": lambda: torch.zeros(4, 3)[1:3],
    "a parameter": lambda: torch.nn.Parameter(torch.zeros(2, 3)),
}
OTHERS = {
    "another shape": lambda: torch.zeros(3, 2),
    "another number of dimensions": lambda: torch.zeros(6),
    "another dtype of the same size": lambda: torch.zeros(2, 3, dtype=torch.int32),
    "a shorter dtype": lambda: torch.zeros(2, 3, dtype=torch.bfloat16),
}


def freed() -> torch.Tensor:
    tensor = torch.zeros(2, 3)
    tensor.untyped_storage().resize_(0)
    return tensor


OF_NO_KIND = {
    "not contiguous": lambda: torch.zeros(3, 2).t(),
    "without memory": freed,
    "on no device": lambda: torch.zeros(2, 3, device="meta"),
    "negated when it is read": lambda: torch.complex(torch.zeros(1), torch.ones(1)).conj().imag,
}


@pytest.fixture
def plan():
    """A plan is the number of times that plans were made."""
    made: list[tuple[torch.Tensor, ...]] = []

    @planned
    def number(tensors: tuple[torch.Tensor, ...], key: object = None) -> int:
        made.append(tensors)
        return len(made)

    return number


@pytest.mark.parametrize("name", ALIKE)
def test_tensors_of_a_kind_have_one_plan(plan, name):
    second = torch.zeros(5)
    assert plan((torch.zeros(2, 3), second), 1) == 1
    assert plan((ALIKE[name](), torch.zeros(5)), 1) == 1


@pytest.mark.parametrize("name", OTHERS)
def test_tensors_of_another_kind_have_another(plan, name):
    assert plan((torch.zeros(2, 3),), 1) == 1
    assert plan((OTHERS[name](),), 1) == 2
    assert plan((torch.zeros(2, 3),), 1) == 1


def test_the_order_the_number_and_the_other_arguments_matter(plan):
    one, other = torch.zeros(2), torch.zeros(3)
    given = [((one, other), 1), ((other, one), 1), ((one, other), 2), ((one,), 1), ((), 1)]
    assert [plan(*arguments) for arguments in given] == [1, 2, 3, 4, 5]
    assert [plan(*arguments) for arguments in given] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", OF_NO_KIND)
def test_what_a_kernel_cannot_read_as_it_is_has_no_plan_that_is_kept(plan, name):
    tensors = (torch.zeros(2, 3), OF_NO_KIND[name]())
    assert [plan(tensors, 1), plan(tensors, 1)] == [1, 2]


def test_there_are_not_more_and_more_plans(plan):
    for key in range(1000):
        plan((torch.zeros(2),), key)
    (known,) = [cell.cell_contents for cell in plan.__closure__ if isinstance(cell.cell_contents, dict)]
    assert 0 < len(known) <= 256
