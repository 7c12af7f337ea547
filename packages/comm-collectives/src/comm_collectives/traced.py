"""Calls made while ``torch.compile`` traces.

A synchronous collective on tensors of the CPU becomes an operator of ours (:mod:`.graph_operators`). One on another
device, or where ``torch.distributed`` alone was set up, becomes torch's own, which the compiler may overlap with
computing, where the group's library does just this. The rest is called outside of the graph (:mod:`.graph_breaks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as c10d

from comm_collectives import graph_breaks
from comm_collectives.graph_operators import FORMS, ORDER
from comm_utils.reduce_op import ReduceOp
from comm_utils.torch_support.c10d_ops import C10D_OPS

__all__ = ["call"]

_C10D_OPS: dict[str, Any] = {op.name.lower(): one for op, one in C10D_OPS.items()}
# torch 2.6 cannot pass an op of its own to a function that is asked while tracing.
_ENUMERATORS_ARE_CONSTANTS = hasattr(torch._C._dynamo.eval_frame, "_FrameExecStrategy")


def call(name: str, given: dict[str, Any], log_name: str | None = None, prof: bool = False) -> Any:
    """Trace the call ``name``, which has a form in graphs.

    Args:
        given: every argument by its own name.
        log_name, prof: as of ``labelled()``.
    """
    first, arguments = _arguments(name, given)
    op = given.get("op", graph_breaks.NO_OP)
    if first is not None and (_ENUMERATORS_ARE_CONSTANTS or isinstance(op, (str, ReduceOp))):
        way, op, token, line = graph_breaks.plan(name, op, first.dtype, first.device.type, given["group"])
        # Inductor fails on these; an export compiles nothing.
        is_taken = getattr(torch.compiler, "_is_exporting_flag", False) or not _any_complex(name, arguments)
        if way == "operator" and is_taken:
            arguments.update({"op": op, "group": token})
            values = [arguments[argument] for argument, _ in FORMS[name]]
            getattr(torch.ops.comm_collectives, name)(*values, log_name, prof, line, ORDER)
            return None
        is_plain = name in _CALLS and given["timeout"] is None and given["compression"] is None
        if way == "torch" and is_plain and _CALLS[name](given, op):
            return None
    if prof or log_name is not None:
        return getattr(graph_breaks, name)(**given, log_name=log_name, prof=prof)
    return getattr(graph_breaks, name)(**given)


def _arguments(name: str, given: dict[str, Any]) -> tuple[torch.Tensor | None, dict[str, Any]]:
    """Return the arguments of the operator, and the first tensor among them; no tensor if a graph cannot have them."""
    first, found = None, dict(given)
    if given["async_op"]:
        return None, found
    for argument, kind in FORMS[name]:
        value = given[argument]
        if kind in _ACCEPTS:
            if value is not None and not _ACCEPTS[kind](value):
                return None, found
            continue
        if kind == "TENSOR":
            value = [value]
        else:
            if value is None and kind == "TENSORS_AT_ROOT":
                value = []
            if not isinstance(value, (list, tuple)):
                return None, found
            found[argument] = list(value)
        for tensor in value:
            if not _fits(tensor):
                return None, found
            if first is None:
                first = tensor
            elif tensor.device != first.device or (tensor.dtype != first.dtype and kind != "ANY_TENSORS"):
                return None, found
    return first, found


def _any_complex(name: str, arguments: dict[str, Any]) -> bool:
    """Return whether a tensor is complex. Inductor fails on an operator that writes something and has one of these."""
    for argument, kind in FORMS[name]:
        if kind == "TENSOR":
            if arguments[argument].is_complex():
                return True
        elif kind not in _ACCEPTS and any(tensor.is_complex() for tensor in arguments[argument]):
            return True
    return False


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_integer(value)


def _are_integers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(_is_integer(one) for one in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_anything(value: Any) -> bool:
    return True  # the plan looks at ops and groups


#: Values other than None that the schema takes, by the kind of argument.
_ACCEPTS: dict[str, Callable[[Any], bool]] = {
    "OP": _is_anything,
    "GROUP": _is_anything,
    "ROOT": _is_integer,
    "GROUP_ROOT": _is_integer,
    "INPUT_SPLITS": _are_integers,
    "OUTPUT_SPLITS": _are_integers,
    "TIMEOUT": _is_number,
    "COMPRESSION": _is_text,
}


def _fits(tensor: Any) -> bool:
    if not isinstance(tensor, torch.Tensor) or hasattr(tensor, "to_local") or tensor.layout is not torch.strided:
        return False
    return tensor.is_contiguous() and not (tensor.requires_grad and torch.is_grad_enabled())


# --- torch's own functions: each returns whether the sizes are right, as torch does not look at all of them


def _all_reduce(given: dict[str, Any], op: str) -> bool:
    c10d.all_reduce(given["tensor"], op=_C10D_OPS[op], group=given["group"])
    return True


def _all_gather_into_tensor(given: dict[str, Any], op: str) -> bool:
    output, source, group = given["output_tensor"], given["input_tensor"], given["group"]
    if output.numel() != c10d.get_world_size(group) * source.numel():
        return False
    c10d.all_gather_into_tensor(output.view(-1), source.view(-1), group=group)
    return True


def _reduce_scatter_tensor(given: dict[str, Any], op: str) -> bool:
    output, source, group = given["output"], given["input"], given["group"]
    if source.numel() != c10d.get_world_size(group) * output.numel():
        return False
    c10d.reduce_scatter_tensor(output.view(-1), source.view(-1), op=_C10D_OPS[op], group=group)
    return True


def _all_to_all_single(given: dict[str, Any], op: str) -> bool:
    output, source, group = given["output"], given["input"], given["group"]
    rows_out, rows_in = given["output_split_sizes"], given["input_split_sizes"]
    if output.shape[1:] != source.shape[1:] or not (
        _are_rows(output, rows_out, group) and _are_rows(source, rows_in, group)
    ):
        return False
    c10d.all_to_all_single(output, source, rows_out, rows_in, group=group)
    return True


def _are_rows(tensor: torch.Tensor, sizes: Any, group: Any) -> bool:
    """Return whether ``sizes``, or equal ones for None, are those of the rows of ``tensor``."""
    W = c10d.get_world_size(group)
    if tensor.dim() == 0:
        return False
    return tensor.shape[0] % W == 0 if sizes is None else len(sizes) == W and sum(sizes) == tensor.shape[0]


#: The calls that torch can trace as well, and that do what ours do.
_CALLS: Mapping[str, Callable[[dict[str, Any], str], bool]] = {
    "all_reduce": _all_reduce,
    "inference_all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all_single": _all_to_all_single,
}
