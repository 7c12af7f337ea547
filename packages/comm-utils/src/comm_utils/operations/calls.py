"""The arguments of a call, put together from the roles in its row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from comm_utils.operations.types import Argument, Direction, Form, Operation, Role

__all__ = ["DEFAULTS", "positional", "tensor_for"]

#: What functions take where a role is left out; None for all other roles.
DEFAULTS: Mapping[Role, object] = {Role.OP: "sum", Role.ASYNC_OP: False, Role.TAG: 0}


def positional(
    row: Operation,
    tensors: Callable[[Argument], object],
    values: Mapping[Role, object],
    defaults: Mapping[Role, object] = DEFAULTS,
) -> tuple[Any, ...]:
    """Return the positional arguments of a call, as one writes it: defaults at the end are left out.

    Args:
        tensors: returns what to give for an argument of the role TENSOR.
        values: the others, by role; what is missing takes its default.
    """
    found: list[object] = []
    written = 0
    for one in row.arguments:
        is_tensor, default = one.role is Role.TENSOR, defaults.get(one.role)
        value = tensors(one) if is_tensor else values.get(one.role, default)
        found.append(value)
        if is_tensor or (value is not default and not (isinstance(value, str | int) and value == default)):
            written = len(found)
    return tuple(found[:written])


def tensor_for(
    one: Argument, source: Any, target: Any, split: Callable[[Any], list[Any]], is_root: bool = True
) -> object:
    """Return what to give for the tensor argument ``one``.

    Args:
        source: the memory that the call reads; of a call in place, the only one.
        target: the memory that it writes.
        split: cuts memory into one tensor for each rank.
        is_root: the caller is the root, or there is none.
    """
    memory = target if one.direction is Direction.OUTPUT else source
    if one.form is not Form.PER_RANK:
        return memory
    return split(memory) if is_root or not one.at_root else None
