"""The outcome of each rank, and the failure that shows it."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["RankFailure", "RankOutcome", "Status"]

Status = Literal["returned", "raised", "died", "killed"]

_TAIL_LINES = 60


@dataclass(frozen=True)
class RankOutcome:
    """The outcome of the target on one rank.

    Attributes:
        rank: which rank.
        status: ``returned``; ``raised`` an exception; ``died`` of its own exit call or of a signal, also while leaving
            after the target had returned; ``killed`` by the runner because it was still at it when time was up.
        value: what the target returned; for a script, what it printed to stdout.
        exception_type: name of the exception's class, such as ``"ValueError"``.
        message: ``str()`` of the exception; for a rank that died or was killed, where it was.
        traceback: its traceback, as text.
        exception: the exception itself where it could be pickled, without its traceback.
        exit_code: of the process; negative for a signal, as in :mod:`subprocess`; None for a rank that is still alive
            (in a pool).
        duration_s: seconds from the rank's receiving the call to its reporting; for one that did not report, from the
            runner's call to its end.
        stdout: what the process wrote there (in a pool: during this call).
        stderr: likewise.
        stacks: the Python stacks of all its threads, taken before the runner killed it.
    """

    rank: int
    status: Status
    value: Any = None
    exception_type: str | None = None
    message: str = ""
    traceback: str = ""
    exception: BaseException | None = None
    exit_code: int | None = None
    duration_s: float = 0.0
    stdout: str = ""
    stderr: str = ""
    stacks: str = ""

    @property
    def ok(self) -> bool:
        """Return whether the target returned, and the process, where it has ended, ended well."""
        return self.status == "returned"

    def describe(self) -> str:
        """Return one line: what happened."""
        if self.status == "raised":
            what = f"raised {self.exception_type}: {self.message}".partition("\n")[0].rstrip(": ")
        elif self.status == "killed":
            what = "was killed by the runner, still running"
        elif self.status == "died":
            what = f"ended {_exit_text(self.exit_code)}"
        else:
            what = "returned"
        if self.message and self.status in ("died", "killed"):
            what = f"{what} {self.message}"
        return f"rank {self.rank} {what}, after {self.duration_s:.2f} s"

    def report(self) -> str:
        """Several lines: what happened, the traceback or stacks, and the tails of what it wrote, rank-prefixed."""
        lines = [f"--- {self.describe()} ---"]
        for title, text in (
            ("", self.traceback),
            ("stacks when time was up", self.stacks),
            ("stdout", self.stdout),
            ("stderr", self.stderr),
        ):
            lines.extend(f"[rank {self.rank}] {line}" for line in _section(title, text))
        return "\n".join(lines)


class RankFailure(AssertionError):
    """At least one rank did not return; the message holds every rank's state.

    Attributes:
        outcomes: one :class:`RankOutcome` per rank, in rank order.
        timed_out: whether the deadline had passed.
    """

    def __init__(
        self, headline: str, outcomes: Sequence[RankOutcome], *, timed_out: bool = False, first: int | None = None
    ) -> None:
        self.outcomes = list(outcomes)
        self.timed_out = timed_out
        super().__init__("\n".join([headline, *(outcome.report() for outcome in self.outcomes)]))
        order = sorted(self.outcomes, key=lambda outcome: outcome.rank != first)
        self.__cause__ = next((outcome.exception for outcome in order if outcome.exception is not None), None)


def _exit_text(exit_code: int | None) -> str:
    if exit_code is None:
        return "without an exit code"
    if exit_code >= 0:
        return f"with exit code {exit_code}"
    try:
        return f"by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"by signal {-exit_code}"


def _section(title: str, text: str) -> Iterator[str]:
    lines = text.rstrip().splitlines()
    if not lines:
        return
    if title:
        cut = f", last {_TAIL_LINES} of {len(lines)} lines" if len(lines) > _TAIL_LINES else ""
        yield f"{title}{cut}:"
    yield from lines[-_TAIL_LINES:] if title else lines
