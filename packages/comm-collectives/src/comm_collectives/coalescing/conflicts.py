"""Find calls of a block that depend on each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from comm_utils.torch_support import factories

__all__ = ["calls_conflict"]

# Of one tensor; more take longer to be looked at than calls one by one take.
_MOST_RUNS = 1 << 16


def calls_conflict(calls: Sequence[tuple[int, object, tuple[Any, ...]]]) -> bool:
    """Return whether a call writes what another one reads or writes.

    Args:
        calls: of each a number, its kind and its tensors; the first of more than one is written. Those of a group that
            this rank is not in may have been given anything.
    """
    try:
        if all(len(tensors) == 1 for _, _, tensors in calls):  # of which each writes its tensor
            ones = [tensors[0] for _, _, tensors in calls]
            if all(map(torch.Tensor.is_contiguous, ones)):
                simple = sorted(zip(map(torch.Tensor.data_ptr, ones), [one.nbytes for one in ones], strict=True))
                return any(begin + size > after for (begin, size), (after, _) in pairwise(simple) if size)
    except (RuntimeError, TypeError):
        pass  # one was given something else
    tensors = [(number, place == 0, one) for number, _, given in calls for place, one in _tensors_of(given)]
    # What lies in the gaps of an input is not shared, and other ranks may have this input without gaps.
    return _conflict(tensors, _whole) and _conflict(tensors, _without_gaps)


def _tensors_of(given: Sequence[Any]) -> Iterator[tuple[int, torch.Tensor]]:
    for place, some in enumerate(given):
        for one in some if isinstance(some, (list, tuple)) else (some,):
            if isinstance(one, torch.Tensor) and one.layout is torch.strided and one.numel():
                yield place, one


def _conflict(
    tensors: Sequence[tuple[int, bool, torch.Tensor]], spans_of: Callable[[torch.Tensor], Iterable[tuple[int, int]]]
) -> bool:
    spans = sorted(
        (begin, end, number, is_written) for number, is_written, one in tensors for begin, end in spans_of(one)
    )
    written, every = _Furthest(), _Furthest()
    for begin, end, number, is_written in spans:
        if (every if is_written else written).reaches(begin, number):
            return True
        every.include(end, number)
        if is_written:
            written.include(end, number)
    return False


def _whole(tensor: torch.Tensor) -> Iterable[tuple[int, int]]:
    """Return the bytes from the first element of a tensor to the end of its last."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return ((begin, begin + tensor.nbytes),)
    steps = (stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return ((begin, begin + (sum(steps) + 1) * tensor.element_size()),)


def _without_gaps(tensor: torch.Tensor) -> Iterable[tuple[int, int]]:
    """Return the bytes of each run of elements; all from the first to the last where runs are too many to look at."""
    size_bytes, run = tensor.element_size(), 1
    offsets = factories.zeros(1, dtype=torch.int64, device="cpu")
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == run:
            run *= size
        elif stride:  # else the same elements again
            if offsets.numel() * size > _MOST_RUNS:
                return _whole(tensor)
            offsets = (offsets[:, None] + stride * factories.arange(size, device="cpu")).flatten()
    first = tensor.data_ptr()
    begins = {first + offset * size_bytes for offset in offsets.tolist()}
    return ((one, one + run * size_bytes) for one in begins)


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
