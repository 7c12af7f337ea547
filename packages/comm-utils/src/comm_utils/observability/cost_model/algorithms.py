"""Textbook costs of the candidate algorithms in the table of operations.

Sources, cited in the functions by their numbers:

1. Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA 19(1), 2005.
2. Chan, Heimlich, Purkayastha, van de Geijn: Collective communication: theory, practice, and experience, Concurrency
   and Computation: Practice and Experience 19(13), 2007.
3. Rabenseifner: Optimization of Collective Reduction Operations, ICCS 2004.
4. Bruck, Ho, Kipnis, Upfal, Weathersby: Efficient algorithms for all-to-all communications in multiport message-passing
   systems, IEEE TPDS 8(11), 1997.
5. Hensgen, Finkel, Manber: Two algorithms for barrier synchronization, IJPP 17(1), 1988.
6. Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 69(2), 2009.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from comm_utils import operations
from comm_utils.observability.cost_model.rounds import Rounds, Shape, distances, flows, folded, together

__all__ = ["PHASES", "candidates", "rounds_of"]

Cost = Callable[[Shape], list[Rounds]]


def _uniform(messages: float, share: float, leaving: float) -> list[Rounds]:
    return [Rounds(messages, share, leaving)]


def _ring(shape: Shape) -> list[Rounds]:
    """p-1 steps around the ring with S/p bytes each; one flow leaves a host (1, 4.1 and 4.4; 6)."""
    steps = shape.ranks - 1
    return _uniform(steps, steps / shape.ranks, steps / shape.ranks if shape.nodes > 1 else 0)


def _direct(shape: Shape) -> list[Rounds]:
    """Every rank exchanges S/p bytes with every other, all at once (2, 'one-shot')."""
    p, m = shape.ranks, shape.per_node
    if shape.nodes == 1:
        return _uniform(1, (p - 1) / p, 0)
    return [Rounds(1, (p - m) / p, m * (p - m) / p), Rounds(0, (m - 1) / p)]


def _everybody_reads_everything(shape: Shape) -> list[Rounds]:
    """One step in which every rank gets the whole tensor of every other."""
    p, m = shape.ranks, shape.per_node
    if shape.nodes == 1:
        return _uniform(1, p - 1, 0)
    return [Rounds(1, p - m, m * (p - m)), Rounds(0, m - 1)]


def _pairwise(shape: Shape) -> list[Rounds]:
    """p-1 steps, in the k-th of which every rank sends S/p bytes to the rank k further on (1, 4.3)."""
    p, m = shape.ranks, shape.per_node
    # min(k, M, p-k) ranks of a host have their k-th partner elsewhere; their sum over all k:
    return _uniform(p - 1, (p - 1) / p, m * (p - m) / p if shape.nodes > 1 else 0)


def _doubling_whole(shape: Shape) -> list[Rounds]:
    """Recursive doubling: log2(p) exchanges of the whole tensor; two more where p is no power of two (1, 4.5)."""
    power, extra = folded(shape)
    rounds = [Rounds(1, 1, flows(shape, distance)) for distance in distances(power)]
    return [*rounds, *_fold(shape)] if extra else rounds


def _fold(shape: Shape) -> list[Rounds]:
    return [Rounds(1, 1, min(1, flows(shape, 1))) for _ in range(2)]


def _rabenseifner(shape: Shape) -> list[Rounds]:
    """Reduce-scatter by recursive halving and all-gather by recursive doubling (1, 4.5; 3)."""
    power, extra = folded(shape)
    rounds = [Rounds(1, 1 / (2 * d), flows(shape, d) / (2 * d)) for d in distances(power)] * 2
    return [*rounds, *_fold(shape)] if extra else rounds


def _doubling_parts(shape: Shape) -> list[Rounds]:
    """All-gather by recursive doubling, or Bruck's where p is no power of two: ceil(log2(p)) steps (1, 4.1; 4)."""
    shares = [(d, min(d, shape.ranks - d) / shape.ranks) for d in distances(shape.ranks)]
    return [Rounds(1, share, share * flows(shape, d)) for d, share in shares]


def _halving_parts(shape: Shape) -> list[Rounds]:
    """Reduce-scatter by recursive halving, with a fold where p is no power of two (1, 4.4)."""
    power, extra = folded(shape)
    rounds = [Rounds(1, d / power, flows(shape, d) * d / power) for d in distances(power)]
    apart = min(1, flows(shape, 1))
    return [*rounds, Rounds(1, 1, apart), Rounds(1, 1 / shape.ranks, apart / shape.ranks)] if extra else rounds


