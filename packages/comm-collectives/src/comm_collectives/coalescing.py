"""Many small calls in few messages: what is called within a ``with`` block is done together at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import pairwise
from threading import get_ident
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from comm_collectives import arguments
from comm_collectives.buffers import Buffers
from comm_collectives.coalesced import all_gather_coalesced, interleave
from comm_collectives.collectives import all_reduce
from comm_collectives.gather_scatter import all_gather, all_gather_into_tensor
from comm_collectives.keyword_errors import with_keyword_errors
from comm_collectives.memory import contiguous_elements, copyable, is_dense
from comm_collectives.reduce_scatter import reduce_scatter_tensor
from comm_collectives.work import Completed
from comm_collectives.wrapping import BackendWrapper
from comm_utils import kernels
from comm_utils.active import slot
from comm_utils.backend import Backend, Work
from comm_utils.errors import ArgumentError, CommError
from comm_utils.fast_path import FastPath, FastPathCache, FastPathKey
from comm_utils.given import seconds_to_wait

__all__ = ["Coalescing", "coalescing"]


class _Call(NamedTuple):
    number: int
    key: FastPathKey
    tensors: tuple[Any, ...]


#: A call as it is noted: a plain tuple takes a third of the time.
_Note: TypeAlias = tuple[FastPathKey, tuple[Any, ...]]


class Coalescing:
    """The handle of all calls of one ``with`` block; it can be waited for after the block."""

    def __init__(self) -> None:
        self._works: list[Work] | None = None

    def started(self, works: list[Work]) -> None:
        """Note what the calls came to, at the end of the block."""
        self._works = works

    def _begun(self) -> list[Work]:
        if self._works is None:
            raise ArgumentError(
                "coalescing: got a wait for calls that begin at the end of the with block; wait after it"
            )
        return self._works

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Return True once all results may be used.

        Args:
            timeout: as of the handle of a single call, for each message.
        """
        seconds_to_wait(timeout)
        for work in self._begun():
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Return whether ``wait()`` would return at once."""
        return self._works is not None and all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return what went wrong, or None; does not wait."""
        return next((error for work in self._works or () if (error := work.exception()) is not None), None)

    def result(self) -> None:
        """Wait; the results are in the tensors of the calls."""
        self.wait()


@with_keyword_errors
def coalescing(async_op: bool = False) -> AbstractContextManager[Coalescing]:
    """Do all calls within the block together at its end, in one message for each kind of call, op, group and dtype.

    Within the block, calls of this thread to ``all_reduce``, ``all_gather``, ``all_gather_into_tensor`` and
    ``reduce_scatter_tensor`` only take note of their tensors, which must not be used before the end. Other collectives
    raise ``ArgumentError``. Inputs are only read, as ever. Where tensors of two calls share memory, calls are made one
    by one, in their order. All ranks make the same calls in the same order; after an exception nothing is done.

    Args:
        async_op: at the end of the block only start what is to be done.

    Returns:
        a context manager; it gives a handle, which is what calls with ``async_op`` return. With ``async_op``, wait for
        it after the block.
    """
    arguments.active("coalescing")
    return _Block(arguments.as_flag("coalescing", "async_op", async_op))


class _Block(AbstractContextManager[Coalescing]):
    """One ``with`` block."""

    def __init__(self, async_op: bool) -> None:
        self._async_op = async_op
        self._before: tuple[Backend, FastPathCache] | None = None
        self._notes: list[_Note] = []
        self._handle = Coalescing()

    def __enter__(self) -> Coalescing:
        backend, fast_paths = slot.backend, slot.fast_paths
        if isinstance(fast_paths, _CollectingPaths) and fast_paths.thread == get_ident():
            raise ArgumentError(
                "coalescing: got called within another coalescing(), whose calls have not been made yet"
            )
        if self._before is not None:
            raise ArgumentError("coalescing: got entered a second time; call coalescing() for each with block")
        self._before = backend, fast_paths
        slot.backend = cast(Backend, _Collecting(backend))
        slot.fast_paths = _CollectingPaths(fast_paths, self._notes, self._handle)
        return self._handle

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._before is not None
        slot.backend, slot.fast_paths = self._before
        if kind is None:
            self._handle.started(_make(self._notes, self._async_op))


