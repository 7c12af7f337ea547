"""Groups in messages: their ranks, and the description that they were created with; and names for their helpers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

__all__ = ["digest_of", "group_text", "is_default_name", "listed", "name_of"]

#: Descriptions that torch gives where the caller gave none.
_DEFAULTS = frozenset(("", "default_pg", "undefined"))
_MOST_RANKS = 16
_MOST_RUNS = 8


def name_of(group: object) -> str:
    """Return the name that torch gave a process group; "" where it has none."""
    return str(getattr(group, "group_name", ""))


def digest_of(group: object, ranks: Sequence[int]) -> str:
    """Return a part for the names of groups that serve ``group``: the same on all of its ranks, and no other group's.

    Args:
        ranks: global ranks of the members of ``group``.
    """
    return hashlib.sha256(f"{name_of(group)} {list(ranks)}".encode()).hexdigest()[:16]


def group_text(ranks: Sequence[int], description: object = "") -> str:
    """Return such as ``the group of ranks [0, 1] (tensor parallel 0)``.

    Args:
        ranks: global ranks of the members.
        description: ``group_desc`` of the group; torch's own default is left out.
    """
    members = str(list(ranks)) if len(ranks) <= _MOST_RANKS else f"[{ranks[0]} ... {ranks[-1]}]"
    name = "" if is_default_name(description) else description
    return f"the group of ranks {members} ({name})" if name else f"the group of ranks {members}"


def listed(ranks: Sequence[int]) -> str:
    """Return such as ``[0, 3, 2]``, and of more than 16 ranks such as ``[0-499, 501-999]``, with at most 8 runs."""
    if len(ranks) <= _MOST_RANKS:
        return str(list(ranks))
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:_MOST_RUNS]]
    rest = sum(last - first + 1 for first, last in runs[_MOST_RUNS:])
    return f"[{', '.join(texts)}{f' and {rest} more' if rest else ''}]"


def is_default_name(description: object) -> bool:
    """Return whether the caller gave a group no description of its own."""
    return not isinstance(description, str) or description in _DEFAULTS
