"""A plugin for pytest (``-p no_exchange``): torch as it was before it had a DLPack exchange table, version 2.10."""

import torch

if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    del torch.Tensor.__dlpack_c_exchange_api__
