"""Traces of this process: written to a file as operations end, or of the last operations, from memory."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter_ns

from comm_collectives.arguments import enter
from comm_collectives.clocks import Clock, clock_name, measure
from comm_collectives.instrumentation import bare_backend
from comm_collectives.objects.channel import Channel
from comm_collectives.objects.collective import all_gather_over
from comm_utils.comms_logger import CommsLogger
from comm_utils.errors import ArgumentError
from comm_utils.log import logger
from comm_utils.traces.events import Event, RankTrace
from comm_utils.traces.file import TraceWriter, remove_beyond

__all__ = ["end_trace", "everyones_clock", "recent_trace", "start_trace", "stop_trace", "unobserved"]


@dataclass
class _Trace:
    """What is being written."""

    started: Clock | None = None


_trace = _Trace()


def unobserved(call: str) -> Channel:
    """A way to all ranks below the wrapper, so that the log is in no log."""
    enter(call, None)  # raises where the world's group has failed
    return Channel(call, bare_backend().during(call), None)


def start_trace(log: CommsLogger, folder: Path | str) -> Path:
    """Write every operation into ``folder`` from now on; called by all ranks.

    Returns:
        This rank's file; a new one, whatever was there.

    Raises:
        ArgumentError: a trace is being written already, or some rank cannot write there; on every rank.
    """
    call = "start_trace"
    channel = unobserved(call)
    writer, failure = None, ""
    if log.writes:
        failure = "a trace is being written already; stop_trace() ends it"
    else:
        try:
            writer = TraceWriter(folder, channel.rank)
            if channel.rank == 0:
                remove_beyond(folder, channel.W)
        except OSError as error:
            failure = f"{folder}: {error.strerror or error}"
    highest = log.highest_sequence()
    everyones = all_gather_over(channel, [failure, clock_name(), highest], False)
    failed = [rank for rank, (text, *_) in enumerate(everyones) if text]
    if failed or writer is None:
        if writer is not None:
            writer.abandon()
            writer.path.unlink(missing_ok=True)
        raise ArgumentError(f"{call}: on rank {failed[0]}: {everyones[failed[0]][0]}")
    clock = everyones_clock(channel, [name for _, name, _ in everyones])
    writer.begin(_described(channel, clock))
    _trace.started = clock
    # All ranks are here, so from here on they count alike, whatever each has recorded before.
    log.count_from(max(sequence for *_, sequence in everyones) + 1)
    channel.backend.prepared.clear()
    log.start_writing(writer)
    if channel.rank == 0:
        logger.info("tracing communication into %s", folder)
    return writer.path


def stop_trace(log: CommsLogger) -> Path | None:
    """End the trace; called by all ranks, which compare their clocks once more.

    Returns:
        This rank's file; None where none was written.
    """
    call = "stop_trace"
    channel = unobserved(call)
    writer, started = log.stop_writing(), _trace.started
    now = everyones_clock(channel, all_gather_over(channel, clock_name(), False))
    if writer is None or started is None:
        return None
    passed_ns = now.at_ns - started.at_ns
    drift = (now.offset_ns - started.offset_ns) / passed_ns if passed_ns > 0 else 0.0
    _close(writer, drift=drift, uncertainty_ns=max(now.uncertainty_ns, started.uncertainty_ns))
    return writer.path


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
    """This rank's clock; called by all ranks.

    Args:
        names: every rank's :func:`clock_name`. Where all are the same there is nothing to measure.
    """
    firsts = {name: rank for rank, name in reversed(list(enumerate(names)))}
    others = sorted(set(firsts.values()) - {0})
    if not others:
        return Clock(channel.rank, at_ns=perf_counter_ns())
    measured = measure(channel.backend, others, channel.device)
    told = [(one.rank, one.offset_ns, one.uncertainty_ns, one.at_ns) for one in measured]
    clocks = {rank: Clock(rank, *rest) for rank, *rest in all_gather_over(channel, told, False)[0]}
    return clocks.get(firsts[names[channel.rank]], Clock(0, at_ns=perf_counter_ns()))


def _described(channel: Channel, clock: Clock) -> RankTrace:
    return RankTrace(
        rank=channel.rank,
        world_size=channel.W,
        host=socket.gethostname(),
        pid=os.getpid(),
        backend=channel.backend.get_backend(None),
        started=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        offset_ns=clock.offset_ns,
        offset_at_ns=clock.at_ns,
        uncertainty_ns=clock.uncertainty_ns,
    )


def recent_trace(log: CommsLogger, channel: Channel, clock: Clock) -> RankTrace:
    """The last operations of this rank."""
    trace = _described(channel, clock)
    operations, events = log.recent()
    trace.events = [Event(operations[number], sequence, begin, end, end) for number, sequence, begin, end in events]
    return trace
