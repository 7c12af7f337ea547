"""The comms logger of this process: what is recorded, and reading it."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import comm_collectives
import comm_config
from comm_collectives import arguments
from comm_collectives.collective import INLINE, collective
from comm_collectives.keyword_errors import with_keyword_errors
from comm_collectives.recorded import summary, trace_files
from comm_collectives.recorded.backend import Recording
from comm_orchestrator import orchestrator, telemetry
from comm_utils import active
from comm_utils.errors import ArgumentTypeError
from comm_utils.given import shown
from comm_utils.host_identity import host_name
from comm_utils.observability import exports
from comm_utils.observability.comms_logger import CommsLogger, Row, Window

__all__ = [
    "begin",
    "begin_trace",
    "configure",
    "end",
    "export_log",
    "get_comm_operation_count",
    "get_logged_comm_ops",
    "has_comm_data",
    "log_rows",
    "log_summary",
    "log_window",
    "named_by_program",
    "reset_log",
    "start_profiling_comms",
    "start_profiling_op",
    "start_telemetry",
    "start_trace",
    "stop_profiling_comms",
    "stop_profiling_op",
    "stop_trace",
]


class _Log:
    comms = CommsLogger()
    recording = Recording(comms)
    # Whether to record in the world to come; None where nobody said.
    to_come: bool | None = None
    on = False
    # The logger was turned on by the trace, and goes off with it.
    on_for_trace = False
    # A trace that found the logger off records all operations; afterwards, ``prof_all`` is this again.
    prof_all_after_trace: bool | None = None


def _named(settings: comm_config.Settings) -> bool:
    """Return whether a configuration says anything about the comms logger."""
    return any(key.startswith("comms_logger.") and source != "default" for key, source in settings.sources.items())


def named_by_program(settings: comm_config.Settings) -> bool:
    """Return whether the program, and not the environment, says anything about the comms logger."""
    sources = [source for key, source in settings.sources.items() if key.startswith("comms_logger.")]
    return any(source != "default" and not source.startswith("environment variable") for source in sources)


def begin(settings: comm_config.Settings) -> None:
    """Record in the world as its configuration says, or else as :func:`configure` was called before."""
    section, asked = settings.comms_logger, _Log.to_come
    _Log.to_come = None
    if _named(settings) or asked is None:
        settings_of_log = section.prof_all, section.prof_ops, section.verbose, section.debug, section.ranges
        configure(None, section.enabled, *settings_of_log)
    else:
        configure(enabled=asked)


def begin_trace(settings: comm_config.Settings) -> None:
    """Write a trace of the new world if its configuration says so."""
    if settings.comms_logger.trace is not None:
        start_trace(settings.comms_logger.trace)


def end() -> None:
    """Close the trace at the end of the world."""
    trace_files.end_trace(_Log.comms)
    _Log.comms.forget_events()  # which are of ranks and groups that are no more
    _choose_as_before_trace()
    _Log.on, _Log.on_for_trace = False, False


def _choose_as_before_trace() -> None:
    _Log.comms.choose(prof_all=_Log.prof_all_after_trace)
    _Log.prof_all_after_trace = None


# A program may end without ending its world.
atexit.register(trace_files.end_trace, _Log.comms)


@collective(compiled=INLINE, labels=False)
def configure(
    config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Iterable[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
    ranges: bool | None = None,
) -> None:
    """Turn the comms logger on or off and set what it records; None leaves a setting as it is.

    Before ``init_distributed`` it is for the world to come, unless that has a configuration with a ``comms_logger``.

    Args:
        prof_ops: the names of the operations to record, where ``prof_all`` is off.
        config: a configuration whose ``comms_logger`` section is applied first; DeepSpeed's own configuration objects
            are understood.
        enabled: record from now on. Off, a call costs exactly what it costs without a logger.
        prof_all: record every operation; otherwise only those in ``prof_ops``, by ``log_name`` where a call has one and
            else by operation, and calls with ``prof=True``.
        verbose: log a line for each operation.
        debug: keep calls apart by the calling function.
        ranges: put a range around every operation for ``torch.profiler`` while it runs, and for tools that read NVTX.
    """
    switches = {"enabled": enabled, "prof_all": prof_all, "verbose": verbose, "debug": debug, "ranges": ranges}
    for name, value in switches.items():
        if value is not None and not (isinstance(value, int) and value in (0, 1)):
            raise ArgumentTypeError(f"configure: {name}: got {shown(value)}; expected True or False, or None")
    log = _Log.comms
    traces_all = _Log.prof_all_after_trace is not None
    if config is not None and orchestrator.names_comms_logger(config):
        section = orchestrator.load_config(config).comms_logger
        at_once = None if traces_all else section.prof_all
        log.choose(section.verbose, at_once, section.prof_ops, section.debug, section.ranges)
        enabled = section.enabled if enabled is None else enabled
        prof_all = section.prof_all if prof_all is None else prof_all
    if isinstance(prof_ops, str):
        raise ArgumentTypeError(f"configure: prof_ops: got {prof_ops!r}; expected a list of operations, [{prof_ops!r}]")
    if not (prof_ops is None or isinstance(prof_ops, Iterable)):
        raise ArgumentTypeError(f"configure: prof_ops: got {shown(prof_ops)}; expected a list of operations, or None")
    log.choose(verbose, None if traces_all else prof_all, prof_ops, debug, ranges)
    if traces_all and prof_all is not None:
        _Log.prof_all_after_trace = prof_all
    if not active.is_active():
        _Log.to_come = _Log.to_come or False if enabled is None else enabled
    elif enabled is not None:
        _turn(enabled)


def _turn(on: bool, with_others: bool = False) -> None:
    """``with_others``: the ranks have just begun to count together."""
    begins = on and not _Log.on and not with_others
    _Log.on, _Log.on_for_trace = on, False
    others = [one for one in comm_collectives.instrumented() if one is not _Log.recording]
    comm_collectives.instrument(*others, *([_Log.recording] if on else []))
    if begins:
        trace_files.begin_epoch(_Log.comms)


def start_profiling_comms() -> None:
    """Record all operations from now on: ``configure(enabled=True, prof_all=True)``."""
    configure(enabled=True, prof_all=True)


def stop_profiling_comms() -> None:
    """Record nothing from now on; what was recorded stays: ``configure(enabled=False)``."""
    configure(enabled=False)


def start_profiling_op(op_name_list: Iterable[str]) -> None:
    """Record these operations too, where not all are: the names of calls, or their ``log_name``.

    Args:
        op_name_list: names of operations, or of calls by their ``log_name``.

    Raises:
        ArgumentTypeError: it is no list of names.
    """
    configure(prof_ops=_Log.comms.prof_ops | _names("start_profiling_op", op_name_list))


def stop_profiling_op(op_name_list: Iterable[str]) -> None:
    """Record these operations no more, where not all are.

    Args:
        op_name_list: names of operations, or of calls by their ``log_name``.

    Raises:
        ArgumentTypeError: it is no list of names.
    """
    configure(prof_ops=_Log.comms.prof_ops - _names("stop_profiling_op", op_name_list))


def _names(call: str, names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise ArgumentTypeError(f"{call}: op_name_list: got {names!r}; expected a list of operations, [{names!r}]")
    if not isinstance(names, Iterable):
        raise ArgumentTypeError(f"{call}: op_name_list: got {shown(names)}; expected a list of operations")
    return frozenset(names)


@with_keyword_errors
def start_trace(folder: Path | str) -> Path:
    """Write each operation into a file of this rank in ``folder`` as it ends; called by all ranks.

    The comms logger is turned on for all operations if it is off, until :func:`stop_trace`; if it is on, the trace has
    what it records. The trace ends with the world, too.

    Args:
        folder: made where it does not exist; the files of an earlier trace in it are replaced.

    Returns:
        The file of this rank, ``rank<N>.jsonl``; its format: :mod:`comm_utils.observability.traces.file`.

    Raises:
        ArgumentError: a trace is being written already, or some rank cannot write there; on every rank.
        NotInitializedError: nothing is initialised.
    """
    log = _Log.comms
    if _Log.on:
        return trace_files.start_trace(log, folder)
    path = trace_files.start_trace(log, folder)
    before = log.prof_all
    log.choose(prof_all=True)
    _turn(True, with_others=True)
    _Log.on_for_trace, _Log.prof_all_after_trace = True, before
    return path


def stop_trace() -> Path | None:
    """End the trace; called by all ranks.

    Returns:
        The file of this rank; None where no trace was being written.

    Raises:
        PeerLostError, CommTimeoutError: not every rank called it; the file of this rank is whole all the same.
    """
    try:
        return trace_files.stop_trace(_Log.comms)
    finally:
        _choose_as_before_trace()
        if _Log.on_for_trace:
            _turn(False)


def log_rows() -> list[Row]:
    """Return this rank's records since the start or :func:`reset_log`: a row for each operation, size and group."""
    return _Log.comms.rows()