class _Collecting(BackendWrapper):
    """Refuses calls that are not collected."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._thread = get_ident()

    def during(self, call: str, timeout: timedelta | None = None) -> Any:
        if get_ident() != self._thread:
            return self.inner.during(call, timeout)
        raise ArgumentError(
            f"{call}: got called within coalescing(), which collects {', '.join(_MAKERS)} without timeout and "
            "compression; make this call outside of the block"
        )


class _CollectingPaths(FastPathCache):
    """Takes note of calls in the place of making them."""

    __slots__ = ("thread",)

    def __init__(self, usual: FastPathCache, notes: list[_Note], handle: Coalescing) -> None:
        super().__init__()
        self.thread = get_ident()
        self.synchronous = _Notes(usual.synchronous, notes, True)
        self.asynchronous = _Notes(usual.asynchronous, notes, handle)


class _Notes(dict[FastPathKey, FastPath]):
    def __init__(self, usual: dict[FastPathKey, FastPath], notes: list[_Note], outcome: Any) -> None:
        super().__init__()
        self._usual, self._thread = usual, get_ident()
        self._notes, self._outcome = notes, outcome

    def get(self, key: FastPathKey, default: Any = None) -> Any:
        return self[key] if get_ident() == self._thread else self._usual.get(key)

    def __missing__(self, key: FastPathKey) -> FastPath | None:
        if key[0] not in _MAKERS:
            return None
        take, outcome = self._notes.append, self._outcome

        def note(*tensors: Any) -> Any:
            take((key, tensors))
            return outcome

        def note_of_two(outputs: Any, source: Any) -> Any:
            if outputs is None or source is None:
                raise ArgumentError(
                    f"{key[0]}: got no outputs within coalescing(), at whose end they are filled; give them"
                )
            return note(outputs, source)

        self[key] = kept = note_of_two if key[0] == all_gather.__name__ else note
        return kept


def _make(notes: Sequence[_Note], async_op: bool) -> list[Work]:
    """Make all calls, together where none needs what another writes."""
    works = _plain_all_reduces(notes, async_op)
    if works is not None:
        return works
    calls = [_Call(number, *noted) for number, noted in enumerate(notes, 1)]
    batches: dict[Any, list[_Call]] = {}
    one_by_one = len(calls) > 1 and _share_memory(calls)
    for call in calls:
        batches.setdefault(call.number if one_by_one else call.key, []).append(call)
    made: list[Work | None] = []
    for batch in batches.values():
        made += _MAKERS[batch[0].key[0]](batch, async_op)
    return [work for work in made if work is not None]


def _plain_all_reduces(notes: Sequence[_Note], async_op: bool) -> list[Work] | None:
    """Make all calls in native code but the messages themselves; None, with nothing done, where it cannot."""
    if len(notes) < 2:
        return None
    batches: dict[FastPathKey, list[torch.Tensor]] = {}
    batch, last = cast("list[torch.Tensor]", []), None
    for key, tensors in notes:
        if key is not last:  # the same object for all calls of a kind
            batch, last = batches.setdefault(key, []), key
        batch.append(tensors[0])
    if any(key[0] != all_reduce.__name__ for key in batches):
        return None
    layout = kernels.plain_layout([tensor for batch in batches.values() for tensor in batch])
    if layout is None:
        return None
    works: list[Work] = []
    for key, batch in batches.items():
        own = layout if len(batches) == 1 else kernels.plain_layout(batch)
        works += _plain_batch(key, batch, own or {}, async_op)
    return works


def _plain_batch(
    key: FastPathKey, batch: list[torch.Tensor], layout: dict[torch.dtype, tuple[int, int]], async_op: bool
) -> list[Work]:
    _, op, group = key
    buffers = {dtype: Buffers(torch.device("cpu")) for dtype, (count, _) in layout.items() if count > 1}
    buckets = {dtype: some.take(layout[dtype][1]).view(dtype) for dtype, some in buffers.items()}
    if not kernels.move_plain(batch, list(buckets.values()), True):
        raise ArgumentError("coalescing: got tensors that another thread changed at the end of the with block")
    works: list[Work] = []
    for dtype in layout:
        bucket = buckets.get(dtype)
        given = next(one for one in batch if one.dtype is dtype) if bucket is None else bucket
        work = all_reduce(given, cast(Any, op), group, async_op)
        if work is not None:
            works.append(work if bucket is None else _After(work, _spreader(batch, {dtype: bucket}, buffers)))
    if not async_op:
        _spreader(batch, buckets, buffers)()
    return works


def _spreader(
    tensors: list[torch.Tensor], buckets: dict[torch.dtype, torch.Tensor], buffers: dict[torch.dtype, Buffers]
) -> Callable[[], None]:
    def finish() -> None:
        moved = kernels.move_plain(tensors, list(buckets.values()), False)
        for dtype, bucket in buckets.items():
            if moved:
                with buffers[dtype]:  # kept for the next block
                    pass
            else:  # a tensor is another one by now
                parts = [_as_one_dimension(one) for one in tensors if one.dtype is dtype]
                _copier(parts, bucket, buffers[dtype])()

    return finish


def _share_memory(calls: Sequence[_Call]) -> bool:
    """Return whether a call writes what another one reads or writes."""
    spans = []
    try:
        if all(len(tensors) == 1 for _, _, tensors in calls):  # of which each writes its tensor
            ones = [tensors[0] for _, _, tensors in calls]
            if all(map(torch.Tensor.is_contiguous, ones)):
                simple = sorted(zip(map(torch.Tensor.data_ptr, ones), [one.nbytes for one in ones], strict=True))
                return any(begin + size > after for (begin, size), (after, _) in pairwise(simple) if size)
        for number, _, tensors in calls:
            for place, given in enumerate(tensors):
                for one in given if isinstance(given, (list, tuple)) else (given,):
                    if one.numel():
                        begin = one.data_ptr()
                        spans.append((begin, begin + _extent(one), number, place == 0))  # outputs come first
    except (
        AttributeError,
        RuntimeError,
        TypeError,
    ):  # not tensors, which the call itself refuses with a better message
        return True
    spans.sort()
    written, every = _Furthest(), _Furthest()
    for begin, end, number, is_written in spans:
        if (every if is_written else written).reaches(begin, number):
            return True
        every.include(end, number)
        if is_written:
            written.include(end, number)
    return False


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = (stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return (sum(steps) + 1) * tensor.element_size()


class _Furthest:
    """The furthest end of what was seen, and the furthest of other calls than that one's."""

    def __init__(self) -> None:
        self._end, self._call, self._next_end = 0, -1, 0

    def include(self, end: int, call: int) -> None:
        if call == self._call:
            self._end = max(end, self._end)
        elif end > self._end:
            self._end, self._call, self._next_end = end, call, self._end
        else:
            self._next_end = max(end, self._next_end)

    def reaches(self, begin: int, call: int) -> bool:
        """Return whether another call's memory goes on beyond ``begin``."""
        return begin < (self._next_end if call == self._call else self._end)


