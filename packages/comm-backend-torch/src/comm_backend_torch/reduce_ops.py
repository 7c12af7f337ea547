"""From any spelling of a reduction to the options objects that c10d takes, made once per spelling."""

from __future__ import annotations

from typing import Any

import torch.distributed as c10d

from comm_utils.reduce_op import ReduceOp, parse_reduce_op

__all__ = ["C10D_OPS", "OptionsTable", "op_name"]

C10D_OPS: dict[ReduceOp, Any] = {
    op: getattr(c10d.ReduceOp, op.name)
    for op in ReduceOp
    if op is not ReduceOp.UNUSED and hasattr(c10d.ReduceOp, op.name)
}


class OptionsTable(dict[object, Any]):
    """``table[op]`` is an options object with its reduction set; ``op`` is a member, a torch op or a name.

    c10d copies what it needs out of the object at every call, so one object serves all calls.
    """

    def __init__(self, kind: type, async_op: bool) -> None:
        super().__init__()
        self._kind = kind
        self._async_op = async_op

    def __missing__(self, op: object) -> Any:
        options = self._kind()
        options.reduceOp = C10D_OPS[parse_reduce_op(op)]
        set_async(options, self._async_op)
        self[op] = options
        return options


class _Names(dict[object, str]):
    def __missing__(self, op: object) -> str:
        name = self[op] = parse_reduce_op(op).name.lower()
        return name


_names = _Names()


def op_name(op: object) -> str:
    """Return the name of a reduce op, however it is given."""
    return _names[op]


def set_async(options: Any, async_op: bool) -> Any:
    """Tell a device backend whether to stay on the current stream; torch before 2.7 has no such choice."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = async_op
    return options
