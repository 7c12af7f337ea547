"""The native module, which only ``shared_memory`` and ``kernels`` call, and what it needs to know of torch."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch

from comm_utils.torch_support import factories
from comm_utils.torch_support.plain_tensors import TRANSFORMS, is_intercepted

__all__ = ["LOAD_ERROR", "NATIVE", "has_kernels", "plain_tensor", "reads_storage_natively"]

#: The module; None where there is none.
NATIVE: Any = None
#: Why there is none.
LOAD_ERROR = ""
try:
    NATIVE = importlib.import_module("comm_backend_ccl._shared_memory")
except ImportError as error:
    LOAD_ERROR = str(error)


def _bind_torch() -> bool:
    """Show native code a few tensors, by which it verifies that it reads their memory as Python does."""
    float32 = partial(factories.empty, dtype=torch.float32, device="cpu")  # whatever the defaults are
    resized = float32(8)
    resized.untyped_storage().resize_(4)
    with torch.inference_mode():
        made_there = float32(2)
    with torch.inference_mode(False):
        leaf = float32(3, requires_grad=True)
    tensors = [leaf, factories.empty(40, dtype=torch.uint8, device="cpu")[8:], resized, made_there]
    codes = {torch.float32: 6, torch.uint8: 0}  # of c10::ScalarType
    probes = [
        (
            *(one, one._cdata, one.untyped_storage().nbytes(), one.storage_offset()),
            *(codes[one.dtype], one.requires_grad, one.is_inference()),
        )
        for one in tensors
    ]
    key: int = TRANSFORMS.value
    return bool(NATIVE.bind_torch(torch.Tensor, torch.uint8, torch.int8, probes, is_intercepted, key))


#: Whether native code asks tensors through libtorch's C shim; it asks through Python otherwise.
reads_storage_natively = NATIVE is not None and _bind_torch()


def has_kernels() -> bool:
    """Return whether the functions that only compute can be called."""
    return NATIVE is not None


def plain_tensor(tensor: object) -> int | None:
    """Return the code of a tensor's dtype where native code may take it as it is; None of everything else.

    Plain is a ``torch.Tensor`` and no subclass, contiguous and on the CPU, of at least one element and of a dtype of
    :data:`comm_backend_ccl.tables.DTYPES`, whose storage holds all elements and whose values no flag changes.
    """
    return None if NATIVE is None else NATIVE.plain_tensor(tensor)
