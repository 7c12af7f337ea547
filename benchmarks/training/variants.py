"""The variants: what trains the model, and which library its ranks communicate through."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from peers.catalogue import DEEPSPEED, Peer

__all__ = ["COMPARISONS", "MEMORY", "OVERLAP", "RANKS", "SIZES", "Comparison", "Size"]

RANKS = 2

_variant = functools.partial(Peer, session="bench-training")
_OURS = ("comm_orchestrator", "comm_backend_ccl")


@dataclass(frozen=True)
class Size:
    """A transformer of ``layers`` of ``width``; ``steps``: of a round."""

    layers: int
    width: int
    steps: int


# By millions of parameters, about. The smallest is there to try the program.
SIZES = {0.1: Size(2, 64, 5), 1.0: Size(5, 128, 10), 20.0: Size(5, 576, 3), 100.0: Size(8, 1024, 1)}

OVERLAP = _variant("data-parallel hooks", "data_parallel", _OURS)
_SHARDED = {stage: _variant(f"sharded, stage {stage}", f"sharded_{stage}", _OURS) for stage in (1, 2, 3)}
_ZERO = {stage: _variant(f"DeepSpeed ZeRO {stage}", f"zero_{stage}", ("deepspeed",), DEEPSPEED) for stage in (1, 2, 3)}
_DDP = _variant("DDP", "ddp", _OURS)
_FSDP2 = _variant("FSDP2", "fsdp2", _OURS)


@dataclass(frozen=True)
class Comparison:
    """A step of ``ours`` takes at most ``most`` times as long as one of ``other``.

    ``tolerance``: of the mean loss of a round, relative. Sums in another order take a millionth of it.
    """

    name: str
    ours: Peer
    other: Peer
    most: float
    tolerance: float = 1e-4


# In the order of all tables.
COMPARISONS = {
    one.name: one
    for one in (
        Comparison("ddp", OVERLAP, _DDP, 1.0),
        Comparison("fsdp2", _SHARDED[3], _FSDP2, 1.0),
        # After some hundred steps, DeepSpeed's AdamW ends a percent lower than torch's alone.
        *(Comparison(f"zero{stage}", _SHARDED[stage], _ZERO[stage], 0.95, tolerance=5e-2) for stage in (1, 2, 3)),
    )
}

# Whose memory is measured, and the bytes for each parameter that a rank has whole, and that N ranks share: float32
# parameters and gradients, of 4 bytes each, and AdamW's state of 8.
MEMORY = (
    (OVERLAP, 16, 0),
    (_SHARDED[1], 8, 8),
    (_SHARDED[2], 4, 12),
    (_SHARDED[3], 0, 16),
)
