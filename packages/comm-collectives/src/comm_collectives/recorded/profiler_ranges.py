"""Ranges around operations, for profilers: torch's own, and those that read NVTX, such as Nsight Systems."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Protocol

import torch
from torch.autograd import profiler
from torch.cuda import nvtx as torch_nvtx

from comm_utils.errors import ArgumentError, BackendUnavailableError
from comm_utils.observability.exports.groups import format_ranks
from comm_utils.sizes import format_size

__all__ = ["KINDS", "Range", "Ranges", "available", "open_range"]

#: Kinds of ranges: ``"profiler"`` for ``torch.profiler``, ``"nvtx"`` for tools that read NVTX.
KINDS = ("profiler", "nvtx")

# Tools and the package nvtx keep every name for as long as the process lives.
_MOST_NAMES = 1024
# Of one kind of operation, looked up at once.
_MOST_SIZES = 128
_DOMAIN = "comm"


class Range(Protocol):
    """A context manager for one range."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


class _Nothing:
    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


_NOTHING = _Nothing()


class _Nvtx:
    """Has no state, so that one is enough for all operations that are alike, also at the same time."""

    __slots__ = ("_message", "_pop", "_push")

    def __init__(self, push: Callable[[Any], object], pop: Callable[[], object], message: object) -> None:
        self._push, self._pop, self._message = push, pop, message

    def __enter__(self) -> None:
        self._push(self._message)

    def __exit__(self, *_: object) -> None:
        self._pop()


class _Profiled:
    """A range of torch's profiler, within ``around``.

    These two functions do what ``torch.profiler.record_function`` does, in a quarter of the time.
    """

    __slots__ = ("_around", "_handle", "_name")
    _begin = staticmethod(torch._C._autograd._record_function_with_args_enter)
    _end = staticmethod(torch._C._autograd._record_function_with_args_exit)

    def __init__(self, name: str, around: Range) -> None:
        self._name, self._around = name, around

    def __enter__(self) -> None:
        self._around.__enter__()
        self._handle = self._begin(self._name)

    def __exit__(self, *_: object) -> None:
        self._end(self._handle)
        self._around.__exit__(None, None, None)


class Ranges:
    """Opens ranges, named such as ``comm.all_reduce 4 KiB [0 1]``.

    A name has the operation, its size as the comms logger counts it, the global ranks of the group, and ``async`` if
    the range covers the call alone and not the whole operation.

    There are at most some thousand names: those that come later round sizes up to a power of two and have only the
    number of ranks: ``comm.all_reduce <=8 KiB 2 ranks``.

    Args:
        kinds: of :data:`KINDS`; None takes those that can be had here.

    Raises:
        ArgumentError: a kind that does not exist.
        BackendUnavailableError: one that cannot be had here.
    """

    def __init__(self, kinds: Iterable[str] | None = None) -> None:
        chosen = available() if kinds is None else (kinds,) if isinstance(kinds, str) else tuple(kinds)
        for kind in chosen:
            if kind not in KINDS:
                raise ArgumentError(f"ranges: got {kind!r:.60}, expected one of {', '.join(map(repr, KINDS))}")
        self.kinds = tuple(kind for kind in KINDS if kind in chosen)
        self._annotate = _annotator() if "nvtx" in self.kinds else None
        self._ranges: dict[str, Range] = {}
        self._openers: dict[tuple[str, tuple[int, ...], bool], Callable[[int], Range]] = {}

    def open(self, operation: str, size_bytes: int, ranks: tuple[int, ...] = (), asynchronous: bool = False) -> Range:
        """Return the range of one operation; it begins with ``with``."""
        key = (operation, ranks, asynchronous)
        opener = self._openers.get(key)
        if opener is None:
            if len(self._openers) >= _MOST_NAMES:
                self._openers.clear()
            opener = self._openers[key] = self.opener(*key)
        return opener(size_bytes)

    def opener(self, operation: str, ranks: tuple[int, ...] = (), asynchronous: bool = False) -> Callable[[int], Range]:
        """Return a function of the size in bytes that opens these ranges, in less time than :meth:`open`."""
        profiled, annotated = "profiler" in self.kinds, self._annotate is not None
        known: dict[int, tuple[str, Range]] = {}

        def opened(size_bytes: int) -> Range:
            found = known.get(size_bytes)
            if found is None:
                found = self._named(operation, size_bytes, ranks, asynchronous)
                if len(known) < _MOST_SIZES:
                    known[size_bytes] = found
            name, plain = found
            if not (profiled and profiler._is_profiler_enabled):
                return plain
            # torch's emit_nvtx makes an NVTX range of every range of the profiler.
            twice = annotated and torch._C._autograd._profiler_type() == torch._C._profiler.ActiveProfilerType.NVTX
            return _Profiled(name, _NOTHING if twice else plain)

        return opened

    def _named(self, operation: str, size: int, ranks: tuple[int, ...], asynchronous: bool) -> tuple[str, Range]:
        suffix = " async" if asynchronous else ""
        sized = "" if operation == "barrier" else f" {format_size(size)}"
        name = f"comm.{operation}{sized}{f' [{format_ranks(ranks)}]' if ranks else ''}{suffix}"
        if name not in self._ranges and len(self._ranges) >= _MOST_NAMES:
            sized = sized and f" <={format_size(1 << max(size - 1, 0).bit_length())}"
            name = f"comm.{operation}{sized}{f' {len(ranks)} ranks' if ranks else ''}{suffix}"
        found = self._ranges.get(name)
        if found is None:
            found = _NOTHING if self._annotate is None else self._annotate(name, operation)
            self._ranges[name] = found
        return name, found


def available() -> tuple[str, ...]:
    """Return the kinds of ranges that can be had here."""
    return KINDS if not _nvtx_lacks() else KINDS[:1]


def _nvtx_lacks() -> str:
    """Return why there is no NVTX here; empty where there is."""
    if hasattr(torch._C, "_nvtx"):
        return ""
    if importlib.util.find_spec("nvtx") is None:
        return "neither this build of torch nor a package nvtx has it; install the latter with: pip install nvtx"
    if not importlib.import_module("nvtx").enabled():
        return "the variable NVTX_DISABLE turns it off; unset it"
    return ""


def _annotator() -> Callable[[str, str], Range] | None:
    """Return a function of name and operation that makes an NVTX range; None where no tool listens."""
    lack = _nvtx_lacks()
    if lack:
        raise BackendUnavailableError(f"ranges: 'nvtx' cannot be had: {lack}")
    if hasattr(torch._C, "_nvtx"):
        # In the domain of the user's own calls of torch.cuda.nvtx, so that ranges nest.
        return lambda name, _: _Nvtx(torch_nvtx.range_push, torch_nvtx.range_pop, name)
    domain = importlib.import_module("nvtx").get_domain(_DOMAIN)
    if domain.get_event_attributes() is None:  # no tool listens, and this only stands in for a domain
        return None
    push, pop = domain.push_range, domain.pop_range
    return lambda name, operation: _Nvtx(push, pop, domain.get_event_attributes(message=name, category=operation))


class _Default:
    ranges: Ranges | None = None


def open_range(operation: str, size_bytes: int, ranks: tuple[int, ...] = (), asynchronous: bool = False) -> Range:
    """Return a range of every kind that can be had here; see :class:`Ranges`."""
    found = _Default.ranges
    if found is None:
        found = _Default.ranges = Ranges()
    return found.open(operation, size_bytes, ranks, asynchronous)
