"""The same operation over a network on which it was not measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from comm_utils.observability.cost_model.algorithms import rounds_of
from comm_utils.observability.cost_model.curve import Coefficients, Piece, monotone_us, within_us
from comm_utils.observability.cost_model.link import Link
from comm_utils.observability.cost_model.pieces import term_of
from comm_utils.observability.cost_model.rounds import Rounds, Shape

__all__ = ["over_link_us", "over_other_link_us"]

Choose = Callable[[Piece], Coefficients]
# A fit whose bandwidth is within so much of the link's is limited by the link: headers cost some.
_LINK_BOUND = 1.25


def over_link_us(
    pieces: Sequence[Piece], operation: str, shape: Shape, size_bytes: float, network: Link, choose: Choose
) -> float:
    """Return the time of an operation over hosts, in µs, from what was measured within one.

    A message between hosts costs what it costs within one, and the latency on top. Its bytes go as fast as the slower
    of the two allows: the library as measured, for each rank, or the link, for all ranks of a host together.
    """

    def cost(piece: Piece, size: float) -> float:
        found, total = choose(piece), 0.0
        for one in rounds_of(operation, found.algorithm, shape):
            if not one.leaving:
                total += within_us(one, found, size)
                continue
            slower = max(one.share * found.beta_us_per_byte, one.leaving * network.beta_us_per_byte)
            total += one.messages * (found.alpha_us + network.latency_us) + slower * size
        return total

    return monotone_us(pieces, size_bytes, cost)


def over_other_link_us(
    pieces: Sequence[Piece],
    operation: str,
    shape: Shape,
    size_bytes: float,
    within: Sequence[Piece] | None,
    measured: Link,
    network: Link,
    choose: Choose,
) -> float:
    """Return the time of an operation over hosts, in µs, from what was measured over another link.

    Latencies differ by those of the links. Where the bandwidth was that of the link, give or take headers, it changes
    with the link; where it was lower, the software was the limit and stays it, unless the new link is slower still. No
    round goes faster than the library was within a host.
    """

    def cost(piece: Piece, size: float) -> float:
        found = choose(piece)
        alpha = max(found.alpha_us - measured.latency_us, 0.0) + network.latency_us
        if found.beta_us_per_byte <= _LINK_BOUND * measured.beta_us_per_byte:
            beta = found.beta_us_per_byte * network.beta_us_per_byte / measured.beta_us_per_byte
        else:
            beta = max(found.beta_us_per_byte, network.beta_us_per_byte)
        messages, volume, offset = term_of(operation, found.algorithm, shape, size, within)
        crossing = [one for one in rounds_of(operation, found.algorithm, shape) if one.leaving]
        floor = sum(_bytes_us(within, one, size) for one in crossing) if within is not None else 0.0
        return messages * alpha + max(volume * beta, floor) + offset

    return monotone_us(pieces, size_bytes, cost)


def _bytes_us(within: Sequence[Piece], rounds: Rounds, size_bytes: float) -> float:
    return monotone_us(within, size_bytes, lambda piece, size: rounds.share * size * piece.chosen.beta_us_per_byte)
