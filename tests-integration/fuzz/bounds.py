"""Runs a decoder on one input, within bounds: whatever breaks them is a finding."""

from __future__ import annotations

import contextlib
import resource
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comm_utils.testing import patience

__all__ = ["Decoder", "Finding", "check", "limit_address_space", "read_corpus"]

# Of one input. Memory grows with it; what any input may take covers modules that a first use imports.
LIMIT_S = 1.0
MOST_BYTES, MOST_TIMES = 48 << 20, 64
MOST_MESSAGE_BYTES = 4000
# After so long an input hangs.
HANGS_S = 20.0
_SHOWN = 200


@dataclass(frozen=True)
class Decoder:
    """A function that reads what another process wrote.

    Attributes:
        decode: takes the bytes; what it returns is not looked at.
        refusals: the exceptions by which it says that the bytes are none of its own.
        seeds: returns inputs that it accepts, and others, before anything is changed.
        kind: "bytes", "text", "json" or "lines" (of JSON): how mutations change an input.
    """

    name: str
    decode: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]
    seeds: Callable[[], Sequence[bytes]] = field(repr=False)
    kind: str = "bytes"


class Finding(AssertionError):
    """An input on which a decoder broke its bounds."""

    def __init__(self, decoder: Decoder, data: bytes, what: str) -> None:
        super().__init__(f"{decoder.name}: {what}; {len(data)} bytes: {data[:_SHOWN]!r}")


def read_corpus(folder: Path, decoder: Decoder) -> list[bytes]:
    """Return the inputs of ``decoder`` that ``folder`` keeps."""
    own = folder / decoder.name
    return [path.read_bytes() for path in sorted(own.iterdir())] if own.is_dir() else []


def limit_address_space(more_bytes: int) -> None:
    """Let this process reserve ``more_bytes`` beyond what it has: allocations above fail, and are findings."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def check(decoder: Decoder, data: bytes, exact: bool = False) -> bool:
    """Return whether ``decoder`` accepts ``data``.

    Args:
        exact: measure all memory that Python allocates, and end what hangs. Slower; else growth of the process counts.

    Raises:
        Finding: an exception that is no refusal, too much time or memory, or a refusal that nobody could print.
    """
    with _deadline(decoder, data) if exact else contextlib.nullcontext():
        begin, before = time.thread_time(), _peak(exact)
        accepted = True
        try:
            decoder.decode(data)
        except Finding:
            raise
        except decoder.refusals as error:
            accepted = False
            _check_refusal(decoder, data, error)
        except Exception as error:
            raise Finding(decoder, data, f"raised {type(error).__name__}: {error!s:.200}") from error
        took_s, more = time.thread_time() - begin, _peak(exact) - before
    if took_s > LIMIT_S and took_s > LIMIT_S * patience():
        raise Finding(decoder, data, f"took {took_s:.1f} s of a core, more than {LIMIT_S:g} s")
    if more > MOST_BYTES + MOST_TIMES * len(data):
        raise Finding(decoder, data, f"took {more >> 20} MiB")
    return accepted


def _check_refusal(decoder: Decoder, data: bytes, error: BaseException) -> None:
    try:
        # Bytes of the environment that are no UTF-8 are such in Python, and printed as escapes.
        message = str(error).encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as wrong:
        raise Finding(decoder, data, f"refused with a message that cannot be printed: {wrong}") from error
    if len(message) > MOST_MESSAGE_BYTES:
        raise Finding(decoder, data, f"refused with a message of {len(message)} bytes") from error
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or "allocate memory" in str(cause):
            raise Finding(decoder, data, f"asked for too much memory: {cause!s:.200}") from error
        cause = cause.__cause__ or cause.__context__


def _peak(exact: bool) -> int:
    if not exact:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    if not tracemalloc.is_tracing():
        tracemalloc.start(1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    return peak


@contextlib.contextmanager
def _deadline(decoder: Decoder, data: bytes) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Finding(decoder, data, f"did not end within {HANGS_S:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, HANGS_S * patience())
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        tracemalloc.stop()
