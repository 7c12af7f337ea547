"""The distance of a model from measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Errors", "errors_of", "quantile"]


@dataclass(frozen=True)
class Errors:
    """Of some measurements and what a model says of them.

    Attributes:
        count: how many measurements.
        median: half of the relative errors ``|model - measured| / measured`` are up to this.
        p90: and 90 % up to this.
        low: 5 % of all ``measured / model`` are below this.
        high: and 5 % above this.
    """

    count: int
    median: float
    p90: float
    low: float
    high: float


def errors_of(pairs: Iterable[tuple[float, float]]) -> Errors | None:
    """Return the errors of pairs of measured and modelled times, the former above zero; None for none."""
    both = list(pairs)
    if not both:
        return None
    relative = sorted(abs(model - measured) / measured for measured, model in both)
    # A model that says zero is infinitely wrong; a number that JSON has will do.
    ratios = sorted(math.inf if model <= 0 else measured / model for measured, model in both)
    ratios = [min(ratio, 1e6) for ratio in ratios]
    return Errors(
        len(both), quantile(relative, 0.5), quantile(relative, 0.9), quantile(ratios, 0.05), quantile(ratios, 0.95)
    )


def quantile(ordered: list[float], share: float) -> float:
    """Return the value below which ``share`` of all are, between the two nearest; ``ordered`` is not empty."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
