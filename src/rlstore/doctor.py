"""What ``rlstore doctor`` reports: what is installed, what the machine offers, and what to do about what is not right.

Torch and the native module are imported while they are examined, so that the report also covers those that cannot be.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import resource
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType

_WIDTH = 80
_NAMES = 19  # columns of the names
_DRIVER = Path("/proc/driver/nvidia/version")
_SHM = Path("/dev/shm")
_FEW_FILES = 1024
_LITTLE_RAM = 1 << 30
_LITTLE_SHM = 1 << 31
_REQUIREMENT = re.compile(r"([\w.-]+)>=([\d.]+)(?:.*extra == ['\"]([\w-]+)['\"])?")
_SETS = {
    "x86-64-v4": "C++ for AVX-512",
    "x86-64-v3": "C++ for AVX2",
    "baseline": "C++ for plain x86-64, the best that this CPU runs",
    "": f"C++ for {platform.machine()}",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was examined.

    Attributes:
        name: What it is.
        value: What was found.
        advice: What is missing or slow, and what to do about it; empty if nothing is.
        is_broken: Whether rlstore does not work before the advice is followed.
    """

    name: str
    value: str
    advice: str = ""
    is_broken: bool = False


def examine() -> list[Finding]:
    """Everything that was found, in the order of the report."""
    found = [
        Finding("rlstore", metadata.version("rlstore")),
        Finding("Python", f"{platform.python_version()} on {platform.system()}, {platform.machine()}"),
        *_packages(),
    ]
    native = _native()
    found.append(native)
    torch = sys.modules.get("torch")
    has_cuda = False
    if torch is not None:
        cuda, has_cuda = _cuda(torch)
        found.append(cuda)
    found += [_triton(has_cuda), _compiler()]
    if not native.is_broken:
        found += [_shared_memory(), _free_ram()]
    return [*found, *_dev_shm(), *_limits()]


def report(found: list[Finding]) -> list[str]:
    """The lines of the report, at most 80 columns wide where words allow it."""
    lines = [line for finding in found for line in _wrapped(f"{finding.name:<{_NAMES}}", finding.value)]
    for title, is_broken in (("Broken", True), ("Slow or missing", False)):
        advised = [finding.advice for finding in found if finding.advice and finding.is_broken is is_broken]
        if advised:
            lines += ["", f"{title}:", *(line for advice in advised for line in _wrapped("- ", advice))]
    if not any(finding.advice for finding in found):
        lines += ["", "Everything that rlstore needs is here."]
    return lines


