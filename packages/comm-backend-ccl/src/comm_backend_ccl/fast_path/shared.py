"""Fast paths in shared memory: functions of the engine that validate tensors themselves, or functions around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from comm_backend_ccl import shared_memory
from comm_backend_ccl.fast_path.kinds import NATIVE, ROOTED_NATIVE, VALIDATED, Kind
from comm_backend_ccl.shared_communicator import SharedCommunicator
from comm_backend_ccl.work import CclWork
from comm_utils.fast_path import FastPath
from comm_utils.torch_support.fast_arguments import Accept
from comm_utils.torch_support.flattening import flattened, staging_memory

__all__ = ["in_shared_memory", "started_natively"]


def started_natively(ours: SharedCommunicator, kind: Kind) -> FastPath | None:
    operation, name = kind.operation, kind.name
    if operation not in VALIDATED:
        return None  # there is something to do before or after
    ours.describe()
    native = NATIVE[operation]
    begin = shared_memory.starter(ours.native, native, kind.op, kind.root if native in ROOTED_NATIVE else -1, name)
    if begin is None:
        return None

    def start(*tensors: Any) -> CclWork | None:
        handle = begin(*tensors)
        if handle is False:
            return None
        return CclWork(ours, None if handle is True else handle, (), name, tensors[0] if tensors else None)

    return start


def in_shared_memory(
    ours: SharedCommunicator, kind: Kind, accepts: Accept, forget: Callable[[], None]
) -> FastPath | None:
    """Return the engine's own function of tensors, or one around it; None where torch is too old for it."""

    def wait(handle: shared_memory.Pending, *tensors: torch.Tensor) -> bool:
        try:
            return CclWork(ours, handle, tensors, kind.name).wait()
        except BaseException:
            forget()
            raise

    ours.describe()
    operation = kind.operation
    native = NATIVE[operation]
    root = kind.root if native in ROOTED_NATIVE else -1
    fast = shared_memory.fast_path(ours.native, native, kind.op, root, wait, kind.name)
    if fast is None:
        return None
    if operation in VALIDATED:
        return fast

    def of_tensors(*tensors: Any) -> bool:
        return accepts(*tensors) and fast(*tensors)

    def into_list(outputs: Any, input: Any) -> bool:
        memory, finish = staging_memory(outputs, input)
        if not fast(memory, input):
            return False
        finish()
        return True

    def exchange_lists(outputs: Any, inputs: Any) -> bool:
        if not accepts(outputs, inputs):
            return False
        source = flattened(inputs)
        memory, finish = staging_memory(outputs, source)
        sizes_out, sizes_in = [one.numel() for one in outputs], [one.numel() for one in inputs]
        if not fast(memory, source, sizes_out, sizes_in):
            return False
        finish()
        return True

    if ours.rank != kind.root:
        of_root: FastPath = lambda tensor, parts: accepts(tensor, parts) and fast(tensor)  # noqa: E731
    elif operation == "gather":
        of_root = lambda tensor, parts: accepts(tensor, parts) and into_list(parts, tensor)  # noqa: E731
    else:
        of_root = lambda tensor, parts: accepts(tensor, parts) and fast(tensor, flattened(parts, tensor))  # noqa: E731
    special: dict[str, FastPath] = {
        "all_gather": lambda outputs, input: accepts(outputs, input) and into_list(outputs, input),
        "all_to_all": exchange_lists,
        "gather": of_root,
        "reduce_scatter": lambda output, parts: accepts(output, parts) and fast(output, flattened(parts, output)),
        "scatter": of_root,
    }
    path: FastPath = special.get(operation, of_tensors)
    return path
