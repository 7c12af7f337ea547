"""Fast paths that a backend does not provide, built on those that it does: lists of tensors, and reduce_scatter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import ProcessGroup

from comm_collectives.buffers import Buffers
from comm_collectives.compression.selection import threshold
from comm_collectives.hierarchy.choice import limit_of
from comm_collectives.memory import concatenate
from comm_collectives.reduction import fold, ordered_dtypes
from comm_utils import kernels, operations
from comm_utils.backend import Backend
from comm_utils.errors import BrokenGroupError, NotInitializedError
from comm_utils.fast_path import FastPath
from comm_utils.flight_recorder.reduce_op import reducing
from comm_utils.reduce_op import parse_reduce_op
from comm_utils.torch_support.fast_arguments import acceptance
from comm_utils.torch_support.flattening import flat_view, flattened, unflatten
from comm_utils.torch_support.passed_tensors import passing_joined, passing_packed
from comm_utils.torch_support.plain_tensors import by_device, present

__all__ = ["fast_path_of"]

# What is larger is copied by torch, in several threads, and into memory of just that size.
_PACKED_BYTES = 16 << 20


def fast_path_of(
    backend: Backend, operation: str, detail: object, group: ProcessGroup | None, async_op: bool
) -> FastPath | None:
    """Return the backend's fast path of ``operation``, or one made of others of its; None where there is none.

    Where calls are compressed by default, or hierarchical, it serves those that are too small for that.
    """
    found = _in_order(_flat_fast_path(backend, operation, detail, group, async_op), backend, operation, detail, group)
    limits = threshold(operation, group), limit_of(backend, operation, group)
    limit = min((one for one in limits if one is not None), default=None)
    if found is None or limit is None:
        return found
    fast = found

    def small(*tensors: Any) -> Any:
        # The checked path asks for the size of one of them; none may be larger.
        return max(map(_bytes, tensors)) < limit and fast(*tensors)

    return small


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes if tensors.layout is torch.strided else 0  # no fast path takes others
    if isinstance(tensors, kernels.PlainBatch):
        return sum([some.nbytes for some in tensors.sizes.values()])
    return sum(map(_bytes, tensors)) if isinstance(tensors, (list, tuple)) else 0


def _in_order(
    found: FastPath | None, backend: Backend, operation: str, detail: object, group: ProcessGroup | None
) -> FastPath | None:
    """Keep from a fast path what the library would add in an order of its own."""
    op, _ = operations.get(operation).op_and_root(detail)
    if found is None or op is None:
        return found
    ordered, fast = ordered_dtypes(backend, parse_reduce_op(op), group), found
    if not ordered:
        return found

    def exact(*tensors: Any) -> Any:
        return ordered.isdisjoint(_dtypes(tensors)) and fast(*tensors)

    return exact


def _dtypes(tensors: Any) -> Iterator[torch.dtype]:
    for one in tensors:
        if isinstance(one, torch.Tensor):
            yield one.dtype
        elif isinstance(one, kernels.PlainBatch):
            yield from one.sizes
        elif isinstance(one, (list, tuple)):
            yield from _dtypes(one)


def _flat_fast_path(
    backend: Backend, operation: str, detail: object, group: ProcessGroup | None, async_op: bool
) -> FastPath | None:
    make = _DERIVED.get(operation)
    found = None if make is _all_reduce_coalesced else backend.fast_path(operation, detail, group, async_op)
    if found is not None or async_op or make is None:
        return found
    made = {device: make(backend, detail, group, device) for device in present(backend.device_types(group))}
    return by_device({device: path for device, path in made.items() if path is not None})


def _reduce_scatter_tensor(
    backend: Backend, op: object, group: ProcessGroup | None, device: str
) -> Callable[[Any, Any], bool] | None:
    """Exchange the parts, and reduce them here, where the library would move more than that."""
    capabilities, reduce_op = backend.capabilities(group, device), parse_reduce_op(op)
    with reducing(reduce_op):
        exchange = backend.fast_path("all_to_all_single", None, group)
    if exchange is None or "reduce_scatter_tensor" in capabilities.operations:
        return None
    # What the checked path would encode travels as something else.
    dtypes = [dtype for dtype in capabilities.dtypes if (reduce_op, dtype) in capabilities.reductions]
    W, rank = backend.get_world_size(group), backend.get_rank(group)
    accepts = acceptance("reduce_scatter_tensor", device, dtypes, W, rank)
    assert accepts is not None

    def fast(output: Any, input: Any) -> bool:
        if not accepts(output, input):
            return False
        parts = input.new_empty(W, output.numel())
        if not exchange(parts.view(-1), flat_view(input), None, None):
            return False
        fold(parts, reduce_op, flat_view(output))
        return True

    return fast


def _reduce_scatter(
    backend: Backend, op: object, group: ProcessGroup | None, device: str
) -> Callable[[Any, Any], bool] | None:
    scatter = fast_path_of(backend, "reduce_scatter_tensor", op, group, False)
    capabilities = backend.capabilities(group, device)
    W, rank = backend.get_world_size(group), backend.get_rank(group)
    accepts = acceptance("reduce_scatter", device, capabilities.dtypes, W, rank)
    if scatter is None or accepts is None:
        return None

    def fast(output: Any, inputs: Any) -> bool:
        return accepts(output, inputs) and scatter(flat_view(output), flattened(inputs, output))

    return fast


def _all_reduce_coalesced(
    backend: Backend, op: object, group: ProcessGroup | None, device: str
) -> Callable[[Any], bool] | None:
    """Reduce a list of tensors, or a batch of plain ones; where it is small, of several dtypes.

    What the backend's own fast path of such lists refuses may be more than that takes at once.
    """
    own = backend.fast_path("all_reduce_coalesced", op, group) if device == "cpu" else None
    reduce, reduce_op = backend.fast_path("all_reduce", op, group), parse_reduce_op(op)
    dtypes = {dtype for one, dtype in backend.capabilities(group, device).reductions if one is reduce_op}
    accepts, on_cpu = acceptance("all_reduce_coalesced", device, dtypes, 0, 0), device == "cpu"
    if reduce is None or accepts is None:
        return None

    def can_use_group() -> bool:
        try:
            backend.check_group(group)
        except (BrokenGroupError, NotInitializedError):
            return False  # the checked path says why; what the watch has found is raised only once, and passes
        return True

    def fast(tensors: Any) -> bool:
        if own is not None and own(tensors):
            return True
        batch = tensors if isinstance(tensors, kernels.PlainBatch) else None
        if batch is None and on_cpu and isinstance(tensors, (list, tuple)) and len(tensors) > 1:
            batch = kernels.plain_batch(list(tensors))
        if batch is not None and on_cpu and _bytes(batch) <= _PACKED_BYTES:
            return batch.is_usual and dtypes.issuperset(batch.sizes) and can_use_group() and packed(batch)
        if batch is tensors or not accepts(tensors):
            return False
        if len(tensors) == 1:
            return bool(reduce(tensors[0]))
        if not can_use_group():
            return False
        joined = concatenate([flat_view(tensor) for tensor in tensors])
        with passing_joined(tensors):  # of which a fast path knows nothing
            backend.all_reduce(joined, reduce_op, group)
        unflatten(joined, tensors)
        return True

    def packed(batch: kernels.PlainBatch) -> bool:
        with Buffers(torch.device("cpu")) as buffers:
            buckets = [buffers.take(some.nbytes).view(dtype) for dtype, some in batch.sizes.items()]
            if not batch.pack(buckets):
                return False
            for bucket, some in zip(buckets, batch.sizes.values(), strict=True):
                with passing_packed(some.packed):
                    backend.all_reduce(bucket, reduce_op, group)
            if not batch.unpack(buckets):  # a tensor has other memory by now
                for bucket in buckets:
                    unflatten(bucket, batch.tensors(bucket.dtype))
        return True

    return fast


_DERIVED: dict[str, Callable[[Backend, object, ProcessGroup | None, str], FastPath | None]] = {
    "all_reduce_coalesced": _all_reduce_coalesced,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
}
