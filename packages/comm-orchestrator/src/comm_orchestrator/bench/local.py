"""Ranks of this host, started by torch's elastic agent."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from uuid import uuid4

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from comm_orchestrator.bench.options import Options

__all__ = ["start"]

# What a rank does before it imports anything, which takes a while: it ends when it is told to, and when the process
# that started it is gone, however that ended. The folder that we are in holds no modules of ours.
_RANK = """
import ctypes, os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
try:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, of Linux
except (AttributeError, OSError):
    pass
if os.getppid() != int(sys.argv[1]):
    os._exit(3)
sys.path[:] = [path for path in sys.path if path]
from comm_orchestrator.bench.rank import main
main(sys.argv[2])
"""
# The exit codes of a rank that has said all there is to say: findings, wrong usage, and a failure.
_TOLD = (1, 2, 3)
# A rank that does not end when it is told to is killed after as many seconds.
_SHUTDOWN_S = "1"


def start(options: Options, ranks: int) -> int:
    """Run ``ranks`` ranks to their end; the exit code. None of them outlives the call, nor the process."""
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
    # As torchrun does where there are several ranks.
    variables = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    with _environment(variables), _quiet():
        try:
            elastic_launch(config, sys.executable)("-c", _RANK, os.getpid(), options.dumps())
        except ChildFailedError as error:
            return _of(error)
        except SignalException as stopped:
            _show_cursor()
            return 128 + int(stopped.sigval)
    return 0


def _of(error: ChildFailedError) -> int:
    rank, failure = error.get_first_failure()
    if failure.exitcode in _TOLD:
        return 2 if failure.exitcode == 2 else 1
    how = f"exit code {failure.exitcode}"
    if failure.exitcode < 0:
        how = f"signal {signal.Signals(-failure.exitcode).name}"
    _show_cursor()
    print(f"error: rank {rank} (pid {failure.pid}) ended with {how}; all others were ended", file=sys.stderr)
    return 1


def _show_cursor() -> None:
    """A rank that was ended while it drew a progress bar could not."""
    if sys.stderr.isatty():
        print("\x1b[?25h", end="", file=sys.stderr, flush=True)


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
