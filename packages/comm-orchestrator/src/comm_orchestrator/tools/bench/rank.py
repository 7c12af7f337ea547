"""The program of each rank: set up the world, measure, and print the results on rank 0."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import cast

import torch

from comm_orchestrator import facade
from comm_orchestrator.tools.bench import system
from comm_orchestrator.tools.bench.display import Printer
from comm_orchestrator.tools.bench.libraries import Group, Library, open_library
from comm_orchestrator.tools.bench.libraries.torch_like import TorchLike
from comm_orchestrator.tools.bench.measuring import Measured, Measuring
from comm_orchestrator.tools.bench.options import Options
from comm_orchestrator.tools.bench.plan import Plan, Row, check_world, plan
from comm_orchestrator.tools.bench.results import Seen, Setting, summed_up
from comm_orchestrator.tools.bench.system import Exchange
from comm_orchestrator.tools.errors import let_others_speak, print_error
from comm_orchestrator.tools.local_ranks import FAILED
from comm_orchestrator.tools.output import accept_any_text
from comm_utils.errors import ArgumentError, BrokenGroupError, CommError, CommTimeoutError, PeerLostError
from comm_utils.observability.bench_results import BenchResult

__all__ = ["main", "run"]

# An operation that takes longer has lost a rank.
_TIMEOUT_S = 300.0


def run(options: Options) -> int:
    """Measure; called by all ranks of a job. The exit code: 0, 1 for a finding, 2 for wrong usage, 3 for a failure."""
    try:
        return _run(options)
    except (ArgumentError, CommError, RuntimeError, OSError, MemoryError) as error:
        rank = _rank()
        if isinstance(error, ArgumentError):
            if rank:
                let_others_speak()  # rank 0 says the same
            else:
                print_error(_told(error))
            return 2
        if isinstance(error, (PeerLostError, BrokenGroupError, CommTimeoutError)) or "onnection" in str(error):
            let_others_speak()
        print_error(_told(error), rank=rank)
        return FAILED


def _run(options: Options) -> int:
    timeout_s = options.timeout_s or _TIMEOUT_S
    facade.init_distributed(options.backends[0] if options.backends else None, verbose=False, timeout=timeout_s)
    facade.set_compression(None)  # results say what compressed them: --compression alone
    exchange = Exchange()
    group = _group(check_world(options, exchange.ranks), exchange)
    made = plan(options, len(group.members))
    backends = options.backends or (facade.get_backend(),)
    with _stdout_for_tables():
        opened = [open_library("ours", backend, group) for backend in backends]
        libraries = [one for ours in opened for one in _compressed(ours, options.compressions)]
        peers = [open_library(peer, backends[0], group) for peer in options.peers]
        opened, libraries = [*opened, *peers], [*libraries, *peers]
    facts = exchange.facts({**system.rank_facts(libraries[0].device), "group": group.all_members.index(group.members)})
    printer = Printer(options, facts, made, libraries) if exchange.rank == 0 else None
    measuring = Measuring(options, group, libraries, exchange)
    setting = Setting(
        len(group.members),
        len({facts[rank]["host"] for rank in group.all_members[0]}),
        len(group.all_members),
        options.iters,
        options.average,
    )
    for row in _reserved(made, measuring):
        with _limited(options.timeout_s, row):
            results = _results(row, measuring.measure(row), exchange, setting, options)
        if printer is not None:
            printer.show(row, results, measuring.notes)
        # All ranks end together where nobody reads on.
        if exchange.gather([float(printer is not None and printer.is_unread)])[0][0]:
            break
    code = printer.conclude() if printer is not None else 0
    findings = exchange.gather([float(code)])
    for library in reversed(opened):
        library.close()
    facade.destroy_process_group()
    return int(findings[0][0])


def _compressed(ours: Library, compressions: Sequence[str]) -> list[Library]:
    """Return ``ours`` with each compression that was asked for."""
    if not compressions:
        return [ours]
    return [ours if method == "none" else cast(TorchLike, ours).compressed(method) for method in compressions]


def _reserved(made: Plan, measuring: Measuring) -> Iterator[Row]:
    """Return the rows, with memory for those of one operation at a time."""
    for operation in dict.fromkeys(row.operation for row in made.rows):
        rows = [row for row in made.rows if row.operation == operation]
        measuring.reserve(rows)
        yield from rows
        measuring.forget()


def _results(
    row: Row, measured: list[Measured], exchange: Exchange, setting: Setting, options: Options
) -> list[BenchResult]:
    """Gather the measurements of all ranks in one exchange."""
    if not measured:
        return []
    rounds, calls = options.rounds, options.rounds * options.iters if options.per_iteration else 0
    own = [number for one in measured for number in _seen(row, one, exchange.rank, setting).numbers()]
    everyone = exchange.gather(own)
    each = 2 + rounds + calls
    return [
        summed_up(
            row,
            one.library.name,
            one.library.backend,
            one.way,
            [Seen.of(numbers[each * place : each * (place + 1)], rounds, calls) for numbers in everyone],
            setting,
            "" if one.library.compression is None else repr(one.library.compression),
        )
        for place, one in enumerate(measured)
    ]


def _seen(row: Row, one: Measured, rank: int, setting: Setting) -> Seen:
    wrong = -1 if one.wrong is None else one.wrong
    if row.pattern.is_message and rank % setting.world_size not in (0, setting.world_size - 1):
        nothing = float("nan")
        return Seen(wrong, [nothing] * len(one.rounds_us), [nothing] * len(one.calls_us))
    return Seen(wrong, one.rounds_us, one.calls_us, one.wire_bytes)


@contextmanager
def _stdout_for_tables() -> Iterator[None]:
    """Redirect to stderr what a library prints when it is set up, as DeepSpeed does."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _group(size: int, exchange: Exchange) -> Group:
    """Neighbouring ranks, ``size`` of them."""
    every = [list(range(first, first + size)) for first in range(0, exchange.ranks, size)]
    return Group(every[exchange.rank // size], exchange.rank % size, every)


@contextmanager
def _limited(timeout_s: float, row: Row) -> Iterator[None]:
    """End the process, with a message, where a row takes longer; a library that hangs cannot be interrupted."""
    if not timeout_s:
        yield
        return

    def end() -> None:
        if _rank():
            let_others_speak()
        what = f"{row.operation} of {row.size_bytes} bytes took longer than --timeout {timeout_s:g} s"
        print_error(f"{what}; give a longer one, smaller sizes, or see commctl doctor", rank=_rank())
        os._exit(FAILED)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _rank() -> int:
    with suppress(CommError):
        if facade.is_initialized():
            return facade.get_rank()
    return int(os.environ.get("RANK", "0")) if os.environ.get("RANK", "0").isdecimal() else 0


def _told(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text if isinstance(error, CommError) else f"{type(error).__name__}: {text.splitlines()[0]}"


def main(text: str) -> None:
    """Run a rank that :mod:`.command` started, with its options; end the process."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    accept_any_text()
    code = run(Options.loads(text))
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
