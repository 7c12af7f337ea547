"""Fits of measurements, each checked against measurements that it was made without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from comm_utils.errors import ArgumentError
from comm_utils.observability.cost_model.accuracy import Errors, errors_of
from comm_utils.observability.cost_model.curve import Coefficients, Piece, monotone_us
from comm_utils.observability.cost_model.pieces import fit_pieces, term_of
from comm_utils.observability.cost_model.points import Key, Point
from comm_utils.observability.cost_model.rounds import Shape

__all__ = ["HOLD_OUT", "Fit", "FittedPoint", "fit_all", "held_out", "time_us", "within_key"]

_FOLDS = 8
# Fewer say nothing about what lies between them.
_LEAST_SIZES = 4
_LEAST_WORLD_SIZES = 3


@dataclass(frozen=True)
class FittedPoint:
    """A measurement beside what the model says of it."""

    shape: Shape
    size_bytes: int
    measured_us: float
    fitted_us: float


@dataclass(frozen=True)
class Fit:
    """Time over size of one operation of one library at one level.

    Attributes:
        key: of what.
        pieces: the curve.
        points: what it was made from.
        residuals: of these points.
        between_sizes: errors for sizes that a fit was made without (cross validation); None where there are too few.
        between_world_sizes: likewise for numbers of ranks.
    """

    key: Key
    pieces: tuple[Piece, ...]
    points: tuple[FittedPoint, ...]
    residuals: Errors
    between_sizes: Errors | None = None
    between_world_sizes: Errors | None = None

    @property
    def sizes_bytes(self) -> tuple[int, int]:
        """The least and the greatest size that was measured."""
        sizes = [point.size_bytes for point in self.points]
        return min(sizes), max(sizes)

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Return the numbers of ranks of the measured groups."""
        return tuple(sorted({point.shape.ranks for point in self.points}))

    @property
    def nodes(self) -> tuple[int, ...]:
        """Return the numbers of hosts that the measured groups spanned."""
        return tuple(sorted({point.shape.nodes for point in self.points}))


def within_key(key: Key) -> Key:
    """Return the fit within a host that belongs to one between hosts."""
    return Key(key.operation, key.library, key.backend, "intra", key.way, key.dtype, key.op, key.codec)


def time_us(
    pieces: Sequence[Piece],
    operation: str,
    shape: Shape,
    size_bytes: float,
    within: Sequence[Piece] | None,
    choose: Callable[[Piece], Coefficients] = lambda piece: piece.chosen,
) -> float:
    """Return the time that a curve gives for a group of ``shape``."""

    def cost(piece: Piece, size: float) -> float:
        found = choose(piece)
        messages, volume, offset = term_of(operation, found.algorithm, shape, size, within)
        return messages * found.alpha_us + volume * found.beta_us_per_byte + offset

    return monotone_us(pieces, size_bytes, cost)


def fit_all(points: Mapping[Key, Sequence[Point]]) -> list[Fit]:
    """Fit each key; those within hosts first, because those between hosts build on them."""
    found: dict[Key, Fit] = {}
    for key in sorted(points, key=lambda key: (key.level == "inter", key)):
        below = found.get(within_key(key)) if key.level == "inter" else None
        found[key] = _fit(key, points[key], below.pieces if below else None)
    return [found[key] for key in sorted(found)]


def _fit(key: Key, points: Sequence[Point], within: Sequence[Piece] | None) -> Fit:
    pieces = fit_pieces(key.operation, key.level, points, within)
    fitted = tuple(
        FittedPoint(
            point.shape,
            point.size_bytes,
            point.time_us,
            time_us(pieces, key.operation, point.shape, point.size_bytes, within),
        )
        for point in points
    )
    residuals = errors_of((point.measured_us, point.fitted_us) for point in fitted)
    assert residuals is not None
    sizes, worlds = _sizes(points), sorted({point.shape for point in points})
    by_size = [set(sizes[fold :: min(_FOLDS, len(sizes))]) for fold in range(min(_FOLDS, len(sizes)))]
    return Fit(
        key,
        pieces,
        fitted,
        residuals,
        errors_of(_without(key, points, within, (lambda p, some=some: p.size_bytes in some for some in by_size)))  # type: ignore[misc]
        if len(sizes) >= _LEAST_SIZES
        else None,
        errors_of(_without(key, points, within, (lambda p, shape=shape: p.shape == shape for shape in worlds)))  # type: ignore[misc]
        if len(worlds) >= _LEAST_WORLD_SIZES
        else None,
    )


def _sizes(points: Iterable[Point]) -> list[int]:
    return sorted({point.size_bytes for point in points})


def _without(
    key: Key,
    points: Sequence[Point],
    within: Sequence[Piece] | None,
    folds: Iterable[Callable[[Point], bool]],
) -> list[tuple[float, float]]:
    """Measured and predicted times of the points of each fold, by a fit without them."""
    pairs = []
    for left_out in folds:
        rest = [point for point in points if not left_out(point)]
        pieces = fit_pieces(key.operation, key.level, rest, within)
        for point in points:
            if left_out(point):
                pairs.append((point.time_us, time_us(pieces, key.operation, point.shape, point.size_bytes, within)))
    return pairs


#: What ``--hold-out`` may leave out.
HOLD_OUT = ("sizes", "world-sizes")


def held_out(points: Mapping[Key, Sequence[Point]], what: str) -> dict[Key, list[FittedPoint]]:
    """Predictions of points that the fits were made without.

    Args:
        what: ``sizes``: every other size of each key is left out, beginning with the second; ``world-sizes``: each
            number of ranks in turn. Keys with fewer than three sizes, or with one number of ranks, have no result.

    Raises:
        ArgumentError: there is no key with enough of them.
    """
    found: dict[Key, list[FittedPoint]] = {}
    inside = {fit.key: fit for fit in fit_all({key: some for key, some in points.items() if key.level == "intra"})}
    for key, some in sorted(points.items()):
        below = inside.get(within_key(key)) if key.level == "inter" else None
        folds: list[Callable[[Point], bool]]
        if what == "sizes":
            every_other = set(_sizes(some)[1::2])
            folds = [lambda point, out=every_other: point.size_bytes in out]  # type: ignore[misc]
            enough = len(_sizes(some)) >= 3
        else:
            shapes = sorted({point.shape for point in some})
            folds = [lambda point, out=shape: point.shape == out for shape in shapes]  # type: ignore[misc]
            enough = len(shapes) >= 2
        if not enough:
            continue
        left_out = [point for fold in folds for point in some if fold(point)]
        pairs = _without(key, some, below.pieces if below else None, folds)
        found[key] = [
            FittedPoint(point.shape, point.size_bytes, point.time_us, predicted)
            for point, (_, predicted) in zip(left_out, pairs, strict=True)
        ]
    if not found:
        needed = "three sizes" if what == "sizes" else "two numbers of ranks"
        raise ArgumentError(
            f"--hold-out {what}: no operation was measured with {needed}; add bench files of more "
            + ("sizes" if what == "sizes" else "ranks")
        )
    return found
