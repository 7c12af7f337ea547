"""Tests over several ranks: real processes, a deadline, and nothing left behind.

Importing this needs the standard library only. A *rank* is one process of a run; a *target* is what it executes:
a function at the top level of a module (test modules included), a string ``"package.module:function"``, or the
path of a script.
"""

from comm_utils.testing.devices import sharing_device
from comm_utils.testing.fork_server import preload
from comm_utils.testing.machine import allow_interrupts, patience
from comm_utils.testing.outcome import RankFailure, RankOutcome
from comm_utils.testing.payload import per_rank
from comm_utils.testing.pool import RankPool
from comm_utils.testing.ranks import run_ranks, run_ranks_outcomes

__all__ = [
    "RankFailure",
    "RankOutcome",
    "RankPool",
    "allow_interrupts",
    "patience",
    "per_rank",
    "preload",
    "run_ranks",
    "run_ranks_outcomes",
    "sharing_device",
]
