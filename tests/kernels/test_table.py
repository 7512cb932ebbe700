"""The table of operations: every version implements the protocol, and every native version is compared with another."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

import pytest
import test_against_portable  # noqa: F401  (for its marks)
import test_gather_slots  # noqa: F401  (for its marks)
import test_replay_draws  # noqa: F401  (for its marks)
import test_replay_gather  # noqa: F401  (for its marks)
import test_replay_ring  # noqa: F401  (for its marks)
import test_row_writer  # noqa: F401  (for its marks)
from kernel_inputs import COVERED

from rlstore import kernels
from rlstore.kernels import _native, cuda, kernel, portable, protocol

# What is a launch of its own on CUDA, and on the CPU done by other operations.
ON_CUDA_ALONE = {"gather_batches", "permutation", "tabulate_trajectories", "fill_trajectories"}
NATIVE = set(portable.OPERATIONS) - ON_CUDA_ALONE
STUB = ast.parse(Path(kernels.__file__).with_name("_native.pyi").read_text())
DECLARED = {node.name: node for node in STUB.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def protocol_of(operation: str) -> type:
    return getattr(protocol, operation if operation[0].isupper() else operation.title().replace("_", ""))


def is_compared(method: str) -> bool:
    """Whether it is public or the constructor. In a protocol, Python 3.10 replaces the constructor by another."""
    return not method.startswith("_") or (method == "__init__" and sys.version_info >= (3, 11))


def methods_of(part: type) -> dict[str, list[str]]:
    """The parameters of every public method and of the constructor."""
    found = inspect.getmembers(part, inspect.isfunction)
    return {name: list(inspect.signature(method).parameters) for name, method in found if is_compared(name)}


def test_every_native_operation_has_a_comparison_and_every_comparison_an_operation():
    assert NATIVE == COVERED


def test_an_operation_is_native_on_the_cpu_and_portable_where_a_device_has_none():
    for operation in portable.OPERATIONS:
        native = portable.OPERATIONS[operation] if operation in ON_CUDA_ALONE else getattr(_native, operation)
        assert kernel(operation, "cpu") is native
        assert kernel(operation, "cuda") is {**portable.OPERATIONS, **cuda.OPERATIONS}[operation]
        assert kernel(operation, "no such device") is portable.OPERATIONS[operation]
    with pytest.raises(KeyError):
        kernel("no such operation", "cpu")


@pytest.mark.parametrize("version", [portable, cuda], ids=["portable", "cuda"])
def test_a_version_has_the_operations_methods_and_parameters_of_the_protocol(version):
    for name, part in version.OPERATIONS.items():
        if inspect.isfunction(part):
            expected = list(inspect.signature(protocol_of(name).__call__).parameters)[1:]
            assert list(inspect.signature(part).parameters) == expected, name
            continue
        mine = methods_of(part)
        for method, parameters in methods_of(protocol_of(name)).items():
            assert mine[method] == parameters, f"{name}.{method}"


def test_the_native_stub_has_the_operations_methods_and_parameters_of_the_protocol():
    # Words of shared memory, tables from a disk, and parts of what operations on CUDA do: no operations on tensors.
    others = {
        "Guard",
        "GuardBlock",
        "GuardRead",
        "Block",
        "SlotTable",
        "Limiter",
        "is_in_memory",
        "process_start",
        "add_to_word",
        "exchange_word",
    }
    others |= {"event_count", "await_event", "make_event", "BoundKernel", "RowLauncher", "restore_tables", "OutputPool"}
    others |= {"Cutter", "Fixed", "RowReader", "count_readable", "crc32", "crc32_by_tables", "gather_at_once"}
    others |= {"start_writeback", "join_flags", "is_lazy", "asked_is_lazy", "instruction_set", "kind_of"}
    assert set(DECLARED) == NATIVE | others
    for name in NATIVE:
        node = DECLARED[name]
        if isinstance(node, ast.FunctionDef):
            expected = list(inspect.signature(protocol_of(name).__call__).parameters)[1:]
            assert [argument.arg for argument in node.args.args] == expected, name
        else:
            mine = {
                method.name: [argument.arg for argument in method.args.args]
                for method in node.body
                if is_compared(method.name)
            }
            assert mine == methods_of(protocol_of(name)), name


def test_the_native_classes_have_the_methods_of_the_stub():
    for name, node in DECLARED.items():
        if isinstance(node, ast.ClassDef):
            methods = {method for method in vars(getattr(_native, name)) if not method.startswith("_")}
            assert methods == {method.name for method in node.body if not method.name.startswith("__")}
