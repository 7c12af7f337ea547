"""The comms logger of this process: what is recorded, and reading it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import comm_collectives
import comm_config
from comm_collectives import summary
from comm_orchestrator import orchestrator
from comm_utils import active
from comm_utils.comms_logger import CommsLogger
from comm_utils.errors import ArgumentTypeError

__all__ = [
    "begin",
    "configure",
    "get_comm_operation_count",
    "get_logged_comm_ops",
    "has_comm_data",
    "log_summary",
    "named",
    "reset_log",
]


class _Log:
    comms = CommsLogger()
    # Whether to record in the world to come; None where nobody said.
    to_come: bool | None = None


def named(settings: comm_config.Settings) -> bool:
    """Whether a configuration says anything about the comms logger."""
    return any(key.startswith("comms_logger.") and source != "default" for key, source in settings.sources.items())


def begin(settings: comm_config.Settings) -> None:
    """Record in the new world as its configuration says, or else as :func:`configure` was told before."""
    section, asked = settings.comms_logger, _Log.to_come
    _Log.to_come = None
    if named(settings) or asked is None:
        configure(None, section.enabled, section.prof_all, section.prof_ops, section.verbose, section.debug)
    else:
        configure(enabled=asked)


def configure(
    config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Iterable[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Turn the comms logger on or off and set what it records; None leaves a setting as it is.

    Before ``init_distributed`` it is for the world to come, unless that has a configuration with a ``comms_logger``.

    Args:
        config: a configuration whose ``comms_logger`` section is applied first; DeepSpeed's own configuration objects
            are understood.
        enabled: record from now on. Off, a call costs exactly what it costs without a logger.
        prof_all: record every operation; otherwise only those in ``prof_ops``, by operation or ``log_name``, and calls
            with ``prof=True``.
        verbose: log a line for each operation.
        debug: keep calls apart by the calling function.
    """
    log = _Log.comms
    if config is not None and orchestrator.names_comms_logger(config):
        section = orchestrator.load_config(config).comms_logger
        log.verbose, log.debug = section.verbose, section.debug
        log.prof_all, log.prof_ops = section.prof_all, frozenset(section.prof_ops)
        enabled = section.enabled if enabled is None else enabled
    if prof_all is not None:
        log.prof_all = prof_all
    if isinstance(prof_ops, str):
        raise ArgumentTypeError(f"configure: prof_ops: got {prof_ops!r}; expected a list of operations, [{prof_ops!r}]")
    if prof_ops is not None:
        log.prof_ops = frozenset(prof_ops)
    if verbose is not None:
        log.verbose = verbose
    if debug is not None:
        log.debug = debug
    if not active.is_active():
        _Log.to_come = _Log.to_come or False if enabled is None else enabled
    elif enabled is not None:
        comm_collectives.instrument(observe=log if enabled else None)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print the comms logger's table from rank 0: operation, size, calls, bytes, times, algbw and busbw.

    Args:
        show_straggler: add what every operation took beyond the rank that spent least time in it; all ranks call it
            then.
        return_dict: return this rank's numbers as well, in DeepSpeed's form: ``{"summary": {name: {size in bytes:
            {...}}}, "straggler_analysis": ..., "metadata": {...}}``.
    """
    return summary.log_summary(_Log.comms, show_straggler, return_dict)


def reset_log() -> None:
    """Forget what the comms logger recorded."""
    _Log.comms.reset()


def has_comm_data() -> bool:
    """Whether the comms logger has recorded anything."""
    return bool(_Log.comms.rows())


def get_comm_operation_count() -> int:
    """How many operations the comms logger has recorded."""
    return sum(row.calls for row in _Log.comms.rows())


def get_logged_comm_ops() -> list[str]:
    """The names under which the comms logger has recorded operations, sorted."""
    return sorted({row.name for row in _Log.comms.rows()})
