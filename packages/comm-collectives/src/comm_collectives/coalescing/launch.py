"""Launches the calls of a block together, at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from comm_collectives.all_gather import all_gather, all_gather_into_tensor
from comm_collectives.arguments import is_member
from comm_collectives.buffers import Buffers
from comm_collectives.coalesced import all_gather_coalesced, interleave
from comm_collectives.coalescing.checking import Call, check
from comm_collectives.coalescing.collecting import Run
from comm_collectives.coalescing.conflicts import calls_conflict
from comm_collectives.coalescing.finishing import after, as_one_dimension, copier
from comm_collectives.coalescing.joining import joining
from comm_collectives.coalescing.plain import plain_all_reduces
from comm_collectives.collectives import all_reduce, checked_all_reduce
from comm_collectives.memory import contiguous_elements, copyable, used_here
from comm_collectives.reduce_scatter import checked_reduce_scatter_tensor, reduce_scatter_tensor
from comm_utils.active import slot
from comm_utils.backend import Work
from comm_utils.errors import CommError

__all__ = ["COLLECTED", "launch"]


def launch(runs: Sequence[Run], async_op: bool) -> list[Work]:
    """Launch all calls, together where none needs what another writes."""
    works = plain_all_reduces(runs, async_op)
    if works is not None:
        return works
    calls: list[Call] = []
    for key, collected in runs:
        has_one = _OF_EACH_CALL[key[0]].tensors == 1
        calls += [Call(number, key, (one,) if has_one else one) for number, one in enumerate(collected, len(calls) + 1)]
    if len(calls) > 1:  # one alone checks itself
        check(calls)
    batches: dict[Any, list[Call]] = {}
    one_by_one = len(calls) > 1 and calls_conflict(calls)
    for call in calls:
        batches.setdefault(call.number if one_by_one else call.key, []).append(call)
    launched: list[Work | None] = []
    for batch in batches.values():
        # What a later call needs is there once this one has been waited for: some results come in wait().
        launched += _launch(batch, async_op and not (one_by_one and batch[0] is not calls[-1]))
    return [work for work in launched if work is not None]


def _launch(batch: Sequence[Call], async_op: bool) -> list[Work | None]:
    """Launch calls of one kind, alike on all ranks, whose tensors may differ in strides, type and lazy conjugation."""
    name, _, group = batch[0].key
    if len(batch) == 1 or not is_member(name, group):  # which does nothing, whatever it was given
        return _single(_OF_EACH_CALL[name].call, batch, async_op)
    plain = [call._replace(tensors=tuple(map(_plain, call.tensors))) for call in batch]
    return _OF_EACH_CALL[name].launch(plain, async_op)


def _plain(given: Any) -> Any:
    """Return tensors that share the memory of those given, and are of no kind of the program's own."""
    if isinstance(given, (list, tuple)):
        return [_plain(one) for one in given]
    if type(given) is torch.Tensor:
        return given
    with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors
        return given.detach()


def _all_reduce(batch: Sequence[Call], async_op: bool) -> list[Work | None]:
    _, op, group = batch[0].key
    kinds: dict[tuple[torch.dtype, torch.device | None], list[torch.Tensor]] = {}
    for _, _, (tensor,) in batch:
        # A device takes long to be hashed.
        kinds.setdefault((tensor.dtype, None if tensor.is_cpu else tensor.device), []).append(tensor)
    works: list[Work | None] = []
    for (dtype, device), some in kinds.items():
        if len(some) == 1:
            works.append(all_reduce(some[0], cast(Any, op), group, async_op))
            continue
        buffers = Buffers(device or torch.device("cpu"))
        bucket = buffers.take(sum([one.nbytes for one in some])).view(dtype)
        parts = [as_one_dimension(one) for one in some]
        torch.cat(parts, out=bucket)
        with joining(some, some):  # of which a fast path knows nothing
            work = checked_all_reduce(all_reduce.__name__, bucket, op, cast(Any, group), async_op, None, None)
        works.append(after(work, copier(parts, bucket, buffers)))
    return works


def _reduce_scatter_tensor(batch: Sequence[Call], async_op: bool) -> list[Work | None]:
    _, op, group = batch[0].key
    W = slot.backend.get_world_size(group)
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for _, _, (output, source) in batch:
        kinds.setdefault((output.dtype, output.device), []).append((output, source))
    works: list[Work | None] = []
    for pairs in kinds.values():
        sizes = [output.numel() for output, _ in pairs]
        outputs, sources = zip(*pairs, strict=True)
        joined = interleave([contiguous_elements(source) for source in sources], sizes, W)
        received = joined.new_empty(sum(sizes))
        name = reduce_scatter_tensor.__name__
        with joining(outputs, sources):
            work = checked_reduce_scatter_tensor(name, received, joined, op, cast(Any, group), async_op, None, None)
        works.append(after(work, _placer(outputs, received, sizes)))
    return works


def _placer(outputs: Sequence[torch.Tensor], received: torch.Tensor, sizes: list[int]) -> Callable[[], None]:
    def finish() -> None:
        with torch.inference_mode():
            for output, part in zip(outputs, torch.split(received, sizes), strict=True):
                copyable(output.detach()).copy_(copyable(part.view(output.shape)))
        used_here(received)

    return finish


def _all_gather(batch: Sequence[Call], async_op: bool) -> list[Work | None]:
    name, _, group = batch[0].key
    pairs = [call.tensors for call in batch]
    single = _OF_EACH_CALL[name].call
    if len({source.device for _, source in pairs}) != 1:
        return _single(single, batch, async_op)
    outputs = [output for output, _ in pairs]
    # Lists alone would be taken for one of each rank.
    if single is all_gather:
        if any(part.numel() != source.numel() for output, source in pairs for part in output):
            return _single(single, batch, async_op)  # ranks have tensors of different sizes
        outputs = [list(of_rank) for of_rank in zip(*outputs, strict=True)]
    return [all_gather_coalesced(outputs, [source for _, source in pairs], group, async_op)]


def _single(call: Callable[..., Any], batch: Sequence[Call], async_op: bool) -> list[Work | None]:
    """Make calls one by one, and say of which one an error is."""
    works = []
    for number, (_, op, group), tensors in batch:
        given = tensors if op is None else (*tensors, op)
        try:
            works.append(call(*given, group=group, async_op=async_op))
        except CommError as error:
            error.args = (f"{error} (call {number} within coalescing())",)
            raise
    return works


class _Launcher(NamedTuple):
    call: Callable[..., Any]
    tensors: int  # of a call
    launch: Callable[[Sequence[Call], bool], list[Work | None]]


_OF_EACH_CALL = {
    all_reduce.__name__: _Launcher(all_reduce, 1, _all_reduce),
    all_gather.__name__: _Launcher(all_gather, 2, _all_gather),
    all_gather_into_tensor.__name__: _Launcher(all_gather_into_tensor, 2, _all_gather),
    reduce_scatter_tensor.__name__: _Launcher(reduce_scatter_tensor, 2, _reduce_scatter_tensor),
}
#: Names of the calls that are collected.
COLLECTED = tuple(_OF_EACH_CALL)