def _all_reduce(batch: Sequence[_Call], async_op: bool) -> list[Work | None]:
    _, op, group = batch[0].key
    kinds: dict[tuple[torch.dtype, torch.device | None], list[torch.Tensor]] = {}
    for _, _, (tensor,) in batch:
        # What conjugates or negates, memory says nothing of.
        if not _is_usual(tensor) or tensor.is_neg() or tensor.is_conj():
            return _single(all_reduce, batch, async_op)
        # A device takes long to be hashed.
        kinds.setdefault((tensor.dtype, None if tensor.is_cpu else tensor.device), []).append(tensor)
    works: list[Work | None] = []
    for (dtype, device), some in kinds.items():
        if len(some) == 1:
            works.append(all_reduce(some[0], cast(Any, op), group, async_op))
            continue
        buffers = Buffers(device or torch.device("cpu"))
        bucket = buffers.take(sum([one.nbytes for one in some])).view(dtype)
        parts = [_as_one_dimension(one) for one in some]
        torch.cat(parts, out=bucket)
        work = all_reduce(bucket, cast(Any, op), group, async_op)
        works.append(_after(work, _copier(parts, bucket, buffers)))
    return works


def _as_one_dimension(one: torch.Tensor) -> torch.Tensor:
    return one.detach().as_strided((one.numel(),), (1,)) if one.dim() != 1 else one.detach()


