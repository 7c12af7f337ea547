"""Reduction operations and the names they go by."""

from __future__ import annotations

import difflib
from enum import Enum
from typing import Any

from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown

__all__ = ["ReduceOp", "parse_reduce_op"]


class ReduceOp(Enum):
    """A reduce op; the values are those of ``deepspeed.comm.ReduceOp``."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7
    UNUSED = 8

    # Members are singletons. Enum's own hash runs Python code at every dictionary look-up of a call.
    __hash__ = object.__hash__


USABLE = tuple(op for op in ReduceOp if op is not ReduceOp.UNUSED)
_BY_NAME = {op.name.lower(): op for op in USABLE}
_NAMES = ", ".join(repr(name) for name in _BY_NAME)


# What these are called elsewhere.
_MEANT = {"mean": "avg", "average": "avg", "add": "sum", "prod": "product", "mul": "product"}


def parse_reduce_op(op: object, call: str = "") -> ReduceOp:
    """Turn a member, a ``torch.distributed.ReduceOp`` or a case-insensitive name into a :class:`ReduceOp`.

    Args:
        call: name of the function that ``op`` was given to, for the message.

    Raises:
        ArgumentError: an unknown name, or an operation that this API does not serve (``PREMUL_SUM``).
        ArgumentTypeError: anything else.
    """
    if isinstance(op, ReduceOp) and op is not ReduceOp.UNUSED:
        return op
    where = f"{call}: op" if call else "op"
    name = _name(op, where)
    found = _BY_NAME.get(name)
    if found is None:
        near = [_MEANT[name]] if name in _MEANT else difflib.get_close_matches(name, _BY_NAME, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if name == "premul_sum":
            hint = "; multiply the tensor by the factor before the call, with op='sum'"
        got = shown(op) if isinstance(op, str) else f"ReduceOp.{name.upper()}"
        raise ArgumentError(f"{where}: got {got}; expected one of {_NAMES}{hint}")
    return found


def _name(op: object, where: str) -> str:
    if isinstance(op, str):
        return op.lower()
    if isinstance(op, ReduceOp):
        return op.name.lower()
    kind = type(op)
    if kind.__module__.split(".")[0] == "torch" and kind.__name__ in ("ReduceOp", "RedOpType"):
        # torch.distributed.ReduceOp.SUM is an enumerator; ReduceOp(ReduceOp.SUM) wraps one and has no name of its own.
        torch_op: Any = op
        enumerator = torch_op if hasattr(op, "name") else torch_op.__getstate__()[0]
        return str(enumerator.name).lower()
    hint = "; give a group by name, group=..." if kind.__name__ == "ProcessGroup" else ""
    raise ArgumentTypeError(
        f"{where}: got {shown(op)} of type {kind.__name__}; expected a ReduceOp, a torch.distributed.ReduceOp or "
        f"one of {_NAMES}{hint}"
    )
