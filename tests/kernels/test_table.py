"""The table of operations: what it lists, what the references have, and what is compared."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import test_against_reference  # noqa: F401  (for its marks)
import test_gather_slots  # noqa: F401  (for its marks)
import test_replay_draws  # noqa: F401  (for its marks)
import test_replay_gather  # noqa: F401  (for its marks)
import test_replay_ring  # noqa: F401  (for its marks)
import test_row_writer  # noqa: F401  (for its marks)
from kernel_inputs import COVERED

from rlstore import kernels
from rlstore.kernels import OPERATIONS, REFERENCES, kernel, reference_of

# What is a launch of its own on CUDA, and on the CPU done by other operations.
ON_CUDA_ALONE = {"fill_gae", "gather_batches", "permutation", "tabulate_trajectories", "fill_trajectories"}
NATIVE = set(OPERATIONS) - ON_CUDA_ALONE


def test_every_operation_has_a_comparison_and_every_comparison_an_operation():
    assert NATIVE == COVERED


def test_an_operation_is_native_on_the_cpu_and_the_reference_elsewhere():
    for operation in OPERATIONS:
        native = reference_of(operation) if operation in ON_CUDA_ALONE else getattr(kernels._native, operation)
        assert kernel(operation, "cpu") is native
        assert kernel(operation, "no such device") is reference_of(operation)
    with pytest.raises(KeyError):
        kernel("no such operation", "cpu")


def test_the_references_have_nothing_that_the_table_lacks():
    public = [
        name
        for module in REFERENCES
        for name, part in vars(module).items()
        if not name.startswith("_") and getattr(part, "__module__", None) == module.__name__
    ]
    assert sorted(public) == sorted(OPERATIONS)


def parameters(node: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in node.args.args]


def test_the_native_stub_has_the_signatures_of_the_reference():
    stub = ast.parse(Path(kernels.__file__).with_name("_native.pyi").read_text())
    declared = {node.name: node for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    # Words of shared memory, and parts of what operations on CUDA do: no operations on tensors.
    others = {"SlotTable", "Limiter", "process_start", "add_to_word", "exchange_word"}
    others |= {"event_count", "await_event", "make_event", "BoundKernel", "RowChecker"}
    assert set(declared) == NATIVE | others
    for name, node in declared.items():
        if name in others:
            continue
        if isinstance(node, ast.FunctionDef):
            assert parameters(node) == list(inspect.signature(reference_of(name)).parameters), name
            continue
        for method in node.body:
            expected = list(inspect.signature(getattr(reference_of(name), method.name)).parameters)
            assert parameters(method) == expected, f"{name}.{method.name}"


def test_the_native_classes_have_the_methods_of_the_stub():
    stub = ast.parse(Path(kernels.__file__).with_name("_native.pyi").read_text())
    for node in stub.body:
        if isinstance(node, ast.ClassDef):
            methods = {name for name in vars(getattr(kernels._native, node.name)) if not name.startswith("_")}
            assert methods == {method.name for method in node.body} - {"__init__"}