@with_keyword_errors
def log_window(name: str = "") -> Window:
    """Return a record of a part of the program, such as a step or an epoch.

    ``with log_window("epoch 1") as window: ...`` and then ``window.rows()``, ``window.total_s``, ``window.elapsed_s``.

    Args:
        name: to tell windows apart.
    """
    return _Log.comms.window(name)


@with_keyword_errors
def export_log(path: Path | str, format: str | None = None) -> None:
    """Write this rank's rows into a file, which is there as a whole or not at all.

    Args:
        path: ``.jsonl``, ``.csv``, or ``.prom`` for Prometheus; give each rank a file of its own.
        format: one of these endings, where the file has another.

    Raises:
        ArgumentError: another ending, a folder that does not exist, or a folder instead of a file.
        NotInitializedError: nothing is initialised.
    """
    facts = {"rank": arguments.active("export_log").get_rank(None), "host": host_name()}
    exports.export(path, _Log.comms.rows(), format, **facts, time=time.time())


@with_keyword_errors
def start_telemetry(meter_provider: Any = None) -> Callable[[], None]:
    """Report what the comms logger records through OpenTelemetry, whenever its SDK collects; nothing for each call.

    Args:
        meter_provider: of ``opentelemetry.metrics``; the global one by default.

    Returns:
        What ends it.

    Raises:
        BackendUnavailableError: OpenTelemetry is missing (extra ``[otel]``).
    """
    return telemetry.start_telemetry(_Log.comms, meter_provider)


