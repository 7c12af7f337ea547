"""The default policy of this process for objects."""

from __future__ import annotations

from dataclasses import dataclass

from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown

__all__ = ["ObjectPolicy", "object_policy", "resolve_allow_pickle", "set_object_policy"]


@dataclass(frozen=True)
class ObjectPolicy:
    """The policy for objects.

    Attributes:
        allow_pickle: pickle objects without an encoding, and unpickle data of other ranks, which can then run code.
        max_bytes: the largest encoded object that is sent or accepted.
    """

    allow_pickle: bool = False
    max_bytes: int = 1 << 30


class _Slot:
    policy = ObjectPolicy()


def set_object_policy(allow_pickle: bool = False, max_bytes: int = 1 << 30) -> None:
    """Set the policy of this process; see :class:`ObjectPolicy`.

    Args:
        allow_pickle: pickle objects without an encoding, and unpickle data of other ranks, which can then run code.
        max_bytes: the largest encoded object that is sent or accepted.

    Raises:
        ArgumentError: ``max_bytes`` is below 1 or above 2**63 - 1.
        ArgumentTypeError: one of them is of the wrong type.
    """
    if not isinstance(allow_pickle, bool):
        raise ArgumentTypeError(f"set_object_policy: allow_pickle: got {shown(allow_pickle)}; expected True or False")
    if not isinstance(max_bytes, int) or isinstance(max_bytes, bool):
        raise ArgumentTypeError(f"set_object_policy: max_bytes: got {shown(max_bytes)}; expected a number of bytes")
    if not 0 < max_bytes < 1 << 63:
        raise ArgumentError(f"set_object_policy: max_bytes: got {max_bytes}; expected 1 to {(1 << 63) - 1}")
    _Slot.policy = ObjectPolicy(allow_pickle, max_bytes)


def object_policy() -> ObjectPolicy:
    """Return the policy of this process."""
    return _Slot.policy


def resolve_allow_pickle(call: str, allow_pickle: bool | None) -> bool:
    """Return whether ``call`` may pickle; ``allow_pickle=None`` means the policy's setting."""
    if allow_pickle is None:
        return _Slot.policy.allow_pickle
    if not isinstance(allow_pickle, bool):
        raise ArgumentTypeError(f"{call}: allow_pickle: got {shown(allow_pickle)}; expected True, False or None")
    return allow_pickle
