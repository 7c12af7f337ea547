"""Message sizes and bandwidths as nccl-tests defines them.

Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. *Size* is the larger of a rank's two
buffers: the whole array for all_gather, reduce_scatter, gather, scatter and all_to_all. *algbw* is size over time;
*busbw* scales it by what the busiest link carries, so that it can be compared with the hardware at any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from comm_utils import operations

__all__ = ["Bandwidth", "bandwidth", "busbw_factor", "encoded_size_bytes", "format_size", "message_size_bytes"]


@dataclass(frozen=True)
class Bandwidth:
    """Bandwidths in GB/s (10^9 bytes per second)."""

    algbw_gb_per_s: float
    busbw_gb_per_s: float


def message_size_bytes(operation: str, part_bytes: int, world_size: int) -> int:
    """Return the size that ``operation`` is accounted under.

    Args:
        part_bytes: bytes of one rank's part for all_gather, reduce_scatter, gather and scatter; of the tensor
            otherwise.
        world_size: number of ranks in the group.

    Raises:
        UnknownOperationError: an operation without a row; a KeyError.
    """
    return part_bytes * world_size if operations.get(operation).pattern.whole_array else part_bytes


def encoded_size_bytes(operation: str, wire_bytes: int, world_size: int) -> float:
    """Return the size of an uncompressed ``operation`` in which a rank sends ``wire_bytes``, as compressed ones do.

    A rank sends the size times the bus factor: 2 (W-1)/W for all_reduce, (W-1)/W for the others that are compressed.

    Raises:
        UnknownOperationError: an operation without a row; a KeyError.
    """
    factor = busbw_factor(operation, world_size)
    return wire_bytes / factor if factor else 0.0


def busbw_factor(operation: str, world_size: int) -> float:
    """Return what algbw is multiplied by to give busbw.

    Raises:
        UnknownOperationError: an operation without a row; a KeyError.
    """
    return operations.get(operation).pattern.bus_factor(world_size)


def bandwidth(operation: str, size_bytes: int, duration_s: float, world_size: int) -> Bandwidth:
    """Return algorithm and bus bandwidth of one operation that moved ``size_bytes`` in ``duration_s`` seconds."""
    algbw = size_bytes / duration_s / 1e9 if duration_s > 0 else 0.0
    return Bandwidth(algbw, algbw * busbw_factor(operation, world_size))


def format_size(size_bytes: float) -> str:
    """Return ``1536`` as ``"1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        shown = f"{size_bytes:.0f}" if unit == "B" else f"{size_bytes:.4g}"
        if float(shown) < 1024:
            return f"{shown} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} TiB"
