"""Errors of objects that are sent to other ranks."""

from __future__ import annotations

from comm_utils.errors import CommError

__all__ = ["HOW_TO_ALLOW_PICKLE", "ObjectDecodeError", "ObjectExchangeError", "Refused"]

HOW_TO_ALLOW_PICKLE = (
    "the argument allow_pickle=True, the configuration key objects.allow_pickle or the environment variable "
    "COMM_OBJECTS__ALLOW_PICKLE=1"
)

_SHOWN_STEPS = 12


class ObjectDecodeError(CommError, ValueError):
    """A message is no object that this rank accepts: damaged, too large, of a type unknown here, or pickled."""


class ObjectExchangeError(CommError, RuntimeError):
    """Another rank could not send its object or accept one. No object was delivered and the group stays usable."""


class Refused(Exception):
    """While encoding: what a value may not be. Collects, on its way up, where in the object the value is.

    Args:
        reason: continues "obj[3]: ".
        wrong_kind: the type is the reason, not the value.
        too_large: the size limit is the reason.
        damaged: nobody could read it, so a pickle is no remedy.
    """

    def __init__(self, reason: str, *, wrong_kind: bool = True, too_large: bool = False, damaged: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wrong_kind = wrong_kind
        self.too_large = too_large
        self.damaged = damaged
        self._steps: list[str] = []
        self._containers: list[int] = []

    def within(self, container: object, step: str) -> Refused:
        """Note that the value is at ``step`` of ``container``."""
        self._steps.append(step)
        self._containers.append(id(container))
        return self

    def message(self, name: str) -> str:
        """Return the reason with its place, such as ``obj['optimizer'].state[3]: ...``."""
        steps, containers = self._steps[::-1], self._containers[::-1]
        first: dict[int, int] = {}
        for depth, container in enumerate(containers):
            above = first.setdefault(container, depth)
            if above != depth:
                inner, outer = (name + "".join(steps[:end]) for end in (depth, above))
                return f"{inner}: is {outer} again; an object that contains itself cannot be sent"
        path = "".join(steps[:_SHOWN_STEPS]) + ("..." if len(steps) > _SHOWN_STEPS else "")
        return f"{name}{path}: {self.reason}"
