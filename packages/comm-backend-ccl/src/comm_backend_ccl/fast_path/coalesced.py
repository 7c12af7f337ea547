"""The fast path of many tensors in one call: native code packs them into shared memory, where they are reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from comm_backend_ccl import shared_memory
from comm_backend_ccl.kernels import NativeBatch
from comm_backend_ccl.shared_communicator import SharedCommunicator
from comm_backend_ccl.shared_tensors import tensor_at
from comm_backend_ccl.work import CclWork
from comm_utils.fast_path import FastPath
from comm_utils.reduce_op import ReduceOp
from comm_utils.torch_support.flattening import unflatten
from comm_utils.torch_support.passed_tensors import passed_sizes

__all__ = ["all_reduce_coalesced"]


def all_reduce_coalesced(
    ours: SharedCommunicator, op: ReduceOp, name: str, forget: Callable[[], None]
) -> FastPath | None:
    """Return the function of a list of tensors, or of a batch of plain ones; None where torch is too old for it.

    Args:
        name: the call, for messages.
        forget: called after a failure.
    """

    def wait(handle: shared_memory.Pending) -> bool:
        try:
            return CclWork(ours, handle, (), name).wait()
        except BaseException:
            forget()
            raise

    def describe(sizes: bytes) -> tuple[str, int]:
        what = passed_sizes(sizes)
        return what.text, what.digest

    ours.describe()
    native = shared_memory.coalesced_path(ours.native, op, wait, describe, _put, name)
    if native is None:
        return None

    def fast(tensors: Any) -> bool:
        return native(tensors.native if isinstance(tensors, NativeBatch) else tensors)

    return fast


def _put(tensor: torch.Tensor, address: int, size: int, dtype: torch.dtype) -> None:
    unflatten(tensor_at(address, size, None).view(dtype), [tensor])
