"""Least squares of relative errors with two coefficients that are not negative."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Sums", "Term", "solve"]

# Of two columns that are parallel up to rounding, one says it all.
_PARALLEL = 1e-12


@dataclass(frozen=True)
class Term:
    """One measurement as ``alpha * messages + beta * volume_bytes + offset_us``, which took ``time_us`` > 0."""

    messages: float
    volume_bytes: float
    offset_us: float
    time_us: float


class Sums:
    """Sums over measurements from which the solution follows; adding one more takes constant time."""

    __slots__ = ("count", "uu", "uv", "uy", "vv", "vy", "yy")

    def __init__(self, terms: Iterable[Term] = ()) -> None:
        self.count = 0
        self.uu = self.uv = self.uy = self.vv = self.vy = self.yy = 0.0
        for term in terms:
            self.add(term)

    def add(self, term: Term) -> None:
        """Add one measurement; its row is divided by its time, so that residuals are relative."""
        u, v = term.messages / term.time_us, term.volume_bytes / term.time_us
        y = 1 - term.offset_us / term.time_us
        self.count += 1
        self.uu += u * u
        self.uv += u * v
        self.uy += u * y
        self.vv += v * v
        self.vy += v * y
        self.yy += y * y

    def squared(self, alpha: float, beta: float) -> float:
        """Return the sum of the squared relative residuals."""
        found = self.yy - 2 * (alpha * self.uy + beta * self.vy)
        found += alpha * alpha * self.uu + 2 * alpha * beta * self.uv + beta * beta * self.vv
        return max(found, 0.0)


def solve(sums: Sums) -> tuple[float, float]:
    """``alpha`` and ``beta``, neither negative, with the least squared relative residuals.

    Where the measurements cannot tell the two apart, as those of one size cannot, all is alpha.
    """
    determinant = sums.uu * sums.vv - sums.uv * sums.uv
    if determinant > _PARALLEL * sums.uu * sums.vv:
        alpha = (sums.uy * sums.vv - sums.vy * sums.uv) / determinant
        beta = (sums.vy * sums.uu - sums.uy * sums.uv) / determinant
        if alpha >= 0 and beta >= 0:
            return alpha, beta
    only_alpha = (max(sums.uy / sums.uu, 0.0) if sums.uu else 0.0, 0.0)
    if determinant <= _PARALLEL * sums.uu * sums.vv and sums.uu:
        return only_alpha
    only_beta = (0.0, max(sums.vy / sums.vv, 0.0) if sums.vv else 0.0)
    return min(only_alpha, only_beta, key=lambda both: sums.squared(*both))