def _wrapped(lead: str, text: str) -> list[str]:
    # Paths and commands are not broken: they are there to be copied.
    return textwrap.wrap(
        text, _WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- packages


def _packages() -> Iterator[Finding]:
    """What rlstore requires, and what its extras for users do, each once."""
    seen: set[str] = set()
    for line in metadata.requires("rlstore") or ():
        if (match := _REQUIREMENT.match(line)) and match[3] != "dev" and match[1] not in seen:
            name, at_least, extra = match.groups()
            seen.add(name)
            yield _optional(name, at_least, extra) if extra else _required(name, at_least)


def _required(name: str, at_least: str) -> Finding:
    install = f"pip install '{name}>={at_least}'"
    if (version := _version(name)) is None:
        return Finding(name, "not installed", f"{name} is not installed: {install}", is_broken=True)
    if _numbers(version) < _numbers(at_least):
        advice = f"{name} {version} is older than {at_least}, which rlstore needs: {install}"
        return Finding(name, version, advice, is_broken=True)
    module, error = _imported(name)
    if module is None:
        advice = f"{name} cannot be imported ({error}). Install it again: pip install --force-reinstall {name}"
        return Finding(name, version, advice, is_broken=True)
    return Finding(name, version)


def _optional(name: str, at_least: str, extra: str) -> Finding:
    version, install = _version(name), f"pip install 'rlstore[{extra}]'"
    if version is None:
        return Finding(name, f"not installed; optional: {install}")
    if _numbers(version) < _numbers(at_least):
        return Finding(name, version, f"{name} {version} is older than {at_least}, which rlstore needs: {install}")
    return Finding(name, version)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version such as ``2.13.0+cpu``, without those behind the plus."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def _imported(name: str) -> tuple[ModuleType | None, str]:
    """The module, or None and why it cannot be imported: an ImportError, or what a broken package raises."""
    try:
        return importlib.import_module(name), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _native() -> Finding:
    module, error = _imported("rlstore.kernels")
    if module is None:
        advice = (
            f"The native module of rlstore cannot be imported ({error}). If torch can be, install rlstore again for "
            "this Python: pip install --force-reinstall --no-deps rlstore"
        )
        return Finding("native module", "cannot be imported", advice, is_broken=True)
    chosen: str = module.instruction_set()
    advice = ""
    torch = importlib.import_module("torch")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        advice = (
            f"torch {torch.__version__} has no table of functions (torch 2.10 and later have one) through which "
            "rlstore reads tensors: each tensor of a call takes about half a microsecond more."
        )
    elif not chosen and platform.machine() == "x86_64" and platform.system() == "Linux":
        advice = (
            "The native module was compiled for plain x86-64 only, without AVX2 and AVX-512. Install a wheel (pip "
            "install --only-binary rlstore rlstore), or compile it with GCC 12 or later: CXX=g++-12 pip install ."
        )
    return Finding("native module", _SETS[chosen], advice)


# ------------------------------------------------------------------------------------------------------ accelerator


def _cuda(torch: ModuleType) -> tuple[Finding, bool]:
    with warnings.catch_warnings(record=True) as caught:  # torch warns of a driver that is too old
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
            return Finding("CUDA", f"{torch.version.cuda}: {names}"), True
    if not _DRIVER.exists():
        return Finding("CUDA", "no NVIDIA driver; storages run on the CPU"), False
    if torch.version.cuda is None:
        why = "torch is a build for the CPU. Install one for CUDA: https://pytorch.org/get-started/locally"
    else:
        said = "".join(f" Torch says: {warning.message}" for warning in caught[:1])
        why = (
            f"torch, built for CUDA {torch.version.cuda}, cannot use it. The driver may be too old (nvidia-smi shows "
            f"what it supports), or CUDA_VISIBLE_DEVICES may hide the GPU.{said}"
        )
    return Finding("CUDA", "not available", f"There is an NVIDIA driver, but {why}"), False


def _triton(has_cuda: bool) -> Finding:
    version = _version("triton")
    if not has_cuda:
        return Finding("Triton", f"{version or 'not installed'}; only used with CUDA")
    if version is None:
        advice = 'Storages with device="cuda" run in plain torch, with many launches for each call: pip install triton'
        return Finding("Triton", "not installed", advice)
    kernels, _ = _imported("rlstore.kernels")
    if kernels is not None and _numbers(version) < kernels.OLDEST_TRITON:
        least = ".".join(map(str, kernels.OLDEST_TRITON))
        advice = (
            f'Triton {version} is older than {least}, which comes with torch 2.8: storages with device="cuda" run in '
            "plain torch, with many launches for each call. Upgrade torch."
        )
        return Finding("Triton", version, advice)
    if _found_compiler() is None:
        advice = (
            'Triton needs a C compiler when it is first used, so storages with device="cuda" do not work. Install gcc '
            "(for example: apt install gcc), or set the variable CC to a compiler."
        )
        return Finding("Triton", version, advice, is_broken=True)
    return Finding("Triton", version)


def _compiler() -> Finding:
    return Finding("C compiler", f"{_found_compiler() or 'none'}; only Triton needs one")


def _found_compiler() -> str | None:
    """The compiler that Triton would use."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


# ----------------------------------------------------------------------------------------------- memory and limits


def _shared_memory() -> Finding:
    from rlstore.engine.memory.shared_memory import SharedMemory

    name = "shared memory"
    if not hasattr(os, "memfd_create"):
        return Finding(name, 'none: memory="shared" and DistributedStorage need Linux')
    try:
        SharedMemory.create(1 << 20)
    except MemoryError as error:
        advice = f'memory="shared" and DistributedStorage do not work: {error}'
        return Finding(name, "not available", advice, is_broken=True)
    return Finding(name, "works; it counts as RAM, and the size of /dev/shm does not matter")


def _free_ram() -> Finding:
    from rlstore.engine.memory.capacity import free_ram

    ram = free_ram()
    if ram is None:
        return Finding("free RAM", "unknown")
    advice = f"Only {_size(ram[0])} of RAM are free ({ram[1]})." if ram[0] < _LITTLE_RAM else ""
    if advice:
        advice += ' Stop other programs, raise the limit, or keep replay on disk with memory="mapped".'
    return Finding("free RAM", f"{_size(ram[0])}; limited by {ram[1]}", advice)


def _dev_shm() -> Iterator[Finding]:
    """The size of ``/dev/shm``, where there is one: Ray needs it."""
    if _SHM.is_dir():
        status = os.statvfs(_SHM)
        size = status.f_blocks * status.f_frsize
        advice = ""
        if size < _LITTLE_SHM and _version("ray"):
            advice = (
                f"/dev/shm has {_size(size)}. Ray keeps its objects there, and on disk if it is too small, which is "
                "slow. In a container, start it with more: docker run --shm-size=8g"
            )
        yield Finding("/dev/shm", f"{_size(size)}; only Ray uses it", advice)


def _limits() -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = ""
    if files != resource.RLIM_INFINITY and files < _FEW_FILES:
        advice = (
            f"A process may only open {files:,} files. Shared storages, their writers and tensors that are sent to "
            "other processes need them: ulimit -n 4096"
        )
    yield Finding("open files", "no limit" if files == resource.RLIM_INFINITY else f"{files:,} at most", advice)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Finding("locked memory", "no limit" if locked == resource.RLIM_INFINITY else f"{_size(locked)} at most")


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 10**9 else f"{nbytes / 1e6:,.1f} MB"
