"""Groups in messages: their ranks, and the description that they were created with."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["group_text", "is_default_name"]

#: Descriptions that torch gives where the caller gave none.
_DEFAULTS = frozenset(("", "default_pg", "undefined"))
_MOST_RANKS = 16


def group_text(ranks: Sequence[int], description: object = "") -> str:
    """Return such as ``the group of ranks [0, 1] (tensor parallel 0)``.

    Args:
        ranks: global ranks of the members.
        description: ``group_desc`` of the group; torch's own default is left out.
    """
    members = str(list(ranks)) if len(ranks) <= _MOST_RANKS else f"[{ranks[0]} ... {ranks[-1]}]"
    name = "" if is_default_name(description) else description
    return f"the group of ranks {members} ({name})" if name else f"the group of ranks {members}"


def is_default_name(description: object) -> bool:
    """Return whether the caller gave a group no description of its own."""
    return not isinstance(description, str) or description in _DEFAULTS
