"""The table of operations: what it lists, what the reference has, and what is compared."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import test_against_reference  # noqa: F401  (for its marks)
import test_row_writer  # noqa: F401  (for its marks)
from kernel_inputs import COVERED

from rlstore import kernels
from rlstore.kernels import OPERATIONS, kernel, reference


def test_every_operation_has_a_comparison_and_every_comparison_an_operation():
    assert set(OPERATIONS) == COVERED


def test_an_operation_is_native_on_the_cpu_and_the_reference_elsewhere():
    for operation in OPERATIONS:
        assert kernel(operation, "cpu") is getattr(kernels._native, operation)
        assert kernel(operation, "no such device") is getattr(reference, operation)
    with pytest.raises(KeyError):
        kernel("no such operation", "cpu")


def test_the_reference_has_nothing_that_the_table_lacks():
    public = {
        name
        for name, part in vars(reference).items()
        if not name.startswith("_") and getattr(part, "__module__", None) == reference.__name__
    }
    assert public == set(OPERATIONS)


def test_the_native_stub_has_the_signatures_of_the_reference():
    stub = ast.parse(Path(kernels.__file__).with_name("_native.pyi").read_text())
    declared = {node.name: node for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert set(declared) == set(OPERATIONS)
    for name, node in declared.items():
        if isinstance(node, ast.FunctionDef):
            names = [argument.arg for argument in node.args.args]
            assert names == list(inspect.signature(getattr(reference, name)).parameters), name
