"""Ranks of this host, started by torch's elastic agent; none of them outlives the process that started them."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from uuid import uuid4

import psutil

from comm_utils.errors import ArgumentError
from comm_utils.sizes import format_size

__all__ = ["FAILED", "memory_for_data_bytes", "run"]

#: Exit code of a rank that failed and has said why; 1 is for findings, 2 for wrong usage.
FAILED = 3
# What a process that has imported torch for CPUs has to itself; the pages of libraries are shared with other ranks.
_RANK_BYTES = 160 << 20
# A rank that does not end on SIGTERM is killed after as many seconds.
_SHUTDOWN_S = "1"
# What a rank does before it imports anything of ours, which takes seconds: it ends at once on a signal, without
# a traceback, and has the kernel kill it (PR_SET_PDEATHSIG) when the process that started it is gone.
_START = f"""
import ctypes, os, runpy, signal, sys
_, parent, *sys.argv = sys.argv
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
try:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
except (AttributeError, OSError):
    pass  # not Linux
if os.getppid() != int(parent):
    os._exit({FAILED})
sys.path[:] = [path for path in sys.path if path]  # the folder that we are in holds no modules of ours
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def memory_for_data_bytes(ranks: int) -> int | None:
    """Return the free memory of this host that so many more ranks leave for data; None where it is not known.

    Raises:
        ArgumentError: the ranks do not fit, even without data.
    """
    try:
        free = int(psutil.virtual_memory().available)
    except OSError:  # as without /proc
        return None
    if ranks * _RANK_BYTES > free:
        raise ArgumentError(
            f"{ranks} ranks take at least {format_size(ranks * _RANK_BYTES)} of memory and {format_size(free)} are "
            f"free on this host; start {free // _RANK_BYTES} at most, or use a launcher and more hosts"
        )
    return free - ranks * _RANK_BYTES


def run(module: str, arguments: Sequence[str], ranks: int) -> int:
    """Run ``python -m module`` with ``arguments`` on so many ranks, to their end.

    Returns:
        The exit code of the first rank that ended with another one than 0; :data:`FAILED`, with a line on stderr, where
        that was killed or is none of ours; 128 + signal if a signal ended this process.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.05,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    variables = {}
    if "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = "1"  # as torchrun does where there are several ranks
    with _environment(variables), _quiet():
        try:
            elastic_launch(config, sys.executable)("-c", _START, os.getpid(), module, *arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode in (1, 2, FAILED):
                return failure.exitcode
            _show_cursor()
            how = f"exit code {failure.exitcode}"
            if failure.exitcode < 0:
                how = f"signal {signal.Signals(-failure.exitcode).name}"
            print(f"error: rank {rank} (pid {failure.pid}) ended with {how}; all others were ended", file=sys.stderr)
            return FAILED
        except SignalException as stopped:
            _show_cursor()
            if stopped.sigval == signal.SIGINT:
                print("interrupted", file=sys.stderr)
            return 128 + int(stopped.sigval)
    return 0


def _show_cursor() -> None:
    """Clear the line and show the cursor after a rank that was ended while it drew a progress bar."""
    if sys.stderr.isatty():
        print("\r\x1b[K\x1b[?25h", end="", file=sys.stderr, flush=True)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    # Read where a torch knows it; others wait for half a minute.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_S)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the agent's own account of a failure, which comes in a dozen lines to what the rank has said."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
