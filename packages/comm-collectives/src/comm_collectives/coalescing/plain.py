"""All-reduces of plain tensors, whose local work native code does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from comm_collectives.buffers import Buffers
from comm_collectives.coalescing.finishing import After, as_one_dimension, copier
from comm_collectives.coalescing.notes import Run
from comm_collectives.collectives import all_reduce
from comm_utils import kernels
from comm_utils.backend import Work
from comm_utils.errors import ArgumentError
from comm_utils.fast_path import FastPathKey

__all__ = ["plain_all_reduces"]


def plain_all_reduces(runs: Sequence[Run], async_op: bool) -> list[Work] | None:
    """Make all calls in native code but the messages themselves; None, with nothing done, where it cannot."""
    if any(key[0] != all_reduce.__name__ for key, _ in runs):
        return None
    every: list[torch.Tensor] = runs[0][1] if len(runs) == 1 else [tensor for _, some in runs for tensor in some]
    whole = kernels.plain_batch(every) if len(every) > 1 else None
    if whole is None:
        return None
    batches: dict[FastPathKey, list[torch.Tensor]] = {}
    for key, some in runs:
        batches[key] = [*batches[key], *some] if key in batches else some
    works: list[Work] = []
    for key, some in batches.items():
        works += _plain_batch(key, some, whole if len(batches) == 1 else kernels.plain_batch(some), async_op)
    return works


def _plain_batch(
    key: FastPathKey, tensors: list[torch.Tensor], batch: kernels.PlainBatch | None, async_op: bool
) -> list[Work]:
    _, op, group = key
    layout = {} if batch is None else batch.layout
    buffers = {dtype: Buffers(torch.device("cpu")) for dtype, (count, _) in layout.items() if count > 1}
    buckets = {dtype: some.take(layout[dtype][1]).view(dtype) for dtype, some in buffers.items()}
    if batch is None or not batch.join(list(buckets.values())):
        raise ArgumentError("coalescing: got tensors that another thread changed at the end of the with block")
    works: list[Work] = []
    for dtype in layout:
        bucket = buckets.get(dtype)
        given = next(one for one in tensors if one.dtype is dtype) if bucket is None else bucket
        work = all_reduce(given, cast(Any, op), group, async_op)
        if work is not None:
            finish = _spreader(tensors, batch, {} if bucket is None else {dtype: bucket}, buffers, again=True)
            works.append(work if bucket is None else After(work, finish))
    if not async_op:
        _spreader(tensors, batch, buckets, buffers, again=False)()
    return works


def _spreader(
    tensors: list[torch.Tensor],
    batch: kernels.PlainBatch,
    buckets: dict[torch.dtype, torch.Tensor],
    buffers: dict[torch.dtype, Buffers],
    again: bool,
) -> Callable[[], None]:
    def finish() -> None:
        moved = batch.spread(list(buckets.values()), again)
        for dtype, bucket in buckets.items():
            if moved:
                with buffers[dtype]:  # kept for the next block
                    pass
            else:  # a tensor is another one by now
                parts = [as_one_dimension(one) for one in tensors if one.dtype is dtype]
                copier(parts, bucket, buffers[dtype])()

    return finish
