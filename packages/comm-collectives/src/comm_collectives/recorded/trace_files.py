"""Traces of this process: written to a file as operations end, or of the last operations, from memory."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter_ns

from comm_collectives.arguments import enter
from comm_collectives.objects.channel import Channel
from comm_collectives.objects.collective import all_gather_over
from comm_collectives.recorded.clocks import Clock, clock_name, measure
from comm_collectives.wrapping import bare_backend
from comm_utils.errors import ArgumentError
from comm_utils.host_identity import host_name
from comm_utils.log import logger
from comm_utils.observability.comms_logger import CommsLogger
from comm_utils.observability.traces.events import Event, RankTrace
from comm_utils.observability.traces.file import TraceWriter, remove_beyond

__all__ = ["begin_epoch", "end_trace", "everyones_clock", "recent_trace", "start_trace", "stop_trace", "unobserved"]


# Events of all ranks that one rank looks at; it takes seconds.
_MOST_TOGETHER = 1 << 18


@dataclass
class _Trace:
    """A trace that is being written."""

    started: Clock | None = None


_trace = _Trace()


def unobserved(call: str) -> Channel:
    """Return an exchange with all ranks below the wrapper, so that the log does not record itself."""
    enter(call, None)  # raises where the world's group has failed
    return Channel(call, bare_backend().during(call), None)


def start_trace(log: CommsLogger, folder: Path | str) -> Path:
    """Write every operation into ``folder`` from now on; called by all ranks.

    Returns:
        This rank's file; a new one, whatever was there.

    Raises:
        ArgumentError: a trace is being written already, or some rank cannot write there; on every rank.
    """
    channel = unobserved("start_trace")
    writer, failure = None, ""
    if log.writes:
        failure = "a trace is being written already; stop_trace() ends it"
    else:
        try:
            writer = TraceWriter(folder, channel.rank)
        except OSError as error:
            failure = f"{folder}: {error.strerror or error}"
    told = [failure, clock_name(), log.sequences.epoch, secrets.token_hex(8)]
    everyones = all_gather_over(channel, told, False)
    _raise(channel, [text for text, *_ in everyones], writer)
    assert writer is not None
    clock = everyones_clock(channel, [name for _, name, *_ in everyones])
    job = everyones[0][-1]
    try:
        writer.begin(replace(_described(channel, clock), job=job, counted_together=True))
        if channel.rank == 0:
            remove_beyond(folder, channel.W)
    except OSError as error:
        failure = f"{folder}: {error.strerror or error}"
    _raise(channel, all_gather_over(channel, failure, False), writer)
    _trace.started = clock
    # All ranks are here, so from here on they count alike, whatever each has recorded before.
    begin_epoch(log, max(epoch for _, _, epoch, _ in everyones) + 1)
    log.start_writing(writer)
    if channel.rank == 0:
        logger.info("tracing communication into %s", folder)
    return writer.path


def _raise(channel: Channel, failures: list[str], writer: TraceWriter | None) -> None:
    """Raise on all ranks if one of them failed."""
    failed = [rank for rank, text in enumerate(failures) if text]
    if failed:
        if writer is not None:
            writer.abandon()
        raise ArgumentError(f"{channel.call}: on rank {failed[0]}: {failures[failed[0]]}")


def begin_epoch(log: CommsLogger, epoch: int | None = None) -> None:
    """Let calls be counted anew; None for the next epoch."""
    log.sequences.begin_epoch(log.sequences.epoch + 1 if epoch is None else epoch)
    bare_backend().fast_paths.clear()  # which has counters


def stop_trace(log: CommsLogger) -> Path | None:
    """End the trace; called by all ranks, which compare their clocks once more.

    Returns:
        This rank's file; None where none was written.
    """
    writer, started = log.stop_writing(), _trace.started
    now = None
    try:
        channel = unobserved("stop_trace")
        now = everyones_clock(channel, all_gather_over(channel, clock_name(), False))
    finally:  # the file is whole even if others are lost
        if writer is not None and started is not None:
            known: dict[str, object] = {}
            if now is not None and now.at_ns > started.at_ns:
                known["drift"] = (now.offset_ns - started.offset_ns) / (now.at_ns - started.at_ns)
                known["uncertainty_ns"] = max(now.uncertainty_ns, started.uncertainty_ns)
            _close(writer, **known)
    return None if writer is None else writer.path


def end_trace(log: CommsLogger) -> None:
    """End the trace without asking anybody, as the process or its world ends."""
    writer = log.stop_writing()
    if writer is not None:
        _close(writer)


def _close(writer: TraceWriter, **known: object) -> None:
    try:
        writer.close(**known)
    except OSError as error:
        logger.warning("the trace %s is incomplete: %s", writer.path, error.strerror or error)
        writer.abandon()


def everyones_clock(channel: Channel, names: list[str]) -> Clock:
    """Return this rank's clock; called by all ranks.

    Args:
        names: every rank's :func:`clock_name`. Ranks with the name of rank 0 have its clock.
    """
    if len(set(names)) == 1:
        return Clock(channel.rank, at_ns=perf_counter_ns())
    measured = measure(channel.backend, channel.device)
    if names[channel.rank] == names[0]:
        return Clock(channel.rank, at_ns=perf_counter_ns())
    # Ranks of one clock take what is known best of it.
    shared = [one for one in measured if names[one.rank] == names[channel.rank]]
    return min(shared, key=lambda one: one.uncertainty_ns)


def _described(channel: Channel, clock: Clock) -> RankTrace:
    return RankTrace(
        rank=channel.rank,
        world_size=channel.W,
        host=host_name(),
        pid=os.getpid(),
        backend=channel.backend.get_backend(None),
        started=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        offset_ns=clock.offset_ns,
        offset_at_ns=clock.at_ns,
        uncertainty_ns=clock.uncertainty_ns,
    )


def recent_trace(log: CommsLogger, channel: Channel, clock: Clock) -> RankTrace:
    """Return the last operations of this rank; fewer where there are many ranks, as one of them looks at all."""
    trace = _described(channel, clock)
    operations, events = log.recent(max(_MOST_TOGETHER // channel.W, 256))
    trace.events = [Event(operations[number], sequence, begin, end, end) for number, sequence, begin, end in events]
    return trace
