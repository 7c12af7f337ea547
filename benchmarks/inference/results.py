"""What was measured in each round, and how it compares with what was asked for."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from measuring import Ratio, interval

__all__ = ["TARGETS", "Results", "Round", "Target", "Verdict", "describe"]


@dataclass(frozen=True)
class Round:
    """What one variant did in one round; of several ranks, the slower one's time of each token counts.

    ``first_ms``: of the first token, after the prompt. All others are of the tokens after it: ``tokens_per_s`` over
    all of them, and the median token's ``communication_us``, the time inside of the reductions, a mean over the ranks;
    ``together_us``, likewise but of each reduction only from the call of the later rank until both had left it, which
    is without the wait for the other's computation; ``share``, the part of the token's time that is communication.
    """

    first_ms: float
    tokens_per_s: float
    communication_us: float
    together_us: float
    share: float

    @classmethod
    def of(cls, answers: Sequence[Mapping[str, Any]]) -> Round:
        """From what each rank answered for each token: ``token_ns``, and of its reductions two times."""
        first_ns, *token_ns = (max(of_all) for of_all in zip(*(one["token_ns"] for one in answers), strict=True))
        # Of each token: of each rank, its reductions.
        insides, ends = (list(zip(*(one[of][1:] for one in answers), strict=True)) for of in ("inside_ns", "ends_ns"))
        inside_ns = [statistics.mean(sum(of_rank) for of_rank in of_token) for of_token in insides]
        together_ns = [sum(map(together, *map(transposed, pair))) for pair in zip(insides, ends, strict=True)]
        return cls(
            first_ms=first_ns / 1e6,
            tokens_per_s=len(token_ns) / sum(token_ns) * 1e9,
            communication_us=statistics.median(inside_ns) / 1e3,
            together_us=statistics.median(together_ns) / 1e3,
            share=statistics.median(inside / whole for inside, whole in zip(inside_ns, token_ns, strict=True)),
        )


def transposed(of_ranks: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    return list(zip(*of_ranks, strict=True))


def together(inside_ns: Sequence[int], ends_ns: Sequence[int]) -> int:
    """How long all ranks were in a reduction: from the last one's call until all have left it."""
    return max(ends_ns) - max(end - inside for inside, end in zip(inside_ns, ends_ns, strict=True))


@dataclass
class Results:
    """Rounds of each variant; ``off``: the largest difference of its logits, of the largest; ``same``: equal tokens."""

    rounds: dict[str, list[Round]] = field(default_factory=dict)
    off: dict[str, float] = field(default_factory=dict)
    same: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, found: Round) -> None:
        self.rounds.setdefault(name, []).append(found)

    def values(self, name: str, measure: str) -> list[float]:
        return [getattr(one, measure) for one in self.rounds.get(name, [])]

    def median(self, name: str, measure: str) -> tuple[float, float, float]:
        """The median over rounds and its 95 % interval."""
        found = self.values(name, measure)
        return statistics.median(found), *interval(
            lambda some: statistics.median(found[one] for one in some), len(found)
        )

    def ratio(self, name: str, other: str, measure: str) -> tuple[float, float, float] | None:
        """The ratio of two medians and its 95 % interval, by rounds that were measured after one another."""
        own, its = self.values(name, measure), self.values(other, measure)
        if not own or not its:
            return None
        found = Ratio.of(own, its)
        return found.value, found.lower, found.upper

    def to_json(self) -> dict[str, Any]:
        names = [one.name for one in dataclasses.fields(Round)]
        return {
            name: {
                "medians": {measure: self.median(name, measure) for measure in names},
                "rounds": [dataclasses.asdict(one) for one in rounds],
                "logits_off": self.off.get(name),
                "same_tokens": self.same.get(name),
            }
            for name, rounds in self.rounds.items()
        }


@dataclass(frozen=True)
class Target:
    """The ratio of the median of ``row`` to that of ``peer`` is at most ``most``, or at least ``least``.

    The 95 % interval has to be on that side as a whole; where ``may_be_equal``, it is enough that it reaches there.
    """

    text: str
    row: str
    peer: str
    measure: str
    most: float | None = None
    least: float | None = None
    may_be_equal: bool = False
    must: bool = True

    def judge(self, results: Results) -> Verdict:
        found = results.ratio(self.row, self.peer, self.measure)
        if found is None:
            return Verdict(self)
        _, lower, upper = found
        if self.most is not None:
            return Verdict(self, *found, (lower if self.may_be_equal else upper) <= self.most)
        assert self.least is not None
        return Verdict(self, *found, (upper if self.may_be_equal else lower) >= self.least)


@dataclass(frozen=True)
class Verdict:
    """The ratio and its 95 % interval, and whether the target was met; None where it was not measured."""

    target: Target
    ratio: float | None = None
    lower: float | None = None
    upper: float | None = None
    met: bool | None = None

    def to_json(self) -> dict[str, Any]:
        figures = {"ratio": self.ratio, "lower": self.lower, "upper": self.upper, "met": self.met}
        return {"target": self.target.text, "must": self.target.must, **figures}


OPERATOR = "DeepSpeed's operator"

# At 200 million weights in float32, one sequence, two ranks.
TARGETS = (
    Target(
        "AutoTP, communication: at most 0.6 times DeepSpeed's operator",
        "AutoTP, ours",
        f"AutoTP, {OPERATOR}",
        "communication_us",
        most=0.6,
    ),
    *(
        Target(
            f"{splitter}, communication: at most 0.1 times gloo",
            f"{splitter}, ours",
            f"{splitter}, gloo",
            "communication_us",
            most=0.1,
        )
        for splitter in ("AutoTP", "torch")
    ),
    Target(
        "AutoTP, tokens a second: not below DeepSpeed's operator",
        "AutoTP, ours",
        f"AutoTP, {OPERATOR}",
        "tokens_per_s",
        least=1.0,
        may_be_equal=True,
    ),
    *(
        Target(
            f"{splitter}, tokens a second: above gloo",
            f"{splitter}, ours",
            f"{splitter}, gloo",
            "tokens_per_s",
            least=1.0,
        )
        for splitter in ("AutoTP", "torch")
    ),
    Target(
        "AutoTP, communication after both have called: at most 0.6 times DeepSpeed's operator",
        "AutoTP, ours",
        f"AutoTP, {OPERATOR}",
        "together_us",
        most=0.6,
        must=False,
    ),
    Target(
        "torch, communication of a group that sends nothing: at most 0.1 times gloo",
        "torch, nothing sent",
        "torch, gloo",
        "communication_us",
        most=0.1,
        must=False,
    ),
)


def describe(verdict: Verdict) -> str:
    """Whether a target was met, in a line."""
    target = verdict.target
    text = f"{'' if target.must else '(beside) '}{target.text}"
    if verdict.ratio is None:
        return f"{text:94} not measured"
    judged = "met" if verdict.met else "MISSED"
    return f"{text:94} {judged}: {verdict.ratio:.3f} ({verdict.lower:.3f} to {verdict.upper:.3f})"
