"""Right arguments of every call, made from what the table of operations says about each argument."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

import comm_orchestrator as dist
from comm_utils import operations
from comm_utils.operations import Argument, Direction, Form, OperationSpec, Role, Side

__all__ = [
    "COLLECTIVES",
    "MESSAGES",
    "OBJECTS",
    "REDUCING",
    "TENSORS",
    "Arguments",
    "call",
    "call_both_sides",
    "check_group_works",
    "ones",
    "operation",
    "peer",
    "places",
    "positional",
    "right",
    "root_argument",
    "tensors",
]

Arguments: TypeAlias = dict[str, Any]

#: Elements of a rank's part.
PART = 4


def operation(name: str) -> OperationSpec:
    return operations.get(name)


def _names(*, tensors: bool) -> list[str]:
    return [row.name for row in operations.rows() if bool(row.tensors) is tensors]


#: Calls with tensors, and those with objects or nothing.
TENSORS = _names(tensors=True)
OBJECTS = _names(tensors=False)
REDUCING = [name for name in TENSORS if operation(name).argument(Role.OP)]
MESSAGES = [name for name in TENSORS if operation(name).pattern.is_message]
COLLECTIVES = [name for name in TENSORS if name not in MESSAGES]


def ones(n: int = PART, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(n, dtype=dtype)


def tensors(count: int, n: int = PART, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [ones(n, dtype) for _ in range(count)]


def peer(rank: int) -> int:
    """Return the other one of two ranks, and any other of more."""
    return 1 if rank == 0 else 0


def root_argument(row: OperationSpec) -> str:
    found = row.argument(Role.ROOT)
    assert found is not None
    return found.name


def right(name: str, rank: int, W: int) -> Arguments:
    """Return right keywords of the call on ``rank`` of ``W``; roots are rank 0, messages go to :func:`peer`."""
    row = operation(name)
    found: Arguments = {}
    for argument in row.arguments:
        elsewhere = argument.at_root and rank != 0
        if argument.role is Role.TENSOR:
            found[argument.name] = None if elsewhere else _tensor(row, argument, W)
        elif argument.role is Role.OBJECT:
            found[argument.name] = None if elsewhere else _object(argument, rank, W)
        elif argument.role is Role.ROOT:
            found[argument.name] = peer(rank) if row.pattern.is_message else 0
    return found


def _tensor(row: OperationSpec, argument: Argument, W: int) -> Any:
    if argument.form is Form.PER_RANK:
        return tensors(W)
    family = row.pattern.name
    whole = (
        argument.form is Form.FLAT
        or family == "all_to_all"
        or (family == "all_gather" and argument.direction is Direction.OUTPUT and argument.form is Form.SEVERAL)
        or (family == "reduce_scatter" and argument.direction is Direction.INPUT and argument.form is Form.SEVERAL)
    )
    size = PART * W if whole else PART
    return tensors(2, size) if argument.form is Form.SEVERAL else ones(size)


def _object(argument: Argument, rank: int, W: int) -> Any:
    empty = argument.direction is Direction.OUTPUT
    if argument.form is Form.PER_RANK:
        return [None] * W if empty else list(range(W))
    if argument.form is Form.SEVERAL:
        return [None] if empty else [rank]
    return rank


def positional(name: str, arguments: Arguments) -> tuple[list[Any], Arguments]:
    """Return the same arguments with the first ones by position, as most programs call."""
    rest, first = dict(arguments), []
    parameters = inspect.signature(getattr(dist, name)).parameters
    for argument in operation(name).arguments:
        if argument.name not in rest or parameters[argument.name].kind is inspect.Parameter.KEYWORD_ONLY:
            break
        first.append(rest.pop(argument.name))
    return first, rest


def call(name: str, arguments: Arguments, by_position: bool = False) -> Any:
    """Make the call and wait for its handle, where it returns one."""
    first, rest = positional(name, arguments) if by_position else ([], arguments)
    result = getattr(dist, name)(*first, **rest)
    return result.wait() if isinstance(result, dist.Work) else result


def call_both_sides(name: str, group: Any = None) -> None:
    """Make the right call on both of two ranks, a message once in each direction."""
    rank = dist.get_rank()
    if not operation(name).pattern.is_message:
        call(name, {**right(name, rank, 2), "group": group})
        return
    for sender in (0, 1):
        send, receive = name.replace("recv", "send"), name.replace("send", "recv")
        side = send if rank == sender else receive
        call(side, {**right(side, rank, 2), "group": group})


def check_group_works(group: Any = None) -> None:
    """Check an all_reduce of a native dtype, and one of a dtype that is built from other operations."""
    W = dist.get_world_size(group)
    for dtype in (torch.float32, torch.int16):
        tensor = torch.full((3,), dist.get_rank(group) + 1, dtype=dtype)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [W * (W + 1) / 2] * 3


def places(name: str) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Return the tensors of a call on two ranks: keyword with index, ranks that look at it, whether they write it."""
    row = operation(name)
    for argument in row.tensors:
        where = argument.name if argument.form in (Form.SINGLE, Form.FLAT) else f"{argument.name}[1]"
        if argument.at_root:
            yield where, (0,), argument.is_written
        elif row.pattern.is_rooted and argument.direction is Direction.IN_OUT:
            root_receives = any(move.receivers is Side.ROOT for move in row.pattern.moves)
            yield where, (0,), root_receives
            yield where, (1,), not root_receives
        else:
            yield where, (0, 1), argument.is_written