def _copier(parts: list[torch.Tensor], bucket: torch.Tensor, buffers: Buffers) -> Callable[[], None]:
    def finish() -> None:
        with torch.inference_mode():
            torch._foreach_copy_(parts, torch.split(bucket, [part.numel() for part in parts]))
        with buffers:  # kept for the next block
            pass

    return finish


def _reduce_scatter_tensor(batch: Sequence[_Call], async_op: bool) -> list[Work | None]:
    _, op, group = batch[0].key
    W = slot.backend.get_world_size(group)
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for _, _, (output, source) in batch:
        fits = _is_usual(output) and _is_usual(source) and output.dtype == source.dtype
        if not fits or output.numel() * W != source.numel():
            return _single(reduce_scatter_tensor, batch, async_op)
        kinds.setdefault((output.dtype, output.device), []).append((output, source))
    works: list[Work | None] = []
    for pairs in kinds.values():
        sizes = [output.numel() for output, _ in pairs]
        joined = interleave([contiguous_elements(source) for _, source in pairs], sizes, W)
        received = joined.new_empty(sum(sizes))
        work = reduce_scatter_tensor(received, joined, cast(Any, op), group, async_op)
        works.append(_after(work, _placer([output for output, _ in pairs], received, sizes)))
    return works


def _placer(outputs: list[torch.Tensor], received: torch.Tensor, sizes: list[int]) -> Callable[[], None]:
    def finish() -> None:
        with torch.inference_mode():
            for output, part in zip(outputs, torch.split(received, sizes), strict=True):
                copyable(output.detach()).copy_(copyable(part.view(output.shape)))

    return finish


def _all_gather(batch: Sequence[_Call], async_op: bool) -> list[Work | None]:
    name, _, group = batch[0].key
    pairs = [call.tensors for call in batch]
    single = all_gather if name == all_gather.__name__ else all_gather_into_tensor
    devices = {source.device for _, source in pairs if isinstance(source, torch.Tensor)}
    if len(devices) != 1 or len(batch) == 1:
        return _single(single, batch, async_op)
    outputs = [output for output, _ in pairs]
    # Lists alone would be taken for one of each rank.
    if any(not isinstance(output, torch.Tensor) for output in outputs):
        W = slot.backend.get_world_size(group)
        if any(not isinstance(output, (list, tuple)) or len(output) != W for output in outputs):
            return _single(single, batch, async_op)
        outputs = [list(of_rank) for of_rank in zip(*outputs, strict=True)]
    return [all_gather_coalesced(outputs, [source for _, source in pairs], group, async_op)]


def _is_usual(given: object) -> bool:
    """Return whether it can be one of many; others are called one by one, and refused there if need be."""
    return type(given) is torch.Tensor and given.layout is torch.strided and is_dense(given)


def _single(call: Callable[..., Any], batch: Sequence[_Call], async_op: bool) -> list[Work | None]:
    """Make calls one by one, which says what is wrong with one of them."""
    works = []
    for number, (_, op, group), tensors in batch:
        given = tensors if op is None else (*tensors, op)
        try:
            works.append(call(*given, group=group, async_op=async_op))
        except CommError as error:
            error.args = (f"{error} (call {number} within coalescing())",)
            raise
    return works


class _After:
    """A handle that does local work once, after another one."""

    def __init__(self, work: Work, finish: Callable[[], None]) -> None:
        self._work, self._finish = work, cast("Callable[[], None] | None", finish)

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        self._work.wait(timeout)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def result(self) -> Any:
        self.wait()


def _after(work: Work | None, finish: Callable[[], None]) -> Work:
    if work is None:
        finish()
        return Completed()
    return _After(work, finish)


_MAKERS: dict[str, Callable[[Sequence[_Call], bool], list[Work | None]]] = {
    one.__name__: maker
    for one, maker in (
        (all_reduce, _all_reduce),
        (all_gather, _all_gather),
        (all_gather_into_tensor, _all_gather),
        (reduce_scatter_tensor, _reduce_scatter_tensor),
    )
}
