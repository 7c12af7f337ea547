"""Time over size in pieces, each with a latency and a bandwidth of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from comm_utils.observability.cost_model.rounds import Rounds

__all__ = ["Coefficients", "Piece", "between_us", "monotone_us", "within_us"]


@dataclass(frozen=True)
class Coefficients:
    """The cost of a message under one algorithm.

    Attributes:
        alpha_us: latency of a message, in microseconds.
        beta_us_per_byte: the inverse of the bandwidth.
    """

    algorithm: str
    alpha_us: float
    beta_us_per_byte: float


@dataclass(frozen=True)
class Piece:
    """The sizes from ``from_bytes`` to the next piece.

    Attributes:
        chosen: what fits best.
        alternatives: of other algorithms, those that fit as well as far as the measurements can tell.
        assumed: groups of one size only were measured, so that nothing tells the algorithms apart.
    """

    from_bytes: float
    chosen: Coefficients
    alternatives: tuple[Coefficients, ...] = ()
    assumed: bool = False


Cost = Callable[[Piece, float], float]


def monotone_us(pieces: Sequence[Piece], size_bytes: float, cost: Cost) -> float:
    """Return the time of ``size_bytes``, never less than that of a smaller size.

    Where a piece begins lower than the one before it ended, the result is the geometric mean of the greatest time of
    all sizes up to this one and the least of all sizes from this one on, both of which never fall.

    Args:
        cost: the time of a size by one piece, in microseconds; must not fall with the size.
    """
    index = max(i for i, piece in enumerate(pieces) if i == 0 or piece.from_bytes <= size_bytes)
    own = cost(pieces[index], size_bytes)
    before = [cost(pieces[i], pieces[i + 1].from_bytes) for i in range(index)]
    after = [cost(pieces[i], pieces[i].from_bytes) for i in range(index + 1, len(pieces))]
    return math.sqrt(max([own, *before]) * min([own, *after]))


def within_us(rounds: Rounds, found: Coefficients, size_bytes: float) -> float:
    """Return rounds between ranks of one host."""
    return rounds.messages * found.alpha_us + rounds.share * size_bytes * found.beta_us_per_byte


def between_us(rounds: Rounds, found: Coefficients, size_bytes: float) -> float:
    """Return rounds between hosts, whose bytes share the host's link."""
    return rounds.messages * found.alpha_us + rounds.leaving * size_bytes * found.beta_us_per_byte
