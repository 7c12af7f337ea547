"""Messages between the runner and a rank over their connection, one pickle per message."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Ancestor", "Call", "Leave", "Raised", "Ready", "Returned", "TargetRef"]


@dataclass(frozen=True)
class Ancestor:
    """A package above a module: its name, its ``__init__`` (None for a namespace) and where its modules are."""

    name: str
    file: str | None
    search_path: tuple[str, ...]


@dataclass(frozen=True)
class TargetRef:
    """A reference by which a rank finds its target.

    With a ``qualname``, a function of ``module`` (loaded from ``file`` where the name alone does not lead to that
    file, or where ``rewrite`` asks for pytest's assertions). Without one, the script ``file``.
    """

    file: str | None
    module: str = ""
    qualname: str = ""
    package: str | None = None
    ancestors: tuple[Ancestor, ...] = ()
    rewrite: bool = False

    @property
    def is_script(self) -> bool:
        return not self.qualname

    def __str__(self) -> str:
        return f"{self.file}" if self.is_script else f"{self.module}:{self.qualname}"


@dataclass(frozen=True)
class Call:
    """Runner to rank: run this with the pickled ``(args, kwargs)``; with ``last``, leave afterwards.

    ``patience`` is the runner's factor for deadlines.
    """

    target: TargetRef
    payload: bytes
    last: bool
    patience: float


@dataclass(frozen=True)
class Leave:
    """Runner to rank: end as a program ends, ``atexit`` included."""


@dataclass(frozen=True)
class Ready:
    """Rank to runner: signal handlers are in place."""


@dataclass(frozen=True)
class Returned:
    """Rank to runner: the target returned this pickled value after so many seconds."""

    payload: bytes
    duration_s: float


@dataclass(frozen=True)
class Raised:
    """Rank to runner: the target raised. ``exception`` is its pickle, where it has one."""

    type_name: str
    message: str
    traceback: str
    exception: bytes | None
    duration_s: float
