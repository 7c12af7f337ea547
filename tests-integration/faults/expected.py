"""What the issue asks of a cell: which exceptions, what they name, how soon, and what works afterwards."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LIMIT_S", "MISMATCH_S", "RIGHT", "Expected", "failing", "mismatch", "right"]

#: Timeout of the calls in every cell.
LIMIT_S = 4.0
#: How soon a mismatch is reported.
MISMATCH_S = 1.0
#: In ``errors``: a rank may also get no error, with all results right.
RIGHT = "right"


@dataclass(frozen=True)
class Expected:
    """The bar of a cell.

    Attributes:
        errors: classes of which each error has to be one; empty: no rank gets an error and every result is right.
        names: patterns, searched without regard to case in the message of each survivor; all have to be found.
            ``{pid}`` is the culprit's process id.
        culprit_names: the same for the message on the culprit, where it lives.
        latest_s: seconds from the fault, or from the call that had to fail, to the error.
        again: whether ``init_distributed`` has to work afterwards.
        culprit: whether the culprit lives and has to get an error, too.
        child: classes of the error in the forked child; empty: there is none.
        warning: a pattern in the log of any rank; empty: nothing is asked.
    """

    errors: tuple[str, ...]
    names: tuple[str, ...] = ()
    culprit_names: tuple[str, ...] = ()
    latest_s: float = LIMIT_S + 1
    again: bool = True
    culprit: bool = False
    child: tuple[str, ...] = ()
    warning: str = ""


def failing(*errors: str, names: tuple[str, ...], **more: object) -> Expected:
    """Return that survivors get one of these errors within the timeout and a second."""
    return Expected(errors, names, **more)  # type: ignore[arg-type]


def mismatch(*names: str) -> Expected:
    """Return that every rank, the culprit too, learns within a second whose call differs, and in what."""
    return Expected(
        ("CollectiveMismatchError",),
        (r"\branks? 1\b", *names),
        (r"\branks? 1\b", *names),
        latest_s=MISMATCH_S,
        culprit=True,
    )


def right(**more: object) -> Expected:
    """Return that no rank gets an error and every result is right."""
    return Expected((), **more)  # type: ignore[arg-type]
