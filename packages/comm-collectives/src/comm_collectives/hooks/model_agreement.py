"""The agreement of ranks on a model and on settings, in one exchange before anything is registered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from comm_collectives.annotations import Group
from comm_collectives.groups import get_process_group_ranks
from comm_collectives.memory import is_dense
from comm_collectives.objects import allgather_object
from comm_utils.errors import ArgumentError, CollectiveMismatchError, CommError

__all__ = ["agree_on_model", "as_refusal", "check_on_all_ranks"]

T = TypeVar("T")


def agree_on_model(
    call: str,
    parameters: Mapping[str, torch.Tensor],
    settings: Mapping[str, object] | None = None,
    group: Group = None,
) -> None:
    """Check that all ranks have the same parameters, in the same order, and the same settings.

    Args:
        call: the user's call, for messages.
        parameters: tensors by name; their names, shapes, dtypes and orders in memory are compared.
        settings: what else must be the same, by the name of the argument; compared by ``repr``.
        group: whose ranks take part; None is the world group.

    Raises:
        CollectiveMismatchError: on all ranks; names the rank and the first parameter or setting that differs. What
            most ranks have counts as expected, and among equally many what the lowest of their ranks has.
    """
    check_on_all_ranks(call, lambda: (parameters, settings or {}), group)


def check_on_all_ranks(
    call: str,
    prepare: Callable[[], tuple[Mapping[str, torch.Tensor], Mapping[str, object]]],
    group: Group = None,
) -> None:
    """Check this rank's arguments with ``prepare``, and that all ranks have the same model and settings.

    A rank whose arguments are wrong takes part in the exchange, so that no other rank waits for it.

    Args:
        call: the user's call, for messages.
        prepare: returns parameters and settings as :func:`agree_on_model` takes them, or raises.
        group: whose ranks take part; None is the world group.

    Raises:
        CommError: what ``prepare`` raised, on this rank; see :func:`as_refusal`.
        ArgumentError: on the ranks with right arguments; names the rank with wrong ones and its error.
        CollectiveMismatchError: as :func:`agree_on_model`.
    """
    error: CommError | None = None
    mine: dict[str, Any] = {"error": None, "parameters": [], "settings": {}}
    try:
        parameters, settings = prepare()
        mine["parameters"] = [_described(name, one) for name, one in parameters.items()]
        mine["settings"] = {name: repr(value) for name, value in settings.items()}
    except Exception as raised:
        error = as_refusal(call, raised)
        mine["error"] = str(error)
    everyones = allgather_object(mine, group)
    if error is not None:
        raise error
    ranks = get_process_group_ranks(group)
    for rank, one in zip(ranks, everyones, strict=True):
        if one["error"] is not None:
            raise ArgumentError(f"{call}: rank {rank} refused its arguments: {one['error']}")
    for part, difference in (("settings", _settings_difference), ("parameters", _parameters_difference)):
        expected, position = _most_common([one[part] for one in everyones])
        for rank, one in zip(ranks, everyones, strict=True):
            if one[part] != expected:
                raise CollectiveMismatchError(
                    f"{call}: {difference(one[part], expected, f'rank {rank}', f'rank {ranks[position]}')}"
                )


def as_refusal(call: str, error: Exception) -> CommError:
    """Return ``error``, which the check of arguments raised, or an ``ArgumentError`` that it is the cause of."""
    if isinstance(error, CommError):
        return error
    refusal = ArgumentError(f"{call}: got arguments that cannot be used: {type(error).__name__}: {error}")
    refusal.__cause__ = error
    return refusal


def _described(name: str, tensor: torch.Tensor) -> list[Any]:
    # Dense memory is reduced in its own order; that of one element tells nothing.
    ordered = tensor.layout is torch.strided and not tensor.is_contiguous() and is_dense(tensor)
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    order = [stride for stride, size in zip(strides, tensor.shape, strict=False) if size > 1]
    if not ordered:  # an expanded one has the same elements more than once
        order = [min(stride, 1) for stride in order] if 0 in order else []
    return [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), order]


def _most_common(values: list[T]) -> tuple[T, int]:
    """Return the value that most ranks have, and the first position of it."""
    texts = [repr(value) for value in values]
    position = texts.index(Counter(texts).most_common(1)[0][0])
    return values[position], position


def _settings_difference(got: dict[str, str], expected: dict[str, str], culprit: str, other: str) -> str:
    name = next(name for name in {**expected, **got} if got.get(name) != expected.get(name))
    return (
        f"{name}: got {got.get(name)} on {culprit} and {expected.get(name)} on {other}; expected the same on all ranks"
    )


def _parameters_difference(got: list[list[Any]], expected: list[list[Any]], culprit: str, other: str) -> str:
    place = next((place for place, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        place = min(len(got), len(expected))
    return (
        f"model: parameter {place} is {_text(got, place)} on {culprit} and {_text(expected, place)} on {other}; "
        "expected the same model on all ranks, with its parameters in the same order"
    )


def _text(described: list[list[Any]], place: int) -> str:
    if place >= len(described):
        return f"missing ({len(described)} parameters)"
    name, shape, dtype, order = described[place]
    return f"{name!r} of shape {tuple(shape)} and {dtype}" + (f", with strides {tuple(order)}" if order else "")
