"""The program of each rank: set up the world and measure; rank 0 shows how far it is."""

from __future__ import annotations

import os
import sys

import torch

from comm_orchestrator import facade
from comm_orchestrator.tools.errors import let_others_speak, print_error
from comm_orchestrator.tools.local_ranks import FAILED
from comm_utils import kernels
from comm_utils.errors import BrokenGroupError, CommError, CommTimeoutError, PeerLostError
from comm_utils.sizes import format_size

__all__ = ["run"]

_TIMEOUT_S = 120.0


def run() -> int:
    """Measure; called by all ranks. The exit code: 0, 2 where there is no shared memory, or that of a failure."""
    rank = int(os.environ.get("RANK", "0"))
    shows = rank == 0 and sys.stderr.isatty()

    def show(operation: str, size_bytes: int) -> None:
        print(f"\r\x1b[K{operation} {format_size(size_bytes)}", end="", file=sys.stderr, flush=True)

    try:
        facade.init_distributed("ccl", verbose=False, timeout=_TIMEOUT_S)
        measured = kernels.tune_transfers(show if shows else None)
        ranks = facade.get_world_size()
        facade.destroy_process_group()
    except (CommError, RuntimeError, MemoryError) as error:
        if isinstance(error, (PeerLostError, BrokenGroupError, CommTimeoutError)):
            let_others_speak()
        print_error(str(error), rank=rank)
        return FAILED
    if shows:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if not measured and rank == 0:
        print_error(f"got {ranks} ranks that do not share memory; see commctl doctor")
    return 0 if measured else 2


if __name__ == "__main__":
    torch.set_num_threads(1)
    code = run()
    sys.stdout.flush()
    os._exit(code)
