"""The compressed all_reduce of 1-bit Adam, whose error state belongs to the caller.

Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML 2021,
algorithm 1. Each of W ranks owns a slice of the tensor, which ``worker_error`` pads with zeros to m elements, of m/W:

1. A rank adds ``worker_error`` to its tensor. To each owner it sends the signs of that owner's slice, and one scale:
   the root of the mean square of all m elements. ``worker_error`` becomes what signs times scale lose.
2. An owner averages what it received, its own part too, and adds ``server_error``. To all ranks it sends the signs of
   the sum, and their scale: the root of the mean square of the slice. ``server_error`` becomes what that loses.

0 counts as positive. 1-bit LAMB (Li et al., HiPC 2022) and 0/1 Adam (Lu et al., ICLR 2023) have the same all_reduce.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed import ProcessGroup

from comm_collectives.annotations import Group, Timeout
from comm_collectives.arguments import check_numel, check_tensor, enter
from comm_collectives.buffers import Buffers
from comm_collectives.composed import ComposedCall, Method
from comm_collectives.compression.agreement import Agreement
from comm_collectives.compression.block_codecs import OneBit
from comm_collectives.compression.feedback import keep_error
from comm_collectives.compression.link import Link
from comm_collectives.compression.selection import DTYPES
from comm_collectives.memory import memory_view, overlapping
from comm_utils.backend import Backend
from comm_utils.errors import ArgumentError
from comm_utils.reduce_op import ReduceOp

__all__ = ["compressed_allreduce"]

_CALL = "compressed_allreduce"
_RECORDED_AS = "all_reduce"


class _Signs(OneBit):
    """The signs of the elements, in blocks that all have one scale, with which ``comm_utils.kernels`` decodes them."""

    def __init__(self) -> None:
        super().__init__(4096)

    def __repr__(self) -> str:
        return "onebit(one scale)+error_feedback"

    def encode_with_loss(self, values: torch.Tensor, scale: torch.Tensor, wire: torch.Tensor) -> None:
        """Overwrite ``wire`` with the signs of ``values``, (n,), and ``scale``; and ``values`` with what that loses."""
        encoded = wire[: self.encoded_bytes(values.numel())]
        self.encode(values, encoded)
        encoded[: 4 * -(-values.numel() // self.granularity)].view(torch.float32).copy_(scale)
        decoded = torch.empty_like(values)
        self.decode(encoded, decoded)
        keep_error(values.clone(), decoded, values)


def compressed_allreduce(
    tensor: torch.Tensor,
    worker_error: torch.Tensor,
    server_error: torch.Tensor,
    group: Group = None,
    *,
    timeout: Timeout = None,
) -> torch.Tensor:
    """Average ``tensor`` over the ranks of ``group``, in one bit an element with the errors of earlier calls.

    Args:
        tensor: float32, float16 or bfloat16, any shape, n elements, dense, the same strides on every rank; overwritten
            with the average, whose magnitudes are one number for each slice. Without elements, nothing is sent, and the
            errors become zeros.
        worker_error: float32, m elements, of which W is a divisor and which are n or more; the tensor counts as padded
            with zeros. Overwritten. Zeros before the first call.
        server_error: float32, m/W elements; overwritten. Zeros before the first call.

    Returns:
        ``tensor``.

    Raises:
        ArgumentError: an argument does not fit; before anything is sent.
        CollectiveMismatchError: ranks have tensors of different sizes or dtypes; on every rank, before anything else is
            sent, and with all arguments as they were.
    """
    backend = enter(_CALL, group, timeout)
    if backend is None:
        return tensor
    _check(backend, group, tensor, worker_error, server_error)
    elements, worker, server = memory_view(tensor), memory_view(worker_error), memory_view(server_error)
    if not tensor.numel():
        worker.zero_()
        server.zero_()
        return tensor
    codec = _Signs()
    row = Link(backend, group, codec).wire_bytes(server.numel())
    wire_bytes = 2 * (backend.get_world_size(group) - 1) * row

    def body(inner: Backend, used: ProcessGroup | None) -> None:
        _average(Link(inner, used, codec), codec, elements, worker, server)

    call = ComposedCall(_RECORDED_AS, backend, group, tensor, ReduceOp.AVG, False, tensor)
    call.run(body, Method(repr(codec), wire_bytes))
    return tensor


def _check(backend: Backend, group: ProcessGroup | None, tensor: Any, worker_error: Any, server_error: Any) -> None:
    given = {"tensor": tensor, "worker_error": worker_error, "server_error": server_error}
    for name, one in given.items():
        check_tensor(_CALL, name, one, backend, group, written=True)
        if one.device != tensor.device:
            raise ArgumentError(f"{_CALL}: {name}: got a tensor on {one.device}; expected {tensor.device}, as tensor")
    if tensor.dtype not in DTYPES:
        raise ArgumentError(f"{_CALL}: tensor: got {tensor.dtype}; expected float32, float16 or bfloat16")
    for name in ("worker_error", "server_error"):
        if given[name].dtype is not torch.float32:
            raise ArgumentError(f"{_CALL}: {name}: got {given[name].dtype}; expected float32")
    W, kept = backend.get_world_size(group), worker_error.numel()
    if kept < tensor.numel() or kept % W:
        raise ArgumentError(
            f"{_CALL}: worker_error: got {kept} elements; expected at least the {tensor.numel()} of tensor, and a "
            f"multiple of the world size of {W}: pad it with zeros"
        )
    check_numel(_CALL, "server_error", server_error, kept // W, f"those of worker_error divided by the {W} ranks")
    if overlapping(list(given.values())):
        raise ArgumentError(f"{_CALL}: got tensors that share memory; expected separate memory for each")


def _average(link: Link, codec: _Signs, elements: torch.Tensor, worker: torch.Tensor, server: torch.Tensor) -> None:
    what = f"{_CALL} of {elements.numel()} {elements.dtype} with errors of {worker.numel()}"
    Agreement(link.backend, link.group, what).check()
    length, row = server.numel(), link.wire_bytes(server.numel())
    rows = [row] * link.size
    with Buffers(elements.device) as buffers:
        sent, received = buffers.take(row * link.size), buffers.take(row * link.size)
        worker[: elements.numel()].add_(elements)
        scale = _root_mean_square(worker)
        for rank, values in enumerate(torch.split(worker, length)):
            codec.encode_with_loss(values, scale, sent[rank * row :])
        link.exchange(received, sent, rows, rows, True).wait()
        total = buffers.scratch(length).zero_()
        for rank in range(link.size):
            codec.decode(received[rank * row :][: codec.encoded_bytes(length)], total, add=True)
        server.add_(total.div_(link.size))
        codec.encode_with_loss(server, _root_mean_square(server), sent)
        link.gather(received, sent[:row]).wait()
        for rank, target in enumerate(torch.split(elements, length)):
            encoded = received[rank * row :][: codec.encoded_bytes(length)]
            whole = buffers.scratch(length)
            codec.decode(encoded, whole)
            target.copy_(whole[: target.numel()])


def _root_mean_square(values: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(values)
    return norm / math.sqrt(values.numel())
