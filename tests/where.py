"""Where the tests of the contract and of the adapters run: on the CPU, or, with RLSTORE_TEST_DEVICE=cuda, on a GPU.

There storages are made on the device, and so are the tensors that the tests make themselves; those that the library
makes are left where it makes them.
"""

import os
import sys
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

ASKED_FOR = os.environ.get("RLSTORE_TEST_DEVICE")
DEVICE = ASKED_FOR or "cpu"
SEES_VALUES = DEVICE == "cpu"  # on CUDA nobody waits to see that a flag is NaN
MAKERS = {
    getattr(torch, name) for name in ("arange", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros", "empty")
}


class TensorsOfTests(TorchFunctionMode):
    """Tensors made by the files in a folder, and by them alone, lie on the device."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        from_here = sys._getframe(1).f_code.co_filename.startswith(self.folder)
        if func in MAKERS and from_here and kwargs.get("device") is None and kwargs.get("generator") is None:
            kwargs = {**kwargs, "device": DEVICE}
        return func(*args, **kwargs)
