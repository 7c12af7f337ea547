"""Messages of an algorithm, as counts that latency and bandwidth are multiplied by.

The model is Hockney's (The communication challenge for MPP, Parallel Computing 20(3), 1994): a message of n bytes takes
``alpha + n * beta``. *p* ranks are in the group, on *N* hosts with *M* each, in the order of the hosts. *S* is the size
as nccl-tests counts it. The arithmetic of reductions is part of beta.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["Rounds", "Shape", "distances", "flows", "folded", "together"]


@dataclass(frozen=True, order=True)
class Shape:
    """A group: how many ranks on how many hosts."""

    ranks: int
    nodes: int = 1

    @property
    def per_node(self) -> int:
        """Ranks of the fullest host."""
        return -(-self.ranks // self.nodes)

    @property
    def level(self) -> str:
        """``local`` for one rank, ``intra`` for ranks of one host, ``inter`` for several hosts."""
        if self.ranks == 1:
            return "local"
        return "intra" if self.nodes == 1 else "inter"


@dataclass(frozen=True)
class Rounds:
    """Messages that a rank sends one after another while the others do alike.

    Attributes:
        messages: how many: multiplied with alpha.
        share: bytes that the busiest rank sends or receives in them, in units of S: multiplied with S and beta.
        leaving: bytes that leave or enter the busiest host in them, in units of S; 0: all ranks of one host.
    """

    messages: float
    share: float
    leaving: float = 0.0


def flows(shape: Shape, distance: int) -> int:
    """Return how many ranks of a host have the partner at ``distance`` (rank xor distance) on another host, at most."""
    per_node = shape.per_node
    if shape.nodes == 1 or (distance < per_node and per_node % (2 * distance) == 0):
        return 0
    return min(2 * distance, per_node) if distance < per_node else per_node


def distances(ranks: int) -> Iterator[int]:
    """1, 2, 4 ... below ``ranks``: as many as the logarithm to base 2, rounded up."""
    distance = 1
    while distance < ranks:
        yield distance
        distance *= 2


def folded(shape: Shape) -> tuple[int, bool]:
    """The largest power of two up to the number of ranks, and whether ranks beyond it have to fold into others."""
    power = 1 << (shape.ranks.bit_length() - 1)
    return power, power != shape.ranks


def together(rounds: Iterable[Rounds]) -> tuple[Rounds, ...]:
    """Rounds within a host and rounds between hosts, each summed up."""
    rounds = [one for one in rounds if one.messages or one.share]
    within = [one for one in rounds if not one.leaving]
    between = [one for one in rounds if one.leaving]
    return tuple(
        Rounds(sum(one.messages for one in some), sum(one.share for one in some), sum(one.leaving for one in some))
        for some in (within, between)
        if some
    )
