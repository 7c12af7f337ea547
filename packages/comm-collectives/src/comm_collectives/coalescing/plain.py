"""All-reduces of plain tensors, whose local work native code does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.distributed import ProcessGroup

from comm_collectives.buffers import Buffers
from comm_collectives.coalesced import all_reduce_coalesced
from comm_collectives.coalescing.checking import are_right
from comm_collectives.coalescing.collecting import Run
from comm_collectives.coalescing.finishing import after, as_one_dimension, copier
from comm_collectives.coalescing.joining import joining
from comm_collectives.collectives import all_reduce, checked_all_reduce
from comm_collectives.compression.selection import threshold
from comm_collectives.derived_fast_path import fast_path_of
from comm_utils import kernels
from comm_utils.active import slot
from comm_utils.backend import Work
from comm_utils.errors import ArgumentError
from comm_utils.fast_path import FastPath, FastPathKey

__all__ = ["plain_all_reduces"]


class _Batch(NamedTuple):
    key: FastPathKey
    plain: kernels.PlainBatch


def plain_all_reduces(runs: Sequence[Run], async_op: bool) -> list[Work] | None:
    """Launch all calls, with copies in native code; None, with nothing done, where it cannot."""
    if any(key[0] != all_reduce.__name__ for key, _ in runs):
        return None
    every: list[torch.Tensor] = runs[0][1] if len(runs) == 1 else [tensor for _, some in runs for tensor in some]
    whole = kernels.plain_batch(every) if len(every) > 1 else None
    if whole is None:
        return None
    if len(runs) == 1 and not async_op:  # what was checked once, its fast path checks
        known: FastPath | None = slot.fast_paths.memo(__name__).get(runs[0][0])
        if known is not None and known(whole):
            return []
    tensors: dict[FastPathKey, list[torch.Tensor]] = {}
    for key, some in runs:
        tensors.setdefault(key, []).extend(some)
    if len(tensors) == 1:
        batches = [_Batch(runs[0][0], whole)]
    else:
        batches = [_Batch(key, _still_plain(kernels.plain_batch(some))) for key, some in tensors.items()]
    # What is plain can be wrong only by its kind; which call it is, the general path says.
    if not all(are_right(key, [plain.tensors(dtype)[0] for dtype in plain.sizes]) for key, plain in batches):
        return None
    works: list[Work] = []
    for batch in batches:
        if async_op or not _path_of_batches(batch.key)(batch.plain):
            works += _launch(batch, async_op)
    return works


def _path_of_batches(key: FastPathKey) -> FastPath:
    """Return the fast path of a :class:`comm_utils.kernels.PlainBatch` for calls of this kind."""
    known = slot.fast_paths.memo(__name__)
    found: FastPath | None = known.get(key)
    if found is None:
        name, op, group = key
        is_member = group is None or isinstance(group, ProcessGroup)
        if is_member and threshold(name, cast(Any, group)) is None:  # calls of that name are not compressed by default
            found = fast_path_of(slot.backend.during(name), all_reduce_coalesced.__name__, op, group, False)
        known[key] = found = found or _refuse
    return found


def _refuse(_: object) -> bool:
    """Stand for the fast path of a kind of call that has none."""
    return False


def _still_plain(plain: kernels.PlainBatch | None) -> kernels.PlainBatch:
    if plain is None:
        raise ArgumentError("coalescing: got tensors that another thread changed at the end of the with block")
    return plain


def _launch(batch: _Batch, async_op: bool) -> list[Work]:
    (_, op, group), sizes = batch.key, batch.plain.sizes
    buffers = {dtype: Buffers(torch.device("cpu")) for dtype, some in sizes.items() if some.number > 1}
    buckets = {dtype: some.take(sizes[dtype].nbytes).view(dtype) for dtype, some in buffers.items()}
    _still_plain(batch.plain if batch.plain.pack(list(buckets.values())) else None)
    works: list[Work] = []
    for dtype, of_dtype in sizes.items():
        bucket, tensors = buckets.get(dtype), batch.plain.tensors(dtype)
        if bucket is None:
            work = all_reduce(tensors[0], cast(Any, op), group, async_op)
        else:
            with joining(tensors, tensors, of_dtype.packed):  # of which a fast path knows nothing
                work = checked_all_reduce(all_reduce.__name__, bucket, op, cast(Any, group), async_op, None, None)
        if work is not None:
            works.append(work if bucket is None else after(work, _unpacker(batch, {dtype: bucket}, buffers)))
    if not async_op:
        _unpacker(batch, buckets, buffers)()
    return works


def _unpacker(
    batch: _Batch, buckets: dict[torch.dtype, torch.Tensor], buffers: dict[torch.dtype, Buffers]
) -> Callable[[], None]:
    def finish() -> None:
        unpacked = batch.plain.unpack(list(buckets.values()))
        for dtype, bucket in buckets.items():
            if unpacked:
                with buffers[dtype]:  # kept for the next block
                    pass
            else:  # a tensor has other memory by now
                parts = [as_one_dimension(one) for one in batch.plain.tensors(dtype)]
                copier(parts, bucket, buffers[dtype])()

    return finish
