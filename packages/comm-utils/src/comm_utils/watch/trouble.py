"""The reason why the ranks of a group cannot go on, as an error of this rank."""

from __future__ import annotations

from dataclasses import dataclass

from comm_utils.errors import (
    BackendUnavailableError,
    BrokenGroupError,
    CollectiveMismatchError,
    CommError,
    CommTimeoutError,
    PeerLostError,
)
from comm_utils.flight_recorder.findings import Finding, FindingKind

__all__ = ["Trouble", "error_class"]

_CLASSES: dict[str, type[CommError]] = {
    **{one.__name__: one for one in (CollectiveMismatchError, CommTimeoutError, PeerLostError)},
    # A rank that was interrupted in a call, or left one half done, makes no other on the group.
    BrokenGroupError.__name__: PeerLostError,
    # What one rank lacks keeps the others waiting.
    BackendUnavailableError.__name__: CommTimeoutError,
}
_OF_FINDINGS: dict[FindingKind, type[CommError]] = {
    FindingKind.MISMATCH: CollectiveMismatchError,
    FindingKind.LOST: PeerLostError,
    FindingKind.STOPPED: CommTimeoutError,
    FindingKind.ORDER: CollectiveMismatchError,
    FindingKind.MISSING: CommTimeoutError,
}


def error_class(name: str) -> type[CommError] | None:
    """Return what other ranks raise after an error of that name on one rank; None where it does not concern them."""
    return _CLASSES.get(name)


@dataclass(frozen=True)
class Trouble:
    """The reason why the ranks of a group cannot go on.

    Attributes:
        kind: the error to raise.
        text: a sentence without a full stop.
        ranks: those that are the cause.
    """

    kind: type[CommError]
    text: str
    ranks: tuple[int, ...] = ()

    @property
    def short(self) -> str:
        """Return the text without what the ranks do instead."""
        return self.text.partition(": it ")[0]

    @property
    def verb(self) -> str:
        """Return what has become of a call."""
        return "lost a peer" if self.kind is PeerLostError else "failed"

    @classmethod
    def of(cls, finding: Finding) -> Trouble:
        """Return the trouble that a finding is."""
        return cls(_OF_FINDINGS[finding.kind], finding.text, finding.ranks)
