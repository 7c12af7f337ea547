"""The model file that ``commctl fit`` writes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from comm_utils import operations
from comm_utils.atomic_write import replacing
from comm_utils.errors import ArgumentError
from comm_utils.json_files import read_document
from comm_utils.observability.cost_model.accuracy import Errors
from comm_utils.observability.cost_model.algorithms import candidates
from comm_utils.observability.cost_model.curve import Coefficients, Piece
from comm_utils.observability.cost_model.fitting import Fit, FittedPoint
from comm_utils.observability.cost_model.link import Link
from comm_utils.observability.cost_model.points import Key
from comm_utils.observability.cost_model.rounds import Shape

__all__ = ["FORMAT", "NOT_MEASURED", "VERSION", "Model", "Source", "load", "save"]

FORMAT = "comm-model"
VERSION = 1
# Of what is wrong, in an error.
_SHOWN = 300
NOT_MEASURED = "predicted by a model, not measured"


@dataclass(frozen=True)
class Source:
    """A bench file that went into a model."""

    file: str
    made: str
    command: str
    system: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """Fits, and the measurements that they come from.

    Attributes:
        statistic: which time was fitted, a key of :data:`comm_utils.observability.cost_model.points.STATISTICS`.
        link: the network between the hosts of the measurements, where somebody said it.
    """

    made: str
    command: str
    statistic: str
    fits: tuple[Fit, ...]
    sources: tuple[Source, ...] = ()
    link: Link | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the file as a JSON object."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "what": "a model: latency and bandwidth fitted to measurements; what it says of anything else is "
            + NOT_MEASURED,
            "made": self.made,
            "command": self.command,
            "statistic": self.statistic,
            "link": None if self.link is None else asdict(self.link),
            "sources": [asdict(source) for source in self.sources],
            "notes": list(self.notes),
            "fits": [_fit_to_json(fit) for fit in self.fits],
        }


def _fit_to_json(fit: Fit) -> dict[str, Any]:
    return {
        **asdict(fit.key),
        "sizes_bytes": list(fit.sizes_bytes),
        "world_sizes": list(fit.world_sizes),
        "nodes": list(fit.nodes),
        "pieces": [
            {
                "from_bytes": piece.from_bytes,
                "assumed": piece.assumed,
                **_coefficients_to_json(piece.chosen),
                "alternatives": [_coefficients_to_json(one) for one in piece.alternatives],
            }
            for piece in fit.pieces
        ],
        "residuals": asdict(fit.residuals),
        "between_sizes": None if fit.between_sizes is None else asdict(fit.between_sizes),
        "between_world_sizes": None if fit.between_world_sizes is None else asdict(fit.between_world_sizes),
        "points": [
            {
                "world_size": point.shape.ranks,
                "nodes": point.shape.nodes,
                "size_bytes": point.size_bytes,
                "measured_us": point.measured_us,
                "fitted_us": point.fitted_us,
                "relative_residual": (point.fitted_us - point.measured_us) / point.measured_us,
            }
            for point in fit.points
        ],
    }


def _coefficients_to_json(found: Coefficients) -> dict[str, Any]:
    bandwidth = 1e-3 / found.beta_us_per_byte if found.beta_us_per_byte > 0 else None
    return {**asdict(found), "bandwidth_gb_per_s": bandwidth}


def save(model: Model, path: Path | str) -> None:
    """Write the file; an old one stays whole until the new one is.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path) as file:
        json.dump(model.to_json(), file, indent=1, allow_nan=False)
        file.write("\n")


def load(path: Path | str) -> Model:
    """Read a file that :func:`save` wrote.

    Raises:
        OSError: it cannot be read.
        ArgumentError: it is no model, of another version, or something in it is missing or wrong.
    """
    remedy = f"expected a file of format {FORMAT!r}, version {VERSION}; make one with: commctl fit BENCH.json -o FILE"
    try:
        data = read_document(path)
    except ArgumentError as error:
        raise ArgumentError(f"{error}; {remedy}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        got = repr(data.get("format"))[:80] if isinstance(data, dict) else type(data).__name__
        raise ArgumentError(f"{path}: got format {got}; {remedy}")
    if data.get("version") != VERSION:
        raise ArgumentError(f"{path}: got version {data.get('version')!r:.80}; {remedy}")
    try:
        link = data["link"]
        return Model(
            made=str(data["made"]),
            command=str(data["command"]),
            statistic=str(data["statistic"]),
            fits=tuple(_fit_from_json(one) for one in data["fits"]),
            sources=tuple(Source(**one) for one in data["sources"]),
            link=None if link is None else Link(_number(link["latency_us"]), _above_zero(link["beta_us_per_byte"])),
            notes=tuple(map(str, data["notes"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        what = f"nothing under {error}" if isinstance(error, KeyError) else str(error)
        what = what if len(what) <= _SHOWN else f"{what[:_SHOWN]}..."
        raise ArgumentError(f"{path}: got {what}; {remedy}") from None


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r:.80} where a number from zero on belongs")
    return float(value)


def _above_zero(value: object) -> float:
    number = _number(value)
    if number == 0:
        raise ValueError("0 where a number above zero belongs")
    return number


def _positive(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r:.80} where a whole number from one on belongs")
    return value


def _fit_from_json(data: dict[str, Any]) -> Fit:
    names = ("operation", "library", "backend", "level", "way", "dtype", "op")
    key = Key(**{name: str(data[name]) for name in names}, codec=str(data.get("codec", "")))
    if not operations.is_benchmarked(key.operation) or key.level not in ("local", "intra", "inter"):
        raise ValueError(f"a fit of {key.operation!r} at level {key.level!r}, which is unknown")
    known = candidates(key.operation, key.level)

    def coefficients(found: dict[str, Any]) -> Coefficients:
        if found["algorithm"] not in known:
            raise ValueError(f"the algorithm {found['algorithm']!r} of {key.operation}; known: {', '.join(known)}")
        return Coefficients(found["algorithm"], _number(found["alpha_us"]), _number(found["beta_us_per_byte"]))

    pieces = tuple(
        Piece(
            _number(one["from_bytes"]),
            coefficients(one),
            tuple(coefficients(other) for other in one["alternatives"]),
            bool(one["assumed"]),
        )
        for one in data["pieces"]
    )
    points = tuple(
        FittedPoint(
            Shape(_positive(one["world_size"]), _positive(one["nodes"])),
            int(_number(one["size_bytes"])),
            _above_zero(one["measured_us"]),
            _number(one["fitted_us"]),
        )
        for one in data["points"]
    )
    if not pieces or not points:
        raise ValueError(f"a fit of {key.operation} without pieces or points")
    if any(later.from_bytes < piece.from_bytes for piece, later in pairwise(pieces)):
        raise ValueError(f"pieces of {key.operation} that are not in order")
    residuals = _errors(data["residuals"])
    return Fit(
        key,
        pieces,
        points,
        residuals,
        _optional(_errors, data["between_sizes"]),
        _optional(_errors, data["between_world_sizes"]),
    )


def _errors(data: dict[str, Any]) -> Errors:
    median, p90, low = (_number(data[name]) for name in ("median", "p90", "low"))
    return Errors(_positive(data["count"]), median, p90, low, _above_zero(data["high"]))


def _optional(read: Callable[[dict[str, Any]], Errors], data: dict[str, Any] | None) -> Errors | None:
    return None if data is None else read(data)
