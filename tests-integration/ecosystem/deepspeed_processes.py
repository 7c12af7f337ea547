"""Processes in which DeepSpeed is imported, each of them for the first time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["EXTENSIONS", "launcher", "run"]

EXTENSIONS = Path(sys.prefix) / "torch_extensions"
ENVIRONMENT = {
    **os.environ,
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
}


def launcher(ranks: int = 2) -> tuple[str, ...]:
    """Return what starts a program on so many ranks."""
    return "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)


def run(*command: str, timeout_s: float = 120, env: Mapping[str, str] | None = None) -> str:
    """Run Python with ``command``, and return what it printed."""
    child = subprocess.Popen(
        [sys.executable, *command],
        env={**ENVIRONMENT, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = child.communicate(timeout=timeout_s)
    finally:
        if child.returncode is None:
            kill_with_children(child)
    assert child.returncode == 0, stdout[-3000:] + stderr[-3000:]
    return stdout


def kill_with_children(child: subprocess.Popen[str]) -> None:
    # torchrun's workers have sessions of their own, and end when it does so in order.
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(40)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
