"""Objects of all ranks combined into one."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial, reduce
from numbers import Number
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup

from comm_collectives import graph_breaks
from comm_collectives.annotations import Op
from comm_collectives.arguments import enter, group_rank_of
from comm_collectives.collective import collective
from comm_collectives.memory import concatenate, contiguous_elements
from comm_collectives.object_codec import resolve_allow_pickle
from comm_collectives.objects.channel import Channel
from comm_collectives.objects.collective import exchange_to_root
from comm_collectives.reduction import encoding_for, fold
from comm_utils.backend import Capabilities
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.reduce_op import ReduceOp, parse_reduce_op

__all__ = ["reduce_object"]

_CALL = "reduce_object"
_CALLABLE = -1
# Everything is reduced here.
_NOTHING_NATIVE = Capabilities(frozenset(), frozenset(), frozenset())


@collective(compiled=graph_breaks.OBJECTS, labels=False)
def reduce_object(
    obj: Any,
    dst: int,
    op: Op | Callable[[Any, Any], Any] = "sum",
    group: ProcessGroup | None = None,
    *,
    allow_pickle: bool | None = None,
    timeout: float | timedelta | None = None,
) -> Any:
    """Combine every rank's object; return the result on ``dst``, None elsewhere.

    Numbers, and whatever a function combines, in rank order; tensors as ``comm_utils.kernels.reduce`` does.

    Args:
        obj: for an ``op`` by name, a number on every rank, which follows Python's arithmetic, also where it is one of
            numpy's, or a tensor of the same shape and dtype on every rank; only read. For a callable, anything that
            can be sent.
        dst: the global rank that gets the result.
        op: as for ``all_reduce``; or a function of two arguments, called on ``dst`` as in ``op(op(r0, r1), r2)``.
        allow_pickle: as for ``gather_object``.

    Raises:
        ArgumentTypeError: on the rank whose ``obj`` cannot be reduced.
        ArgumentError: on ``dst``, for objects that do not go together.
    """
    backend = enter(_CALL, group, timeout)
    if backend is None:
        return None
    unpickle = resolve_allow_pickle(_CALL, allow_pickle)
    named = None if _is_function(op) else parse_reduce_op(op, _CALL)
    if named is not None:
        obj = _as_python(obj)
    root = group_rank_of(_CALL, "dst", backend, group, dst, None)
    detail = _CALLABLE if named is None else named.value
    check = None if named is None else partial(_check, named)
    gathered = exchange_to_root(Channel(_CALL, backend, group), obj, root, detail, unpickle, check)
    if gathered is None:
        return None
    return reduce(cast("Callable[[Any, Any], Any]", op), gathered) if named is None else _combine(named, gathered)


def _is_function(op: Any) -> bool:
    # torch.distributed.ReduceOp's members can be called as well, in some releases; the classes make no result.
    if not callable(op) or isinstance(op, ReduceOp) or op in (ReduceOp, torch.distributed.ReduceOp):
        return False
    return type(op).__module__.split(".")[0] != "torch"


def _as_python(obj: Any) -> Any:
    """Return a number of numpy's as Python's, which has no largest value; all else as it is."""
    scalar: Any = getattr(sys.modules.get("numpy"), "generic", ())
    return obj.item() if isinstance(obj, scalar) and obj.dtype.kind in "biufc" else obj


def _check(op: ReduceOp, obj: Any) -> None:
    if isinstance(obj, torch.Tensor):
        encoding_for(_CALL, op, obj.dtype, _NOTHING_NATIVE)
    elif not isinstance(obj, Number):
        raise ArgumentTypeError(
            f"{_CALL}: obj: got a {type(obj).__name__}; op {op.name.lower()!r} takes a number or a tensor; for other "
            "objects pass a function of two arguments as op"
        )
    elif not _takes(op, obj):
        raise ArgumentTypeError(
            f"{_CALL}: obj: op {op.name.lower()!r} is not defined for a {type(obj).__name__}{_remedy(op)}"
        )


def _remedy(op: ReduceOp) -> str:
    return "" if op in _STEPS else "; pass a function of two arguments as op"


def _takes(op: ReduceOp, number: Any) -> bool:
    step = _STEPS.get(op)
    if step is None:
        return False
    try:
        step(number, number)
    except TypeError:
        return False
    except ArithmeticError:  # of this value, which may never meet itself
        return True
    return True


def _combine(op: ReduceOp, objects: list[Any]) -> Any:
    if any(isinstance(obj, torch.Tensor) for obj in objects):
        return _combine_tensors(op, objects)
    total = objects[0]
    for rank, obj in enumerate(objects[1:], 1):
        try:
            total = _STEPS[op](total, obj)
        except (ArithmeticError, TypeError) as error:
            raise ArgumentError(
                f"{_CALL}: obj: op {op.name.lower()!r} fails with {type(error).__name__} for {_described(obj)} of rank "
                f"{rank} of the group and {_described(total)} of the ranks before it; expected numbers of one type "
                "that it is defined for"
            ) from error
    if op is not ReduceOp.AVG:
        return total
    try:
        return total / len(objects)
    except OverflowError as error:
        raise ArgumentError(
            f"{_CALL}: obj: got integers whose average is beyond any float; use op='sum' and divide it by "
            f"{len(objects)}, in integers"
        ) from error


def _combine_tensors(op: ReduceOp, tensors: list[Any]) -> torch.Tensor:
    first = tensors[0]
    kinds = [_described(obj) for obj in tensors]
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ArgumentError(
                f"{_CALL}: obj: rank {rank} of the group sent {kind}, rank 0 {kinds[0]}; expected tensors of one "
                "dtype, shape and kind of device"
            )
    encoding = encoding_for(_CALL, op, first.dtype, _NOTHING_NATIVE)
    encoded = [encoding.encode(contiguous_elements(tensor)) for tensor in tensors]
    parts = concatenate(encoded).view(len(encoded), encoded[0].numel())
    result = torch.empty_like(first, requires_grad=False)
    elements = result.view(-1)
    total = encoding.encode(elements) if encoding.shares else parts.new_empty(parts.shape[1])
    fold(parts, encoding.op, total)
    if encoding.decode is not None:
        encoding.decode(total, elements, len(tensors))
    return result


def _described(obj: Any) -> str:
    if not isinstance(obj, torch.Tensor):
        return f"a {type(obj).__name__}"
    return f"a tensor of {obj.dtype}, {tuple(obj.shape)} on {obj.device.type}"


def _smaller(a: Any, b: Any) -> Any:
    return a if a != a or (b == b and a <= b) else b  # not-a-number wins, as in torch


def _larger(a: Any, b: Any) -> Any:
    return a if a != a or (b == b and a >= b) else b


_STEPS: Mapping[ReduceOp, Callable[[Any, Any], Any]] = {
    ReduceOp.SUM: operator.add,
    ReduceOp.AVG: operator.add,
    ReduceOp.PRODUCT: operator.mul,
    ReduceOp.MIN: _smaller,
    ReduceOp.MAX: _larger,
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
}
