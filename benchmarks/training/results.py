"""What was measured in each round, and how it compares with what was asked for."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from measuring import interval

from training.overlap import Overlap
from training.variants import COMPARISONS, MEMORY, Comparison

__all__ = ["Memory", "Results", "Verdict", "round_ms"]


def round_ms(answers: Sequence[Mapping[str, Any]]) -> float:
    """The median step of a round, of which the slower rank's time counts."""
    steps_ns = [max(of_all) for of_all in zip(*(one["times_ns"] for one in answers), strict=True)]
    return float(statistics.median(steps_ns)) / 1e6


@dataclass(frozen=True)
class Verdict:
    """The ratio of the medians of ours and the other, and its 95 % interval."""

    comparison: Comparison
    millions: float
    ours_ms: tuple[float, float, float]
    other_ms: tuple[float, float, float]
    ratio: float
    lower: float
    upper: float

    @property
    def met(self) -> str:
        """Where the interval is: on the right side as a whole, around the limit, or on the wrong side."""
        if self.upper <= self.comparison.most:
            return "met"
        return "within the interval" if self.lower <= self.comparison.most else "missed"


@dataclass(frozen=True)
class Memory:
    """Bytes for each parameter: between steps and at most within one, of the rank that has the most."""

    between: float
    most: float


@dataclass
class Results:
    """``rounds``: by comparison, size, and ours or the other, in ms a step; ``memory``: by variant, size, and ranks."""

    rounds: dict[tuple[str, float], tuple[list[float], list[float]]] = field(default_factory=dict)
    memory: dict[tuple[str, float, int], Memory] = field(default_factory=dict)
    overlap: dict[float, Overlap] = field(default_factory=dict)
    parameters: dict[float, int] = field(default_factory=dict)

    def verdicts(self) -> list[Verdict]:
        """In the order of all comparisons, then of sizes."""
        keys = sorted(self.rounds, key=lambda key: (list(COMPARISONS).index(key[0]), key[1]))
        return [self._judged(COMPARISONS[name], millions) for name, millions in keys]

    def _judged(self, comparison: Comparison, millions: float) -> Verdict:
        own, its = self.rounds[comparison.name, millions]

        def ratio(some: Sequence[int]) -> float:
            return statistics.median(own[one] for one in some) / statistics.median(its[one] for one in some)

        count = min(len(own), len(its))
        return Verdict(
            comparison, millions, of_rounds(own), of_rounds(its), ratio(range(count)), *interval(ratio, count)
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": [
                {
                    "comparison": one.comparison.name,
                    "ours": one.comparison.ours.name,
                    "other": one.comparison.other.name,
                    "parameters": self.parameters[one.millions],
                    "ours_ms": self.rounds[one.comparison.name, one.millions][0],
                    "other_ms": self.rounds[one.comparison.name, one.millions][1],
                    "ratio": one.ratio,
                    "interval": [one.lower, one.upper],
                    "most": one.comparison.most,
                    "met": one.met,
                }
                for one in self.verdicts()
            ],
            "memory": [
                {
                    "variant": name,
                    "parameters": self.parameters[millions],
                    "ranks": ranks,
                    "between_bytes_per_parameter": one.between,
                    "most_bytes_per_parameter": one.most,
                    "expected_bytes_per_parameter": expected_bytes(name, ranks),
                }
                for (name, millions, ranks), one in self.memory.items()
            ],
            "overlap": [
                {
                    "parameters": self.parameters[millions],
                    "calls_per_step": one.calls,
                    "communication_ms": one.communication_ms,
                    "hidden_ms": one.hidden_ms,
                    "hidden_share": one.share,
                }
                for millions, one in self.overlap.items()
            ],
        }


def of_rounds(found: Sequence[float]) -> tuple[float, float, float]:
    """The median over rounds and its 95 % interval."""
    return statistics.median(found), *interval(lambda some: statistics.median(found[one] for one in some), len(found))


def expected_bytes(variant: str, ranks: int) -> float:
    """What a rank needs for each parameter between steps."""
    whole, of_ranks = next(amounts for peer, *amounts in MEMORY if peer.name == variant)
    return whole + of_ranks / ranks
