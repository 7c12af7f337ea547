"""Reduction operations and the names they go by."""

from __future__ import annotations

import difflib
from enum import Enum

from comm_utils.errors import ArgumentError, ArgumentTypeError

__all__ = ["ReduceOp", "parse_reduce_op"]


class ReduceOp(Enum):
    """How elements of several ranks become one; the values are those of ``deepspeed.comm.ReduceOp``."""

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


def parse_reduce_op(op: object) -> ReduceOp:
    """Turn a member, a ``torch.distributed.ReduceOp`` or a case-insensitive name into a :class:`ReduceOp`.

    Raises:
        ArgumentError: an unknown name, or an operation that this API does not serve (``PREMUL_SUM``).
        ArgumentTypeError: anything else.
    """
    if isinstance(op, ReduceOp):
        if op is ReduceOp.UNUSED:
            raise ArgumentError(f"op: got ReduceOp.UNUSED; expected one of {_names()}")
        return op
    if isinstance(op, str):
        name = op.lower()
    else:
        name = _torch_name(op)
    found = _BY_NAME.get(name)
    if found is None:
        near = difflib.get_close_matches(name, _BY_NAME, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ArgumentError(f"op: got {op!r}; expected one of {_names()}{hint}")
    return found


def _torch_name(op: object) -> str:
    # torch.distributed.ReduceOp.SUM is an enumerator; ReduceOp(ReduceOp.SUM) wraps one and has no name of its own.
    kind = type(op)
    if kind.__module__.split(".")[0] == "torch":
        enumerator = op if hasattr(op, "name") else op.__getstate__()[0]  # type: ignore[attr-defined, index]
        return str(enumerator.name).lower()  # type: ignore[union-attr]
    raise ArgumentTypeError(
        f"op: got {op!r} of type {kind.__name__}; expected a ReduceOp, a torch.distributed.ReduceOp or one of {_names()}"
    )


def _names() -> str:
    return ", ".join(repr(name) for name in _BY_NAME)
