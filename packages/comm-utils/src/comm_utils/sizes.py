"""Message sizes and bandwidths as nccl-tests defines them.

Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. *Size* is the larger of a rank's two
buffers: the whole array for all_gather, reduce_scatter, gather, scatter and all_to_all. *algbw* is size over time;
*busbw* scales it by what the busiest link carries, so that it can be compared with the hardware at any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Bandwidth", "bandwidth", "busbw_factor", "format_size", "message_size_bytes"]


def _all_reduce(world_size: int) -> float:
    return 2 * (world_size - 1) / world_size


def _one_to_all(world_size: int) -> float:
    return (world_size - 1) / world_size


def _unscaled(world_size: int) -> float:
    return 1.0


_BUSBW_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce,
    "inference_all_reduce": _all_reduce,
    "reduce": _unscaled,
    "broadcast": _unscaled,
    "all_gather": _one_to_all,
    "all_gather_into_tensor": _one_to_all,
    "all_gather_coalesced": _one_to_all,
    "reduce_scatter": _one_to_all,
    "reduce_scatter_tensor": _one_to_all,
    "reduce_scatter_coalesced": _one_to_all,
    "all_to_all": _one_to_all,
    "all_to_all_single": _one_to_all,
    "gather": _one_to_all,
    "scatter": _one_to_all,
    "send": _unscaled,
    "recv": _unscaled,
    "isend": _unscaled,
    "irecv": _unscaled,
    "barrier": _unscaled,
}

# Operations whose size is the whole array while a caller may hold only one rank's part of it.
_WHOLE_ARRAY = frozenset(
    name
    for name in _BUSBW_FACTORS
    if name.startswith(("all_gather", "reduce_scatter")) or name in ("gather", "scatter")
)


@dataclass(frozen=True)
class Bandwidth:
    """Bandwidths in GB/s (10^9 bytes per second)."""

    algbw_gb_per_s: float
    busbw_gb_per_s: float


def message_size_bytes(operation: str, part_bytes: int, world_size: int) -> int:
    """The size that ``operation`` is accounted under.

    Args:
        part_bytes: bytes of one rank's part for all_gather, reduce_scatter, gather and scatter; of the tensor
            otherwise.
        world_size: number of ranks in the group.

    Raises:
        KeyError: an operation without a definition.
    """
    if operation not in _BUSBW_FACTORS:
        raise KeyError(f"no message size is defined for {operation!r}; known: {', '.join(sorted(_BUSBW_FACTORS))}")
    return part_bytes * world_size if operation in _WHOLE_ARRAY else part_bytes


def busbw_factor(operation: str, world_size: int) -> float:
    """What algbw is multiplied with to give busbw.

    Raises:
        KeyError: an operation without a definition.
    """
    try:
        return _BUSBW_FACTORS[operation](world_size)
    except KeyError:
        raise KeyError(f"no bus bandwidth is defined for {operation!r}") from None


def bandwidth(operation: str, size_bytes: int, duration_s: float, world_size: int) -> Bandwidth:
    """Algorithm and bus bandwidth of one operation that moved ``size_bytes`` in ``duration_s`` seconds."""
    algbw = size_bytes / duration_s / 1e9 if duration_s > 0 else 0.0
    return Bandwidth(algbw, algbw * busbw_factor(operation, world_size))


def format_size(size_bytes: float) -> str:
    """``1536`` as ``"1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} TiB"
