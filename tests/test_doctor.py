"""``rlstore doctor``: what it reports of this machine, and what it says of machines on which something is wrong."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import warnings
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import rlstore
from rlstore import doctor
from rlstore.__main__ import main
from rlstore.doctor import Finding, examine, report
from rlstore.engine.memory import capacity
from rlstore.engine.memory.shared_memory import SharedMemory
from rlstore.errors import DoesNotFitError


def finding(name: str) -> Finding:
    (only,) = [found for found in examine() if found.name == name]
    return only


@pytest.fixture
def versions(monkeypatch):
    """Versions of packages in place of those that are installed; None for a package that is not."""
    other: dict[str, str | None] = {}
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: other[name] if name in other else real(name))
    return other


@pytest.fixture
def cuda(monkeypatch, tmp_path):
    """A torch for CUDA 13.0 and a machine with a driver; the GPU is there if ``is_available`` is set."""
    state = SimpleNamespace(is_available=True, warning="")

    def is_available():
        if state.warning:
            warnings.warn(state.warning, stacklevel=2)
        return state.is_available

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path)
    return state


def test_the_versions_are_those_that_run():
    found = {each.name: each.value for each in examine()}
    assert found["rlstore"] == rlstore.__version__
    assert found["Python"].startswith(sys.version.split()[0])
    assert torch.__version__.startswith(found["torch"])  # a build for CUDA may add which
    assert found["numpy"] == np.__version__
    assert found["native module"].startswith("C++ for ")


def test_the_exit_status_says_whether_something_is_broken(monkeypatch, capsys):
    good, slow, bad = Finding("a", "1"), Finding("b", "2", "b is slow"), Finding("c", "3", "c is gone", is_broken=True)
    for found, status, words in (
        ([good], 0, "Everything that rlstore needs is here."),
        ([good, slow], 0, "Slow or missing:\n- b is slow"),
        ([good, slow, bad], 1, "Broken:\n- c is gone\n\nSlow or missing:\n- b is slow"),
    ):
        monkeypatch.setattr(doctor, "examine", lambda found=found: found)
        assert main(["doctor"]) == status
        shown = capsys.readouterr().out
        assert shown.startswith("a                  1\n")
        assert shown.endswith(f"\n\n{words}\n")


def test_the_report_is_80_columns_wide_and_breaks_no_command(versions, cuda, monkeypatch):
    versions.update(torch="2.2.2", ray=None, triton=None)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    lines = report(examine())
    assert max(map(len, lines)) <= 80
    assert any("pip install 'torch>=2.3'" in line for line in lines)


def test_a_package_that_is_missing_or_too_old_is_named_with_the_command_that_installs_it(versions):
    versions["tensordict"] = None
    versions["gymnasium"] = "1.0.0"
    assert finding("tensordict") == Finding(
        "tensordict",
        "not installed",
        "tensordict is not installed: pip install 'tensordict>=0.9.1'",
        is_broken=True,
    )
    old = finding("gymnasium")
    assert old.is_broken
    assert old.advice == "gymnasium 1.0.0 is older than 1.1, which rlstore needs: pip install 'gymnasium>=1.1'"


@pytest.mark.parametrize(
    ("version", "is_broken"),
    [("2.2.2", True), ("2.3", False), ("2.10.0+cu130", False), ("2.13.0a0+git1", False), ("10.0", False)],
)
def test_versions_are_compared_as_numbers(version, is_broken, versions):
    versions["torch"] = version
    assert finding("torch").is_broken is is_broken


def test_optional_packages_may_be_missing(versions):
    versions["ray"] = None
    assert finding("ray") == Finding("ray", "not installed; optional: pip install 'rlstore[ray]'")
    versions["ray"] = "2.9.0"
    assert "ray 2.9.0 is older than 2.40" in finding("ray").advice
    assert not finding("ray").is_broken


def test_a_package_of_several_extras_is_listed_once(monkeypatch):
    needs = ['rich>=13; extra == "data"', 'pyarrow>=15; extra == "data"', 'rich>=13; extra == "examples"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: needs)
    assert [each.name for each in doctor._packages()] == ["rich", "pyarrow"]


def test_packages_for_development_are_not_examined():
    assert "ruff" not in {each.name for each in examine()}


def test_a_package_that_cannot_be_imported_is_reported_with_the_error(monkeypatch):
    real = doctor.importlib.import_module

    def broken(name):
        if name == "tensordict":
            raise OSError("libc10.so: cannot open shared object file")
        return real(name)

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    found = finding("tensordict")
    assert found.is_broken
    assert "(OSError: libc10.so: cannot open shared object file)" in found.advice


def test_the_report_comes_without_torch(tmp_path):
    """In a process of its own, in which an import of torch fails."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch today')")
    done = subprocess.run(
        [sys.executable, "-m", "rlstore", "doctor"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    assert "torch cannot be imported (ImportError: no torch today)" in done.stdout
    assert "native module      cannot be imported" in done.stdout
    assert "open files" in done.stdout


@pytest.mark.parametrize(
    ("chosen", "value", "advice"),
    [
        ("x86-64-v4", "C++ for AVX-512", ""),
        ("x86-64-v3", "C++ for AVX2", ""),
        ("baseline", "C++ for plain x86-64, the best that this CPU runs", ""),
        ("", "C++ for ", "compiled for plain x86-64 only, without AVX2 and AVX-512"),
    ],
)
def test_the_version_of_the_native_module_is_named(chosen, value, advice, monkeypatch):
    module = ModuleType("rlstore.kernels")
    module.instruction_set = lambda: chosen
    real = doctor._imported
    monkeypatch.setattr(doctor, "_imported", lambda name: (module, "") if name == "rlstore.kernels" else real(name))
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(doctor.platform, "system", lambda: "Linux")
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", None, raising=False)
    found = finding("native module")
    assert found.value.startswith(value)
    assert not found.is_broken
    assert bool(found.advice) == bool(advice)
    assert advice in found.advice


def test_a_torch_without_a_table_of_functions_is_slow(monkeypatch):
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__", raising=False)
    assert f"torch {torch.__version__} has no table" in finding("native module").advice
    assert not finding("native module").is_broken


# ------------------------------------------------------------------------------------------------------ accelerator


def test_without_a_driver_there_is_nothing_to_advise(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path / "none")
    assert finding("CUDA") == Finding("CUDA", "no NVIDIA driver; storages run on the CPU")


def test_gpus_are_named(cuda):
    assert finding("CUDA") == Finding("CUDA", "13.0: GPU 0, GPU 1")


def test_a_torch_for_the_cpu_on_a_machine_with_a_gpu(cuda, monkeypatch):
    cuda.is_available = False
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "torch is a build for the CPU" in finding("CUDA").advice


def test_a_driver_that_torch_cannot_use(cuda):
    cuda.is_available, cuda.warning = False, "The NVIDIA driver on your system is too old (found version 11040)."
    found = finding("CUDA")
    assert "torch, built for CUDA 13.0, cannot use it" in found.advice
    assert found.advice.endswith("Torch says: The NVIDIA driver on your system is too old (found version 11040).")
    assert not found.is_broken


def test_cuda_without_triton_is_slow(cuda, versions):
    versions["triton"] = None
    assert "plain torch" in finding("Triton").advice
    assert not finding("Triton").is_broken


def test_a_triton_that_refuses_the_kernels_is_slow(cuda, versions):
    versions["triton"] = "3.3.1"
    assert "Triton 3.3.1 is older than 3.4" in finding("Triton").advice
    assert not finding("Triton").is_broken


def test_triton_without_a_compiler_is_broken(cuda, versions, monkeypatch):
    versions["triton"] = "3.6.0"
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert finding("C compiler").value == "none; only Triton needs one"
    assert finding("Triton").is_broken
    monkeypatch.setenv("CC", "/opt/cc")
    assert finding("C compiler").value == "/opt/cc; only Triton needs one"
    assert finding("Triton") == Finding("Triton", "3.6.0")


# ----------------------------------------------------------------------------------------------- memory and limits


def test_shared_memory_that_cannot_be_had_is_broken(monkeypatch):
    assert finding("shared memory").value.startswith("works")

    def refused(nbytes):
        raise DoesNotFitError(f"{nbytes:,} bytes of shared memory are not available: no")

    monkeypatch.setattr(SharedMemory, "create", refused)
    found = finding("shared memory")
    assert found.is_broken
    assert "1,048,576 bytes of shared memory are not available: no" in found.advice
    monkeypatch.delattr(os, "memfd_create")
    assert finding("shared memory") == Finding(
        "shared memory", 'none: memory="shared" and DistributedStorage need Linux'
    )


def test_little_ram_is_reported_with_what_limits_it(monkeypatch):
    monkeypatch.setattr(capacity, "free_ram", lambda: (300_000_000, "the limit of the control group, 512 bytes"))
    found = finding("free RAM")
    assert found.value == "300.0 MB; limited by the limit of the control group, 512 bytes"
    assert found.advice.startswith("Only 300.0 MB of RAM are free (the limit of the control group, 512 bytes).")
    monkeypatch.setattr(capacity, "free_ram", lambda: (12_340_000_000, "the system's available memory"))
    assert finding("free RAM") == Finding("free RAM", "12.3 GB; limited by the system's available memory")
    monkeypatch.setattr(capacity, "free_ram", lambda: None)
    assert finding("free RAM") == Finding("free RAM", "unknown")


@pytest.mark.parametrize(("ray", "advised"), [("2.60.0", True), (None, False)])
def test_a_small_dev_shm_matters_to_ray_alone(ray, advised, versions, monkeypatch, tmp_path):
    versions["ray"] = ray
    monkeypatch.setattr(doctor, "_SHM", tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=16384, f_frsize=4096))
    found = finding("/dev/shm")
    assert found.value == "67.1 MB; only Ray uses it"
    assert ("--shm-size" in found.advice) is advised


def test_few_open_files_are_reported(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1024))
    assert finding("open files").value == "256 at most"
    assert finding("open files").advice.startswith("A process may only open 256 files.")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    assert finding("open files") == Finding("open files", "1,024 at most")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert finding("open files") == Finding("open files", "no limit")
    assert finding("locked memory") == Finding("locked memory", "no limit")
