"""Measuring one row on all libraries, in turns: round by round A B A B, so that what disturbs one disturbs all.

In each round a variant (a library in one of its ways) gets new data, is called some times untimed, gets new data again,
meets the other ranks, and is called n times that are timed together. Then, outside the timed region, its results are
checked: what the last timed call left where the way allows, and calls on new data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from comm_orchestrator.facade import Compression
from comm_orchestrator.facade.wire_bytes import counted_bytes
from comm_orchestrator.tools.bench import timing
from comm_orchestrator.tools.bench.data import Data
from comm_orchestrator.tools.bench.libraries import Group, Library, UnsupportedError
from comm_orchestrator.tools.bench.operations import IN_PLACE, benchmark
from comm_orchestrator.tools.bench.options import Options
from comm_orchestrator.tools.bench.plan import Row
from comm_orchestrator.tools.bench.system import Exchange
from comm_utils.errors import CommError

__all__ = ["Measured", "Measuring"]


@dataclass
class Measured:
    """The measurements of this rank for one variant of one library.

    Attributes:
        rounds_us: time per call of each round; empty on ranks that take no part.
        calls_us: times of single calls, where they were asked for.
        wrong: elements; None where nothing was checked.
        wire_bytes: what this rank sends in a compressed call.
    """

    library: Library
    way: str
    rounds_us: list[float] = field(default_factory=list)
    calls_us: list[float] = field(default_factory=list)
    wrong: int | None = None
    wire_bytes: int = 0


@dataclass
class _Variant:
    measured: Measured
    source: torch.Tensor
    target: torch.Tensor
    function: Callable[..., object]
    arguments: Sequence[object]

    @property
    def compression(self) -> Compression | None:
        return self.measured.library.compression

    @property
    def is_lossy(self) -> bool:
        return self.compression is not None

    @property
    def checkable(self) -> bool:
        """Return whether a single result is near the exact one; with error feedback, only the sum of many is."""
        return self.compression is None or not self.compression.error_feedback

    def call(self) -> None:
        self.function(*self.arguments)


class Measuring:
    """Measures rows; one per group and process.

    ``notes`` collects what a library turned out not to do.
    """

    def __init__(self, options: Options, group: Group, libraries: Sequence[Library], exchange: Exchange) -> None:
        self.notes: list[str] = []
        self._options, self._group, self._libraries, self._exchange = options, group, libraries, exchange
        self._data = {device: Data(group.members, group.rank, device) for device in {one.device for one in libraries}}
        self._memory: dict[tuple[torch.device, str], torch.Tensor] = {}
        self._refused: dict[tuple[str, str, str, str, str, str], str] = {}
        self._tried: set[tuple[str, str, str, str, str, str]] = set()
        self._noted: set[tuple[str, str, str]] = set()
        self._calls = 0

    def measure(self, row: Row) -> list[Measured]:
        """Measure all variants of ``row`` on this rank; called by all ranks alike."""
        variants = [
            variant
            for library in self._libraries
            for way in benchmark(row.operation).ways
            if (variant := self._prepare(row, library, way)) is not None
        ]
        with timing.undisturbed():
            for _ in range(self._options.rounds):
                for variant in variants:
                    self._round(row, variant)
        for variant in variants:
            if variant.compression is not None:
                with counted_bytes() as counted:
                    variant.call()
                variant.measured.wire_bytes = counted.wire_bytes
        return [variant.measured for variant in variants]

    def forget(self) -> None:
        """Free the memory that rows have shared."""
        self._memory.clear()

    def reserve(self, rows: Sequence[Row]) -> None:
        """Memory for the largest of ``rows``, written to once, so that no call is the first to touch a page."""
        size = len(self._group.members)
        needed = [
            [elements * _dtype(row).itemsize for elements in benchmark(row.operation).elements(row.count, size)]
            for row in rows
        ]
        for device in self._data:
            for name, number in (("source", 0), ("target", 1)):
                most = max((one[number] for one in needed), default=0)
                self._memory[device, name] = torch.zeros(most, dtype=torch.uint8, device=device)

    # --- one variant

    def _prepare(self, row: Row, library: Library, way: str) -> _Variant | None:
        name = library.name if library.compression is None else f"{library.name} with {library.compression!r}"
        key = (name, library.backend, row.operation, way, row.dtype, row.op)
        if key in self._refused:
            return None
        source, target = self._buffers(row, library.device, way)
        known = key in self._tried
        problem, variant = "", None
        try:
            function, arguments = library.call(row, way, source, target)
            variant = _Variant(Measured(library, way), source, target, function, arguments)
            if not known:
                self._data[library.device].fill(row, source, target, self._next(), variant.is_lossy)
                variant.call()
        except UnsupportedError as error:
            problem = str(error)
        except (CommError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            if known:
                raise
            problem = f"{type(error).__name__}: {error}"
        if known:
            return variant
        self._tried.add(key)
        return variant if self._agreed(key, problem) else None

    def _agreed(self, key: tuple[str, str, str, str, str, str], problem: str) -> bool:
        """Return whether the first call worked on all ranks; it has to work on all or on none."""
        failed = [rank for rank, (one,) in enumerate(self._exchange.gather([float(bool(problem))])) if one]
        if not failed:
            return True
        library, backend, operation, way, dtype, op = key
        what = " ".join(part for part in (operation, way.replace("_", " "), dtype, op) if part)
        if len(failed) < self._exchange.ranks:
            told = problem or f"ranks {', '.join(map(str, failed))} failed"
            raise CommError(f"{library} on {backend}: {what}: {told}")
        self._refused[key] = problem
        self._note(f"{library} on {backend}", what, dtype, problem.splitlines()[0])
        return False

    def _note(self, library: str, what: str, dtype: str, problem: str) -> None:
        """Say it once for each type: a library that lacks one lacks it in every operation."""
        if (library, dtype, problem) not in self._noted:
            self._noted.add((library, dtype, problem))
            self.notes.append(f"{library} does not do {what} (and what else ends so): {problem}")

    def _buffers(self, row: Row, device: torch.device, way: str) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, size, rank = _dtype(row), len(self._group.members), self._group.rank
        sizes = benchmark(row.operation).elements(row.count, size)
        source, target = (
            self._memory[device, name][: elements * dtype.itemsize].view(dtype)
            for name, elements in zip(("source", "target"), sizes, strict=True)
        )
        if way != IN_PLACE:
            return source, target
        if not row.pattern.has_parts:
            return source, source
        own = slice(rank * row.count, (rank + 1) * row.count)
        if row.pattern.is_rooted and rank != row.root:
            return source, target  # only the root has the whole
        return (target[own], target) if len(target) > len(source) else (source, source[own])

    def _next(self) -> int:
        """Return the number of a call, the same on all ranks."""
        self._calls += 1
        return self._calls

    def _round(self, row: Row, variant: _Variant) -> None:
        options, measured = self._options, variant.measured
        device, data = measured.library.device, self._data[measured.library.device]
        data.fill(row, variant.source, variant.target, self._next(), variant.is_lossy)
        timing.loop(options.warmup_iters, variant.function, variant.arguments)
        number = self._next()
        data.fill(row, variant.source, variant.target, number, variant.is_lossy)
        self._exchange.meet()
        # One way of a ping-pong is half of it.
        share = 0.5 if row.pattern.is_message else 1.0
        if options.per_iteration:
            times_us = timing.calls_us(device, options.iters, variant.function, variant.arguments)
            measured.calls_us += [share * one for one in times_us]
            average_us = sum(times_us) / len(times_us)
        else:
            average_us = timing.loop_us(device, options.iters, variant.function, variant.arguments)
        measured.rounds_us.append(share * average_us)
        if options.check and not row.pattern.is_empty and variant.checkable:
            repeatable = measured.way in benchmark(row.operation).repeatable
            measured.wrong = (measured.wrong or 0) + self._wrong(row, variant, number if repeatable else None)

    def _wrong(self, row: Row, variant: _Variant, timed: int | None) -> int:
        data = self._data[variant.measured.library.device]
        codec = None if variant.compression is None else variant.compression.codec
        found = 0 if timed is None else data.wrong(row, variant.source, variant.target, timed, codec)
        for _ in range(self._options.check):
            number = self._next()
            data.fill(row, variant.source, variant.target, number, variant.is_lossy)
            variant.call()
            found += data.wrong(row, variant.source, variant.target, number, codec)
        return found


def _dtype(row: Row) -> torch.dtype:
    found: torch.dtype = getattr(torch, row.dtype or "uint8")
    return found