@with_keyword_errors
def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print the comms logger's table from rank 0: operation, size, calls, bytes, times, algbw and busbw.

    Args:
        show_straggler: also how the time of all ranks divides into waiting for others and transfer, and who was waited
            for; of the last operations of each rank, at most 16,384 and fewer in a world of more than 16 ranks. All
            ranks call it then.
        return_dict: return this rank's numbers as well.

    Returns:
        With ``return_dict``, the numbers in DeepSpeed's form: ``{"summary": {name: {size in bytes: {...}}},
        "straggler_analysis": ..., "metadata": {...}}``; otherwise None.
    """
    return summary.log_summary(_Log.comms, show_straggler, return_dict)


def reset_log() -> None:
    """Forget what the comms logger recorded."""
    _Log.comms.reset()


def has_comm_data() -> bool:
    """Return whether the comms logger has recorded anything."""
    return bool(_Log.comms.rows())


def get_comm_operation_count() -> int:
    """Return how many operations the comms logger has recorded."""
    return sum(row.calls for row in _Log.comms.rows())


def get_logged_comm_ops() -> list[str]:
    """Return the names under which the comms logger has recorded operations, as in :func:`log_summary`, sorted."""
    return sorted({summary.logged_name(row.name, row.caller) for row in _Log.comms.rows()})
