"""``commctl trace replay``: refuse what cannot be, then start the ranks, or be one of them."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from comm_orchestrator import facade
from comm_orchestrator.tools import local_ranks
from comm_orchestrator.tools.errors import tell_in_turn
from comm_orchestrator.tools.trace import comparison
from comm_orchestrator.tools.trace.comparison import Comparison, Tally, compare, tally, together_with
from comm_orchestrator.tools.trace.files import read
from comm_orchestrator.tools.trace.intervals import span_ns
from comm_orchestrator.tools.trace.replay_options import Options, check_files, check_here, check_recorded
from comm_orchestrator.tools.trace.replay_order import one_after_another
from comm_orchestrator.tools.trace.replay_plan import Plan, plan, without_tags
from comm_orchestrator.tools.trace.replay_rank import fail, play, set_up
from comm_utils.atomic_write import replacing
from comm_utils.errors import ArgumentError, CommError
from comm_utils.launch import LaunchInfo, discover, mpi_launcher, with_plugins
from comm_utils.observability.traces.file import load_rank, path_of, remove_beyond, save

__all__ = ["run"]


def run(options: Options) -> int:
    """Replay and compare; the exit code: 0, or 1 where other bytes were moved or a rank failed.

    Raises:
        CommError: nothing was started, because of what the message says.
    """
    launch = discover(os.environ, with_plugins())
    if launch.launcher != "none" or mpi_launcher(os.environ) is not None:
        known = launch.world_size if launch.launcher != "none" else 0
        return _launched(options, launch, known)
    made = plan(read(Path(options.folder)))
    recorded = not options.backend
    options = replace(options, backend=options.backend or made.backend)
    made = without_tags(made, options.backend)
    check_files(options)
    check_here(options, made, recorded)
    return _local(options, made)


def _local(options: Options, made: Plan) -> int:
    with tempfile.TemporaryDirectory(prefix="comm-replay-") as scratch:
        planned, recorded = Path(scratch) / "planned", Path(scratch) / "replayed"
        for trace in one_after_another(made.traces):
            save(planned, trace)
        told = replace(
            options,
            planned=str(planned),
            begin_ns=span_ns(made.traces)[0],
            output=str(recorded),
            timeout_s=options.limit_s(made.longest_s),
        )
        code = local_ranks.run("comm_orchestrator.tools.trace.replay_rank", [told.dumps()], len(made.traces))
        if code:
            return code if code == 2 or code > 128 else 1
        replayed = read(recorded)
        begin, end = span_ns(replayed)
        found = compare(made.traces, tally(replayed), end - begin, replayed[0].backend, options.keep_gaps, made.notes)
        if options.output:
            _copy(recorded, Path(options.output), len(replayed))
    return _told(found, options)


def _copy(recorded: Path, output: Path, world_size: int) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        for path in recorded.iterdir():
            shutil.copy(path, output)
        remove_beyond(output, world_size)
    except OSError as error:
        raise ArgumentError(f"--output: {output} cannot be written: {error.strerror or error}") from None


def _told(found: Comparison, options: Options) -> int:
    """Print, write what was asked for; the exit code."""
    sys.stdout.write(comparison.format_comparison(found, sys.stdout))
    sys.stdout.flush()
    if options.json:
        with replacing(options.json) as file:
            file.write(json.dumps(found.to_json(), indent=2) + "\n")
    return 0 if found.same else 1


def _launched(options: Options, launch: LaunchInfo, known_size: int) -> int:
    """One of the ranks that somebody else started."""
    try:
        made = plan(read(Path(options.folder)))
        if options.backend is None:
            check_recorded(made.backend)
        options = replace(options, backend=options.backend or made.backend)
        made = without_tags(made, options.backend)
        W = len(made.traces)
        if known_size and known_size != W:
            raise ArgumentError(f"the trace has {W} ranks and the launcher has started {known_size}; start {W}")
        if launch.rank == 0:
            check_files(options)
    except CommError as error:
        return tell_in_turn(error, launch)
    limit_s, scratch = options.limit_s(made.longest_s), ""
    try:
        set_up(options, limit_s)
        rank = facade.get_rank()
        if facade.get_world_size() != W:
            raise ArgumentError(f"the trace has {W} ranks and there are {facade.get_world_size()} here; start {W}")
        name = [options.output or (tempfile.mkdtemp(prefix="comm-replay-") if rank == 0 else "")]
        facade.broadcast_object_list(name, src=0)
        folder = Path(name[0])
        scratch = "" if options.output else str(folder)
        play(one_after_another(made.traces)[rank], span_ns(made.traces)[0], options, folder, limit_s)
        found = _together(made, folder, rank, options)
        facade.barrier()
        facade.destroy_process_group()
    except (CommError, RuntimeError, OSError, MemoryError) as error:
        _remove(scratch)
        return fail(error)
    _remove(scratch)
    if rank:
        return 0 if found.same else 1
    return _told(found, options)


def _remove(scratch: str) -> None:
    if scratch:
        with suppress(OSError):
            shutil.rmtree(scratch)


def _together(made: Plan, folder: Path, rank: int, options: Options) -> Comparison:
    """Return the comparison, the same on all ranks but for waiting times, which rank 0 has where it sees all files."""
    mine = [load_rank(path_of(folder, rank))]
    begin, end = span_ns(mine)
    everyone: list[Any] = [None] * len(made.traces)
    facade.all_gather_object(everyone, [end - begin, [[*key, asdict(one)] for key, one in tally(mine).items()]])
    notes, wall_ns = list(made.notes), max(one[0] for one in everyone)
    replayed = together_with(_tallies(rows) for _, rows in everyone)
    if rank == 0:
        try:
            traces = read(folder)
            begin, end = span_ns(traces)
            replayed, wall_ns = tally(traces), end - begin
        except ArgumentError:
            notes.append("waiting and transfer of the replay need all ranks' files on the host of rank 0")
    return compare(made.traces, replayed, wall_ns, facade.get_backend(), options.keep_gaps, notes)


def _tallies(rows: Sequence[Sequence[Any]]) -> dict[tuple[str, int, tuple[int, ...]], Tally]:
    return {(operation, size, tuple(ranks)): Tally(**one) for operation, size, ranks, one in rows}
