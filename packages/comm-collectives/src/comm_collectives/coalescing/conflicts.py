"""Find calls of a block that depend on each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

__all__ = ["calls_conflict"]


def calls_conflict(calls: Sequence[tuple[int, object, tuple[Any, ...]]]) -> bool:
    """Return whether a call writes what another one reads or writes.

    Args:
        calls: of each a number, its kind and its tensors; the first of more than one is written.
    """
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
