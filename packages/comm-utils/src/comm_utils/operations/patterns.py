"""The patterns of communication: who sends what to whom, bus factors and candidate algorithms.

Bus factors are those of nccl-tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). The sources
of the algorithms stand in :mod:`comm_utils.observability.cost_model.algorithms`.
"""

from __future__ import annotations

from comm_utils.operations.types import Algorithm, Content, Move, Pattern, Side

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_TO_ALL",
    "BARRIER",
    "BROADCAST",
    "GATHER",
    "RECV",
    "REDUCE",
    "REDUCE_SCATTER",
    "SCATTER",
    "SEND",
]


def _unscaled(world_size: int) -> float:
    return 1.0


def _others_share(world_size: int) -> float:
    return (world_size - 1) / world_size


def _twice_others_share(world_size: int) -> float:
    return 2 * (world_size - 1) / world_size


ALL_REDUCE = Pattern(
    "all_reduce",
    family="all_reduce",
    moves=(Move(Content.RECEIVERS_PART), Move(Content.SENDERS_PART)),  # a reduce-scatter and an all-gather
    bus_factor=_twice_others_share,
    reduces=True,
    algorithms=(
        Algorithm("ring", ("ring", "ring")),
        Algorithm("recursive doubling", ("doubling whole",)),
        Algorithm("Rabenseifner", ("Rabenseifner",)),
        Algorithm("direct", ("read all",)),
        Algorithm("direct in two steps", ("direct", "direct")),
        Algorithm("binomial tree", ("tree", "tree")),
    ),
)

REDUCE = Pattern(
    "reduce",
    family="reduce, gather",
    moves=(Move(Content.WHOLE, receivers=Side.ROOT),),
    bus_factor=_unscaled,
    reduces=True,
    algorithms=(
        Algorithm("binomial tree", ("tree",)),
        Algorithm("ring", ("ring", "ring")),
        Algorithm("Rabenseifner", ("halving parts", "tree of parts")),
        Algorithm("direct", ("whole at once",)),
        Algorithm("linear", ("whole in turn",)),
    ),
)

BROADCAST = Pattern(
    "broadcast",
    family="broadcast, scatter",
    moves=(Move(Content.WHOLE, senders=Side.ROOT),),
    bus_factor=_unscaled,
    algorithms=(
        Algorithm("binomial tree", ("tree",)),
        Algorithm("scatter and ring", ("tree of parts", "ring")),
        Algorithm("scatter and recursive doubling", ("tree of parts", "doubling parts")),
        Algorithm("direct", ("read root",)),
        Algorithm("linear", ("whole in turn",)),
    ),
)

ALL_GATHER = Pattern(
    "all_gather",
    family="all_gather",
    moves=(Move(Content.SENDERS_PART),),
    bus_factor=_others_share,
    whole_array=True,
    algorithms=(
        Algorithm("ring", ("ring",)),
        Algorithm("recursive doubling", ("doubling parts",)),
        Algorithm("direct", ("direct",)),
    ),
)

REDUCE_SCATTER = Pattern(
    "reduce_scatter",
    family="reduce_scatter",
    moves=(Move(Content.RECEIVERS_PART),),
    bus_factor=_others_share,
    whole_array=True,
    reduces=True,
    algorithms=(
        Algorithm("ring", ("ring",)),
        Algorithm("recursive halving", ("halving parts",)),
        Algorithm("direct", ("direct",)),
    ),
)

ALL_TO_ALL = Pattern(
    "all_to_all",
    family="all_to_all",
    moves=(Move(Content.SPLITS),),
    bus_factor=_others_share,
    uneven=True,
    algorithms=(
        Algorithm("pairwise exchange", ("pairwise",)),
        Algorithm("direct", ("direct",)),
        Algorithm("Bruck", ("Bruck",)),
    ),
)

_PARTS_OF_ROOT = (
    Algorithm("linear", ("parts in turn",)),
    Algorithm("direct", ("parts at once",)),
    Algorithm("binomial tree", ("tree of parts",)),
)

GATHER = Pattern(
    "gather",
    family="reduce, gather",
    moves=(Move(Content.SENDERS_PART, receivers=Side.ROOT),),
    bus_factor=_others_share,
    whole_array=True,
    algorithms=_PARTS_OF_ROOT,
)

SCATTER = Pattern(
    "scatter",
    family="broadcast, scatter",
    moves=(Move(Content.RECEIVERS_PART, senders=Side.ROOT),),
    bus_factor=_others_share,
    whole_array=True,
    algorithms=_PARTS_OF_ROOT,
)

BARRIER = Pattern(
    "barrier",
    family="barrier",
    moves=(Move(Content.NOTHING),),
    bus_factor=_unscaled,
    algorithms=(
        Algorithm("recursive doubling", ("doubling parts",), empty=True),  # dissemination
        Algorithm("linear", ("parts in turn", "parts in turn"), empty=True),
        Algorithm("direct", ("direct",), empty=True),
    ),
)

_MESSAGE = (Algorithm("direct", ("message",)),)

SEND = Pattern(
    "send",
    family="send, recv",
    moves=(Move(Content.WHOLE, senders=Side.CALLER, receivers=Side.PEER),),
    bus_factor=_unscaled,
    algorithms=_MESSAGE,
)

RECV = Pattern(
    "recv",
    family="send, recv",
    moves=(Move(Content.WHOLE, senders=Side.PEER, receivers=Side.CALLER),),
    bus_factor=_unscaled,
    algorithms=_MESSAGE,
)
