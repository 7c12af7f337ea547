"""A colour for each kind of operation, the same in every picture; told apart also without red and green."""

from __future__ import annotations

__all__ = ["FAMILIES", "WAIT", "family", "pale"]

# Okabe and Ito, "Color Universal Design" (https://jfly.uni-koeln.de/color/).
#: family of operations -> colour
FAMILIES = {
    "all_reduce": "#0072B2",
    "all_gather": "#009E73",
    "reduce_scatter": "#E69F00",
    "all_to_all": "#D55E00",
    "broadcast, scatter": "#CC79A7",
    "reduce, gather": "#F0E442",
    "send, recv": "#56B4E9",
    "barrier": "#000000",
}
#: a wait for an asynchronous operation
WAIT = "#999999"

_OF = {
    "inference_all_reduce": "all_reduce",
    "broadcast": "broadcast, scatter",
    "scatter": "broadcast, scatter",
    "reduce": "reduce, gather",
    "gather": "reduce, gather",
    **dict.fromkeys(("irecv", "isend", "recv", "send"), "send, recv"),
}


def family(operation: str) -> str:
    """Which of :data:`FAMILIES` ``operation`` belongs to."""
    if operation in _OF:
        return _OF[operation]
    return max((name for name in FAMILIES if operation.startswith(name)), key=len)


def pale(color: str) -> str:
    """``color``, mixed with twice as much white."""
    parts = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part * 0.34 + 255 * 0.66):02X}" for part in parts)
