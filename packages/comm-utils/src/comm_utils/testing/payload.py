"""Arguments on their way to the ranks."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["PerRank", "encode_arguments", "per_rank", "value_for"]


@dataclass(frozen=True)
class PerRank:
    """One value for each rank; made by :func:`per_rank`."""

    values: tuple[Any, ...]


def per_rank(values: Iterable[Any]) -> Any:
    """Wrap an argument so that rank ``r`` gets the ``r``-th value instead of all ranks getting the same.

    Works for positional and keyword arguments of a target and for values of ``env``.

    Args:
        values: one value per rank, in rank order.
    """
    return PerRank(tuple(values))


def value_for(value: Any, rank: int, world_size: int) -> Any:
    """Return what ``rank`` gets for an argument.

    Raises:
        ValueError: the argument is per rank and has not ``world_size`` values.
    """
    if not isinstance(value, PerRank):
        return value
    if len(value.values) != world_size:
        raise ValueError(f"per_rank() got {len(value.values)} values for {world_size} ranks; give one value per rank")
    return value.values[rank]


def encode_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], world_size: int) -> list[bytes]:
    """Return the pickled ``(args, kwargs)`` of each rank.

    Raises:
        ValueError: a per-rank argument has not one value per rank.
        TypeError: an argument cannot be pickled.
    """
    if not any(isinstance(value, PerRank) for value in (*args, *kwargs.values())):
        return [_encode(tuple(args), dict(kwargs))] * world_size
    return [
        _encode(
            tuple(value_for(value, rank, world_size) for value in args),
            {name: value_for(value, rank, world_size) for name, value in kwargs.items()},
        )
        for rank in range(world_size)
    ]


def _encode(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(
            f"the arguments for the ranks cannot be pickled ({type(error).__name__}: {error}); "
            "pass plain data, and build locks, sockets, lambdas and the like inside the target"
        ) from error
