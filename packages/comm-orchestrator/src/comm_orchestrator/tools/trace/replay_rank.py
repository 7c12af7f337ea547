"""The program of each rank of a replay."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from comm_orchestrator import facade
from comm_orchestrator.tools.errors import let_others_speak, print_error
from comm_orchestrator.tools.local_ranks import FAILED
from comm_orchestrator.tools.trace.replay_options import Options
from comm_orchestrator.tools.trace.replay_player import Player
from comm_utils.errors import ArgumentError, BrokenGroupError, CommError, CommTimeoutError, PeerLostError
from comm_utils.observability.traces.file import load_rank, path_of

if TYPE_CHECKING:
    from comm_utils.observability.traces import RankTrace

__all__ = ["fail", "main", "play", "set_up"]

# Ranks may start as far apart, however short the operations' time limit is.
_MEETING_S = 60.0
# Settings of how calls are made and recorded, which a replay takes from nowhere: the recording says how.
_OF_CALLS = (
    "COMM_CHECKS",
    "COMM_COMMS_LOGGER",
    "COMM_COMMUNICATION_DATA_TYPE",
    "COMM_COMPRESS_COMMUNICATION",
    "COMM_HIERARCHICAL",
    "COMM_REDUCTIONS",
)


def set_up(options: Options, limit_s: float) -> None:
    """Set up the world; how its calls are made and recorded is this replay's to say, not the environment's."""
    for name in [name for name in os.environ if name.startswith(_OF_CALLS)]:
        del os.environ[name]
    limits = {"timeouts": {"init_s": max(limit_s, _MEETING_S)}}
    facade.init_distributed(options.backend or None, verbose=False, timeout=limit_s, config=limits)


def play(trace: RankTrace, begin_ns: int, options: Options, folder: Path, limit_s: float) -> None:
    """Replay this rank's part and record it in ``folder``; called by all ranks, which are set up.

    Raises:
        CommError: a call failed.
    """
    if facade.get_world_size() != trace.world_size:
        raise ArgumentError(f"the trace has {trace.world_size} ranks and there are {facade.get_world_size()} here")
    player = Player(trace, begin_ns, options.keep_gaps, limit_s)
    facade.barrier()
    facade.start_trace(folder)
    player.play()
    facade.stop_trace()


def fail(error: Exception) -> int:
    """Say in one line why this rank failed, and end: a library may hang at an orderly end."""
    rank = facade.get_rank() if facade.is_initialized() else int(os.environ.get("RANK", "0"))
    consequence = isinstance(error, (PeerLostError, BrokenGroupError)) or "onnection" in str(error)
    if consequence or (rank and isinstance(error, CommTimeoutError)):
        let_others_speak()
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    print_error(text, rank=rank)
    os._exit(2 if isinstance(error, ArgumentError) else FAILED)


def main(text: str) -> None:
    """Of ranks that :mod:`.replay` started."""
    options = Options.loads(text)
    try:
        trace = load_rank(path_of(options.planned, int(os.environ["RANK"])))
        set_up(options, options.timeout_s)
        play(trace, options.begin_ns, options, Path(options.output), options.timeout_s)
        facade.destroy_process_group()
    except (CommError, RuntimeError, OSError, MemoryError) as error:
        fail(error)


if __name__ == "__main__":
    main(sys.argv[1])
