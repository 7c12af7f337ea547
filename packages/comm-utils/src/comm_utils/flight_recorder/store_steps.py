"""The names of groups that stand for the steps of another group in which its members wait for each other in a store."""

from __future__ import annotations

__all__ = ["MAKING", "is_step_of", "name_of_step", "numbers_agree"]

#: The step in which the members of a group make it.
MAKING = "making"


def name_of_step(group: str, step: str) -> str:
    """Return the name of the group whose calls are a step of the group of that name."""
    return f"{_before_step(group)}{step})"


def is_step_of(name: str, group: str) -> bool:
    """Return whether a group of that name has the calls of a step of ``group``."""
    return name.startswith(_before_step(group))


def numbers_agree(name: str) -> bool:
    """Return whether calls of one number belong together in the group of that name, as collectives do.

    All members of a group record that they make it. Other steps are recorded by the members that wait alone, so the
    last one to come records nothing.
    """
    return not name.endswith(")") or name.endswith(f"({MAKING})")


def _before_step(group: str) -> str:
    return f"{group} ("
