"""Few pieces that fit: penalised dynamic programming over the sizes, with the algorithm chosen piece by piece.

The number of pieces is that with the least ``n ln(RSS / n) + k ln n`` (Schwarz: Estimating the dimension of a model,
Annals of Statistics 6(2), 1978), of *n* relative residuals and *k* coefficients and borders; the best pieces of each
number are found by dynamic programming (Bellman, Roth: Curve fitting by segmented straight lines, JASA 64, 1969).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from comm_utils.observability.cost_model.algorithms import candidates, rounds_of
from comm_utils.observability.cost_model.curve import Coefficients, Piece, monotone_us, within_us
from comm_utils.observability.cost_model.least_squares import Sums, Term, solve
from comm_utils.observability.cost_model.points import Point
from comm_utils.observability.cost_model.rounds import Shape

__all__ = ["fit_pieces", "term_of"]

_MOST_PIECES = 6
# Of several pieces, each has at least so many sizes: two would be met by any line.
_LEAST_SIZES = 3
# Borders are looked for between so many blocks of sizes at most, so that a thousand sizes take no minutes.
_MOST_BLOCKS = 40
# Relative residuals below this are no reason for another piece: no measurement repeats better.
_NOISE = 0.005
# Algorithms within so much of the criterion fit as well as the best one.
_AS_GOOD = 6.0


def term_of(
    operation: str, algorithm: str, shape: Shape, size_bytes: float, within: Sequence[Piece] | None
) -> tuple[float, float, float]:
    """The factors of alpha and beta, in messages and bytes, and a constant in microseconds.

    Between hosts, the rounds within a host are added as ``within`` has them, or cost what the others do.
    """
    messages = volume = offset = 0.0
    for one in rounds_of(operation, algorithm, shape):
        if not one.leaving and shape.level == "inter" and within is not None:
            offset += monotone_us(within, size_bytes, lambda piece, size, r=one: within_us(r, piece.chosen, size))  # type: ignore[misc]
        else:
            messages += one.messages
            volume += (one.leaving or one.share) * size_bytes
    return messages, volume, offset


def fit_pieces(
    operation: str,
    level: str,
    points: Sequence[Point],
    within: Sequence[Piece] | None = None,
) -> tuple[Piece, ...]:
    """Latency and bandwidth over the size.

    Args:
        points: at least one, all with times above zero.
        within: what the same operation costs within a host, for those between hosts.
    """
    blocks = _blocks(points)
    shapes = {point.shape for point in points}
    names = candidates(operation, level)
    searched = names if len(shapes) > 1 else names[:1]
    terms = {name: [[_term(operation, name, point, within) for point in block] for block in blocks] for name in names}
    costs = _segment_costs([terms[name] for name in searched], len(blocks))
    ranges = _best_ranges(costs, [len({point.size_bytes for point in block}) for block in blocks], len(points))
    pieces: list[Piece] = []
    for start, stop in ranges:
        inside = [point for block in blocks[start:stop] for point in block]
        own = {name: [term for block in terms[name][start:stop] for term in block] for name in names}
        found = _piece(0.0, own, len({point.shape for point in inside}) == 1 and len(names) > 1)
        if pieces:
            gap = (blocks[start - 1][-1].size_bytes, blocks[start][0].size_bytes)
            border = _border(operation, pieces[-1].chosen, found.chosen, gap, shapes, within)
            found = Piece(border, found.chosen, found.alternatives, found.assumed)
        pieces.append(found)
    return tuple(pieces)


def _blocks(points: Sequence[Point]) -> list[list[Point]]:
    ordered = sorted(points, key=lambda point: point.size_bytes)
    by_size = [list(some) for _, some in groupby(ordered, key=lambda point: point.size_bytes)]
    step = -(-len(by_size) // _MOST_BLOCKS)
    return [[point for some in by_size[i : i + step] for point in some] for i in range(0, len(by_size), step)]


def _term(operation: str, algorithm: str, point: Point, within: Sequence[Piece] | None) -> Term:
    return Term(*term_of(operation, algorithm, point.shape, point.size_bytes, within), point.time_us)


def _segment_costs(terms: list[list[list[Term]]], blocks: int) -> list[list[float]]:
    """``costs[i][j]``: the squared residuals of blocks i to j, by the algorithm with the least."""
    costs = [[math.inf] * (blocks + 1) for _ in range(blocks)]
    for start in range(blocks):
        for by_block in terms:
            sums = Sums()
            for stop in range(start + 1, blocks + 1):
                for term in by_block[stop - 1]:
                    sums.add(term)
                costs[start][stop] = min(costs[start][stop], sums.squared(*solve(sums)))
    return costs


def _criterion(squared: float, count: int) -> float:
    return count * math.log(max(squared / count, _NOISE**2))


def _best_ranges(costs: list[list[float]], sizes: list[int], count: int) -> list[tuple[int, int]]:
    blocks = len(sizes)
    # best[stop]: the least squared residuals of all blocks before ``stop``, and where its pieces begin.
    best: list[tuple[float, tuple[int, ...]]] = [
        (costs[0][stop], (0,)) if stop else (0.0, ()) for stop in range(blocks + 1)
    ]
    chosen, least = best[blocks], _criterion(best[blocks][0], count)
    for pieces in range(2, _MOST_PIECES + 1):
        previous, best = best, [(math.inf, ())] * (blocks + 1)
        for stop in range(1, blocks + 1):
            for start in range(1, stop):
                squared, starts = previous[start]
                enough = (
                    sum(sizes[start:stop]) >= _LEAST_SIZES and sum(sizes[starts[-1] : start]) >= _LEAST_SIZES
                    if starts
                    else False
                )
                if enough and squared + costs[start][stop] < best[stop][0]:
                    best[stop] = (squared + costs[start][stop], (*starts, start))
        if not best[blocks][1]:
            break
        found = _criterion(best[blocks][0], count) + 3 * (pieces - 1) * math.log(count)
        if found < least:
            chosen, least = best[blocks], found
    starts = chosen[1]
    return list(zip(starts, (*starts[1:], blocks), strict=True))


def _piece(from_bytes: float, terms: dict[str, list[Term]], assumed: bool) -> Piece:
    fits: list[tuple[float, Coefficients]] = []
    for name, some in terms.items():
        sums = Sums(some)
        alpha, beta = solve(sums)
        fits.append((_criterion(sums.squared(alpha, beta), sums.count), Coefficients(name, alpha, beta)))
    first = fits[0] if assumed else min(fits, key=lambda fit: fit[0])
    others = tuple(fit[1] for fit in fits if fit is not first and fit[0] <= first[0] + _AS_GOOD)
    return Piece(from_bytes, first[1], others, assumed)


def _border(
    operation: str,
    left: Coefficients,
    right: Coefficients,
    gap: tuple[int, int],
    shapes: set[Shape],
    within: Sequence[Piece] | None,
) -> float:
    """Return the size where the two cross, if that is in ``gap`` for all shapes, else the geometric middle."""
    low, high = gap
    crossings = []
    for shape in shapes:
        ends = []
        for size in gap:
            values = []
            for one in (left, right):
                messages, volume, offset = term_of(operation, one.algorithm, shape, size, within)
                values.append(messages * one.alpha_us + volume * one.beta_us_per_byte + offset)
            ends.append(values[1] - values[0])
        if ends[0] * ends[1] >= 0:
            return math.sqrt(low * high) if low else high / 2
        crossings.append(low + (high - low) * ends[0] / (ends[0] - ends[1]))
    return math.fsum(crossings) / len(crossings)
