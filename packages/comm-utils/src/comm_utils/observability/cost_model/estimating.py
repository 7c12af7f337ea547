"""Estimates of the time of one operation, with an interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from comm_utils import operations
from comm_utils.errors import ArgumentError
from comm_utils.observability.cost_model.curve import Coefficients, Piece
from comm_utils.observability.cost_model.fitting import Fit, time_us, within_key
from comm_utils.observability.cost_model.link import Link
from comm_utils.observability.cost_model.model import Model
from comm_utils.observability.cost_model.networks import over_link_us, over_other_link_us
from comm_utils.observability.cost_model.rounds import Shape

__all__ = ["MARKS", "Estimate", "Estimator", "NoFitError"]

#: What makes an estimate less sure than the measurements are; the words for each.
MARKS: dict[str, str] = {
    "size": "sizes outside those that were fitted",
    "ranks": "numbers of ranks or hosts that were not fitted",
    "algorithm": "the algorithm is assumed: groups of one size only were measured, and the interval spans the others",
    "network": "the network is a given one, not that of the measurements",
    "dtype": "measured with another dtype or reduction",
    "codec": "compressed calls are taken for uncompressed ones that send as many bytes: encoding costs nothing",
    "unchecked": "too few sizes for cross validation: the interval is a factor of two",
    "free": "groups of one rank, of which the model has none, are taken to cost nothing",
}

# Without cross validation, a factor of two; nothing is known better than this.
_UNCHECKED = math.log(2)
_LEAST = 0.02
# What each doubling beyond the measurements adds, as does another network.
_FURTHER = math.log(1.25)


class NoFitError(ArgumentError):
    """The model has nothing that could tell."""


@dataclass(frozen=True)
class Estimate:
    """A time that a model predicts: not measured.

    Attributes:
        low_us: and ``high_us``: 90 % of the sizes that cross validation left out were between such two; wider where
            ``marks`` say why.
        marks: keys of :data:`MARKS`.
    """

    time_us: float
    low_us: float
    high_us: float
    algorithm: str = ""
    marks: frozenset[str] = frozenset()


class Estimator:
    """Answers from one model, for one library and one network between hosts.

    Args:
        library: as in the bench file, such as ``"ours"``; None where the model has but one that fits.
        backend: likewise, such as ``"gloo"``.
        network: between the hosts; None for that of the measurements.

    Raises:
        ArgumentError: the model has several of which none was named, or not the one that was named.
    """

    def __init__(
        self, model: Model, library: str | None = None, backend: str | None = None, network: Link | None = None
    ) -> None:
        known = sorted({(fit.key.library, fit.key.backend) for fit in model.fits})
        fitting = [one for one in known if library in (None, one[0]) and backend in (None, one[1])]
        listed = ", ".join("/".join(one) for one in known)
        if not fitting:
            raise ArgumentError(
                f"the model has no fit of {library or 'any library'}/{backend or 'any backend'}; it has: {listed}; "
                "name one of them with --library and --backend"
            )
        if len(fitting) > 1:
            raise ArgumentError(f"the model has several libraries: {listed}; name one with --library and --backend")
        self.library, self.backend = fitting[0]
        self.model, self.network = model, network
        self._fits = [fit for fit in model.fits if (fit.key.library, fit.key.backend) == fitting[0]]
        self._by_key = {fit.key: fit for fit in self._fits}

    def estimate(
        self,
        operation: str,
        size_bytes: int,
        shape: Shape,
        dtype: str = "",
        op: str = "",
        codec: str = "",
        encoded_bytes: float = 0.0,
    ) -> Estimate:
        """Estimate how long ``operation`` takes.

        A compressed call has the time that was measured with its codec. Without such a measurement, or over another
        network, it has that of an uncompressed call that sends as many bytes.

        Args:
            operation: as a program calls it, or as a bench file names it.
            size_bytes: as nccl-tests counts it.
            codec: what compresses it; empty for nothing.
            encoded_bytes: of a compressed call, :func:`comm_utils.sizes.encoded_size_bytes`.

        Raises:
            NoFitError: nothing in the model can tell.
        """
        row = operations.find(operation)
        measured_as = operation if row is None else row.measured_as
        if codec:
            fits = [fit for fit in self._fits if (fit.key.operation, fit.key.codec) == (measured_as, codec)]
            elsewhere = shape.level == "inter" and self.network is not None
            if elsewhere or not any(fit.key.level == shape.level for fit in fits):
                plain = self.estimate(operation, max(1, round(encoded_bytes)), shape, dtype, op)
                return replace(plain, marks=plain.marks | {"codec"} if plain.time_us else plain.marks)
        else:
            fits = [fit for fit in self._fits if fit.key.operation == measured_as and not fit.key.codec]
        if shape.ranks == 1 and not any(fit.key.level == "local" for fit in fits):
            return Estimate(0.0, 0.0, 0.0, marks=frozenset(["free"]))
        fit, over = self._choose(measured_as, fits, shape, dtype, op)
        below = self._by_key.get(within_key(fit.key)) if shape.level == "inter" else None
        curve = self._curve(fit, below, shape, size_bytes, over)
        value = curve(lambda piece: piece.chosen)
        spread = [value, *(curve(_by_name(name)) for name in _alternatives(fit.pieces))]
        unseen = over is not None or shape not in {point.shape for point in fit.points}
        low_log, high_log, marks = _interval(fit, size_bytes, shape, over is not None)
        if unseen and any(piece.assumed for piece in fit.pieces):
            marks.add("algorithm")
        if _differs(fit, dtype, op):
            marks.add("dtype")
        low, high = (min(spread), max(spread)) if unseen else (value, value)
        piece = [one for one in fit.pieces if one.from_bytes <= size_bytes] or list(fit.pieces[:1])
        return Estimate(
            value, low * math.exp(low_log), high * math.exp(high_log), piece[-1].chosen.algorithm, frozenset(marks)
        )

    def _choose(
        self, operation: str, fits: Sequence[Fit], shape: Shape, dtype: str, op: str
    ) -> tuple[Fit, Link | None]:
        """Return the fit that is nearest, and the network that is to be put in the place of its own."""
        row = operations.find(operation)  # which way of calling comes first, where both were measured
        way = "in_place" if row is not None and row.is_in_place else "out_of_place"

        def rank(fit: Fit) -> tuple[bool, bool, bool]:
            return fit.key.dtype != dtype, fit.key.op != op, fit.key.way != way

        by_level: dict[str, list[Fit]] = {}
        for fit in sorted(fits, key=rank):
            by_level.setdefault(fit.key.level, []).append(fit)
        found = by_level.get(shape.level, [])
        if shape.level == "inter" and self.network is not None:
            if found and self.model.link is not None:
                return found[0], self.network
            if inside := by_level.get("intra"):
                return inside[0], self.network
            if found:
                raise NoFitError(
                    f"the model has {operation} between hosts, but not over which network that was measured, so that "
                    "it says nothing about another; fit again with --link LATENCY,BANDWIDTH"
                )
        if not found:
            where = {"inter": "between hosts", "intra": "within a host", "local": "of one rank"}[shape.level]
            remedy = (
                "give --network LATENCY,BANDWIDTH, or fit a bench file of several hosts"
                if shape.level == "inter" and "intra" in by_level
                else f"add it: commctl bench {operation} --json FILE, and fit FILE with the others"
            )
            raise NoFitError(f"the model has no fit of {operation} {where} ({self.library}/{self.backend}); {remedy}")
        return found[0], None

    def _curve(
        self, fit: Fit, below: Fit | None, shape: Shape, size_bytes: int, network: Link | None
    ) -> Callable[[Callable[[Piece], Coefficients]], float]:
        operation, within = fit.key.operation, below.pieces if below else None
        if network is None:
            return lambda choose: time_us(fit.pieces, operation, shape, size_bytes, within, choose)
        if fit.key.level == "intra":
            return lambda choose: over_link_us(fit.pieces, operation, shape, size_bytes, network, choose)
        link = self.model.link
        assert link is not None
        return lambda choose: over_other_link_us(
            fit.pieces, operation, shape, size_bytes, within, link, network, choose
        )


def _by_name(name: str) -> Callable[[Piece], Coefficients]:
    return lambda piece: next((one for one in piece.alternatives if one.algorithm == name), piece.chosen)


def _alternatives(pieces: Iterable[Piece]) -> list[str]:
    return sorted({one.algorithm for piece in pieces for one in piece.alternatives})


def _differs(fit: Fit, dtype: str, op: str) -> bool:
    return bool((dtype and fit.key.dtype and dtype != fit.key.dtype) or (op and fit.key.op and op != fit.key.op))


def _interval(fit: Fit, size_bytes: int, shape: Shape, other_network: bool) -> tuple[float, float, set[str]]:
    """Return the logarithms of what the time is multiplied with, and marks.

    Cross validation says how far off sizes in between are. Each doubling beyond the fitted sizes, ranks or hosts adds a
    quarter, as does another network: a rule of thumb, no statistics.
    """
    marks: set[str] = set()
    if fit.between_sizes is None:
        marks.add("unchecked")
        low, high = -_UNCHECKED, _UNCHECKED
    else:
        low, high = math.log(max(fit.between_sizes.low, 1e-6)), math.log(fit.between_sizes.high)
    further = 0.0
    least, greatest = fit.sizes_bytes
    if not least <= size_bytes <= greatest:
        marks.add("size")
        further += _doublings(size_bytes, least, greatest)
    if shape not in {point.shape for point in fit.points}:
        if fit.key.level == "inter" or not other_network:
            marks.add("ranks")
        if fit.between_world_sizes is not None:
            low = min(low, math.log(max(fit.between_world_sizes.low, 1e-6)))
            high = max(high, math.log(fit.between_world_sizes.high))
        further += _doublings(shape.ranks, fit.world_sizes[0], fit.world_sizes[-1])
        if fit.key.level == "inter":
            further += _doublings(shape.nodes, fit.nodes[0], fit.nodes[-1])
    if other_network:
        marks.add("network")
        further += 1
    return min(low, -_LEAST) - further * _FURTHER, max(high, _LEAST) + further * _FURTHER, marks


def _doublings(value: int, least: int, greatest: int) -> float:
    if value < least:
        return math.log2(least / max(value, 1))
    return math.log2(value / max(greatest, 1)) if value > greatest else 0.0
