"""all_gather, into a list or one tensor."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from comm_collectives.annotations import Compressing, Group, Timeout
from comm_collectives.arguments import (
    check_dtype,
    check_list,
    check_numel,
    check_tensor,
    describe,
    enter,
)
from comm_collectives.collective import collective
from comm_collectives.compression import calls as compressed
from comm_collectives.compression import selection
from comm_collectives.compression.compressed_call import CompressedCall
from comm_collectives.compression.settings import Compression
from comm_collectives.hierarchy.choice import with_hierarchy
from comm_collectives.memory import (
    StagingBuffer,
    as_bytes,
    contiguous_elements,
    copy_back,
    copy_if_overlapping,
    copy_if_overlapping_any,
)
from comm_collectives.work import deliver
from comm_utils.backend import Backend, Work
from comm_utils.errors import ArgumentTypeError
from comm_utils.torch_support import factories
from comm_utils.torch_support.passed_tensors import passing_as

__all__ = ["all_gather", "all_gather_into_tensor", "check_all_gather", "check_into_tensor"]


@overload
def all_gather(
    tensor_list: torch.Tensor,
    tensor: Group = None,
    group: Group = None,
    async_op: Literal[False] = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> list[torch.Tensor]: ...
@overload
def all_gather(
    tensor_list: torch.Tensor,
    tensor: Group = None,
    group: Group = None,
    async_op: Literal[True] = ...,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work: ...
@overload
def all_gather(
    tensor_list: torch.Tensor,
    tensor: Group = None,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> list[torch.Tensor] | Work: ...
@overload
def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: Group = None,
    async_op: Literal[False] = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> None: ...
@overload
def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: Group = None,
    async_op: Literal[True] = ...,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work: ...
@overload
def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work | None: ...
@collective(("tensor_list", "tensor"))
def all_gather(
    tensor_list: Any = None,
    tensor: Any = None,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Any:
    """Collect every rank's tensor on every rank.

    Two forms: ``all_gather(tensor, group=None, async_op=False)`` returns the list (with ``async_op`` the handle's
    ``result()`` is the list); ``all_gather(tensor_list, tensor, group, async_op)`` fills a given one.

    Args:
        tensor_list: W tensors of the dtype of ``tensor``; entry r has the size of rank r's tensor (sizes may differ
            between ranks); overwritten.
        tensor: any shape and dtype; only read. In the one-tensor form the same shape on every rank.
        compression: as for ``all_reduce``; every rank gets what all decode, of its own tensor too.
    """
    if isinstance(tensor_list, torch.Tensor) and not isinstance(tensor, torch.Tensor):
        if isinstance(group, bool):
            group, async_op = tensor, group  # all_gather(tensor, group, async_op)
        elif tensor is not None and group is None:
            group = tensor  # all_gather(tensor, group)
        if isinstance(group, (list, tuple)) and any(isinstance(entry, torch.Tensor) for entry in group):
            raise ArgumentTypeError(
                f"all_gather: tensor_list: got a tensor, and after it {describe(group)}; expected the list first: "
                "all_gather(tensor_list, tensor)"
            )
        return _all_gather_one(tensor_list, group, async_op, timeout, compression)
    if tensor_list is None and isinstance(tensor, torch.Tensor):
        return _all_gather_one(tensor, group, async_op, timeout, compression)
    backend = enter("all_gather", group, timeout)
    if backend is None:
        return None
    check_all_gather("all_gather", tensor_list, tensor, backend, group)
    W = backend.get_world_size(group)
    native = backend.capabilities(group, tensor.device.type).dtypes
    buffers = [StagingBuffer(output) for output in tensor_list]
    # This rank's own size may differ from the others'.
    size_bytes = max(output.nbytes for output in tensor_list)
    chosen = selection.choose("all_gather", compression, tensor, None, group, size_bytes)
    if chosen is not None:
        return _all_gather_compressed(backend, buffers, tensor, group, async_op, chosen, tensor_list)
    sent = as_bytes(copy_if_overlapping_any(contiguous_elements(tensor), buffers, backend.get_rank(group)), native)
    received = [as_bytes(buffer.memory, native) for buffer in buffers]
    with passing_as(tensor, sent):
        if len({part.numel() for part in received}) == 1:
            backend = with_hierarchy("all_gather", backend, group, W * tensor.nbytes, tensor.device)
            works = [backend.all_gather(received, sent, group, async_op)]
        else:
            works = _all_gather_uneven(backend, received, sent, group, async_op)
    return deliver(works, copy_back(buffers), tensor_list, async_op)


def check_all_gather(call: str, tensor_list: Any, tensor: Any, backend: Backend, group: Group) -> None:
    """Check the arguments of an ``all_gather`` that fills a list."""
    check_tensor(call, "tensor", tensor, backend, group)
    W, rank = backend.get_world_size(group), backend.get_rank(group)
    check_list(call, "tensor_list", tensor_list, W, backend, group, like=tensor, written=True)
    check_numel(call, f"tensor_list[{rank}]", tensor_list[rank], tensor.numel(), "this rank's tensor goes there")


def _all_gather_compressed(
    backend: Backend,
    buffers: list[StagingBuffer],
    tensor: torch.Tensor,
    group: Group,
    async_op: bool,
    chosen: Compression,
    result: Any,
) -> Work | None:
    targets, source = [buffer.memory for buffer in buffers], contiguous_elements(tensor)
    finish = copy_back(buffers) or (lambda: None)
    call = CompressedCall("all_gather", backend, group, tensor, None, async_op, result, chosen, finish)
    if len({part.numel() for part in targets}) == 1:
        return compressed.all_gather(call, targets, copy_if_overlapping_any(source, buffers, backend.get_rank(group)))
    return compressed.all_to_all(call, targets, [copy_if_overlapping_any(source, buffers, -1)] * len(targets))


def _all_gather_one(
    tensor: torch.Tensor, group: Group, async_op: bool, timeout: Timeout, compression: Compressing
) -> Any:
    backend = enter("all_gather", group, timeout)
    if backend is None:
        return None
    check_tensor("all_gather", "tensor", tensor, backend, group)
    native = backend.capabilities(group, tensor.device.type).dtypes
    gathered = factories.empty((backend.get_world_size(group), *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    parts = list(gathered.unbind(0))
    chosen = selection.choose("all_gather", compression, tensor, None, group)
    if chosen is not None:
        call = CompressedCall("all_gather", backend, group, tensor, None, async_op, parts, chosen)
        targets, source = [part.view(-1) for part in parts], contiguous_elements(tensor)
        finished = compressed.all_gather(call, targets, source)
        return finished if async_op else parts
    sent, received = as_bytes(contiguous_elements(tensor), native), as_bytes(gathered.view(-1), native)
    backend = with_hierarchy("all_gather_into_tensor", backend, group, gathered.nbytes, tensor.device)
    with passing_as(tensor, sent):
        work = backend.all_gather_into_tensor(received, sent, group, async_op)
    return deliver([work], None, parts, True) if async_op else parts


def _all_gather_uneven(
    backend: Backend, received: list[torch.Tensor], sent: torch.Tensor, group: Group, async_op: bool
) -> list[Work | None]:
    """One broadcast from every rank, all started before any is waited for."""
    received[backend.get_rank(group)].copy_(sent)
    started = [backend.broadcast(part, None, group, True, position) for position, part in enumerate(received)]
    if not async_op:
        for work in started:
            if work is not None:
                work.wait()
    return started


@overload
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = None,
    async_op: Literal[False] = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> None: ...
@overload
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = None,
    async_op: Literal[True] = ...,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work: ...
@overload
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work | None: ...
@collective(("output_tensor", "input_tensor"))
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work | None:
    """Collect every rank's tensor, one after the other in rank order, in one tensor on every rank.

    Some libraries, such as gloo, count a new version of ``output_tensor``, and others, such as ccl, do not: then a
    backward that saved it silently uses the new values.

    Args:
        output_tensor: W times the elements of ``input_tensor``, such as (W*n, ...) or (W, n, ...), same dtype; dense;
            overwritten.
        input_tensor: any shape and dtype, the same on every rank; only read.
        compression: as for :func:`all_gather`.
    """
    call = "all_gather_into_tensor"
    backend = enter(call, group, timeout)
    if backend is None:
        return None
    check_into_tensor(call, output_tensor, input_tensor, backend, group)
    W, n = backend.get_world_size(group), input_tensor.numel()
    native = backend.capabilities(group, input_tensor.device.type).dtypes
    buffer = StagingBuffer(output_tensor)
    source = copy_if_overlapping(contiguous_elements(input_tensor), buffer.memory, own_slot=n * backend.get_rank(group))
    chosen = selection.choose(call, compression, input_tensor, None, group)
    if chosen is not None:
        targets = [buffer.memory[rank * n : (rank + 1) * n] for rank in range(W)]
        compressing = CompressedCall(
            call, backend, group, input_tensor, None, async_op, output_tensor, chosen, buffer.copy_back
        )
        return compressed.all_gather(compressing, targets, source)
    backend = with_hierarchy(call, backend, group, buffer.memory.nbytes, input_tensor.device)
    sent, received = as_bytes(source, native), as_bytes(buffer.memory, native)
    with passing_as(input_tensor, sent):
        work = backend.all_gather_into_tensor(received, sent, group, async_op)
    return deliver([work], copy_back([buffer]), output_tensor, async_op)


def check_into_tensor(call: str, output_tensor: Any, input_tensor: Any, backend: Backend, group: Group) -> None:
    """Check the tensors of an ``all_gather_into_tensor``."""
    check_tensor(call, "input_tensor", input_tensor, backend, group)
    check_tensor(call, "output_tensor", output_tensor, backend, group, written=True)
    check_dtype(call, "output_tensor", output_tensor, input_tensor)
    W, n = backend.get_world_size(group), input_tensor.numel()
    check_numel(call, "output_tensor", output_tensor, W * n, f"{n} elements of input_tensor from each of {W} ranks")