def _bruck(shape: Shape) -> list[Rounds]:
    """All-to-all in ceil(log2(p)) steps, each of which sends the blocks with one bit of their number set (4)."""
    rounds = []
    for distance in distances(shape.ranks):
        share = sum(1 for block in range(shape.ranks) if block & distance) / shape.ranks
        away = min(distance, shape.per_node, shape.ranks - distance) if shape.nodes > 1 else 0
        rounds.append(Rounds(1, share, share * away))
    return rounds


def _tree(shape: Shape) -> list[Rounds]:
    """A binomial tree of messages of the whole tensor: ceil(log2(p)) steps (1, 4.2; 2)."""
    return [Rounds(1, 1, min(1, flows(shape, distance))) for distance in distances(shape.ranks)]


def _tree_parts(shape: Shape) -> list[Rounds]:
    """A binomial tree whose messages hold the parts of a whole sub-tree (2, scatter and gather)."""
    shares = [(d, min(d, shape.ranks - d) / shape.ranks) for d in distances(shape.ranks)]
    return [Rounds(1, share, share * min(1, flows(shape, d))) for d, share in shares]


def _linear(share: Callable[[Shape], float], at_once: bool = False) -> Cost:
    """The root exchanges ``share`` of S with each other rank: one after another, or with all at once."""

    def cost(shape: Shape) -> list[Rounds]:
        p, m, part = shape.ranks, shape.per_node, share(shape)
        within, away = (m - 1 if shape.nodes > 1 else p - 1), (p - m if shape.nodes > 1 else 0)
        if at_once:
            first = [Rounds(1, away * part, away * part)] if away else []
            return [*first, Rounds(0 if away else 1, within * part)]
        return [Rounds(within, within * part), *([Rounds(away, away * part, away * part)] if away else [])]

    return cost


def _read_root(shape: Shape) -> list[Rounds]:
    """Every rank reads the root's tensor at the same time."""
    return _uniform(1, 1, shape.ranks - shape.per_node if shape.nodes > 1 else 0)


def _whole(shape: Shape) -> float:
    return 1.0


def _part(shape: Shape) -> float:
    return 1 / shape.ranks


def _message(shape: Shape) -> list[Rounds]:
    return _uniform(1, 1, 1 if shape.nodes > 1 else 0)


#: Phases of which :class:`comm_utils.operations.Algorithm` is composed.
PHASES: dict[str, Cost] = {
    "ring": _ring,
    "pairwise": _pairwise,
    "direct": _direct,
    "Bruck": _bruck,
    "doubling whole": _doubling_whole,
    "doubling parts": _doubling_parts,
    "halving parts": _halving_parts,
    "Rabenseifner": _rabenseifner,
    "tree": _tree,
    "tree of parts": _tree_parts,
    "read all": _everybody_reads_everything,
    "read root": _read_root,
    "whole in turn": _linear(_whole),
    "whole at once": _linear(_whole, at_once=True),
    "parts in turn": _linear(_part),
    "parts at once": _linear(_part, at_once=True),
    "message": _message,
}

_LOCAL = "local"


def candidates(operation: str, level: str) -> tuple[str, ...]:
    """Return the names of the algorithms of ``operation``, the assumed one first.

    Raises:
        UnknownOperationError: no row has the name.
    """
    return (_LOCAL,) if level == _LOCAL else tuple(one.name for one in operations.get(operation).pattern.algorithms)


def rounds_of(operation: str, algorithm: str, shape: Shape) -> tuple[Rounds, ...]:
    """Return what ``algorithm`` sends in a group of ``shape``: within hosts and between hosts, each summed up.

    Raises:
        KeyError: there is no such operation or algorithm.
    """
    pattern = operations.get(operation).pattern
    if algorithm == _LOCAL or shape.ranks == 1:
        # One rank: what the call itself costs, and what it copies.
        return (Rounds(1, 0 if pattern.is_empty else 1),)
    for one in pattern.algorithms:
        if one.name == algorithm:
            return _rounds(one, shape)
    raise KeyError(algorithm)


@lru_cache(maxsize=4096)
def _rounds(chosen: operations.Algorithm, shape: Shape) -> tuple[Rounds, ...]:
    rounds = [one for phase in chosen.phases for one in PHASES[phase](shape)]
    if chosen.empty:  # the same messages without content; those that leave the host do so still
        rounds = [Rounds(one.messages, 0, one.leaving) for one in rounds]
    return together(rounds)
