"""``graph_breaks.NAME``: the checked body of NAME for a compiled program, which calls it outside of its graph.

Where ``torch.compile`` traces a call that cannot be in a graph, the call goes here. The graph breaks once, torch
reports that it broke at ``eager_NAME`` and why, and the call does what it does without a compiler.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup

from comm_collectives.call_sites import traced_line
from comm_collectives.compression.selection import threshold
from comm_collectives.graph_operators import define, is_coalescing, token_of
from comm_collectives.reduction import needed_order
from comm_utils.active import is_active, slot
from comm_utils.errors import CommError
from comm_utils.reduce_op import ReduceOp, parse_reduce_op

__all__ = ["NEVER", "NO_OP", "OBJECTS", "WHOLE", "add", "plan"]

NO_OP = "no op"
#: :func:`_plan`, asked once while tracing.
plan: Callable[[str, Any, torch.dtype, str, ProcessGroup | None], tuple[str, str, str, str]]

#: Reasons that torch reports; ``{name}`` is the call.
NEVER = "{name} has no form that torch.compile could put into a graph"
OBJECTS = "{name} exchanges Python objects, which cannot be in a graph"
WHOLE = (
    "{name} goes into a graph only without async_op, with a compression by name, on contiguous tensors of one dtype "
    "and device that need no gradient and are not complex, and not within coalescing(); on a GPU only where torch has "
    "the same; by torch.export only on the default group, as no other process has this one"
)

_added: dict[str, tuple[Callable[..., Any], str]] = {}


def add(name: str, function: Callable[..., Any], reason: str) -> None:
    """Let ``graph_breaks.name`` be ``function`` called outside of the graph, for ``reason``."""
    _added[name] = function, reason.format(name=name)


def __getattr__(name: str) -> Any:
    """Make the function when it is first needed: ``torch.compiler`` imports a compiler for it, which takes seconds."""
    if name == "plan":
        constant: Any = torch.compiler.assume_constant_result
        globals()[name] = found = constant(_plan)
        return found
    if name not in _added:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = _eager(name, *_added[name])
    return found


def _eager(name: str, function: Callable[..., Any], reason: str) -> Any:
    def eager(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    eager.__name__ = eager.__qualname__ = f"eager_{name}"
    disable: Any = torch.compiler.disable
    if "reason" in inspect.signature(disable).parameters:  # not in torch 2.6
        return disable(eager, reason=reason)
    return disable(eager)


def _plan(
    operation: str, op: Any, dtype: torch.dtype, device: str, group: ProcessGroup | None
) -> tuple[str, str, str, str]:
    """Return what a call becomes, the name of its op, the token of its group, and the line that makes it.

    It becomes an ``"operator"`` of ours, a call of ``"torch"``, or "": a break of the graph.

    Args:
        op: :data:`NO_OP` if nothing is reduced.
    """
    # torch 2.13 traces with a stand-in for the group, which must not get into a table of groups.
    group = getattr(group, "real_obj", group)
    is_ours = is_active() or not torch.distributed.is_initialized()
    try:
        name = "" if op == NO_OP else parse_reduce_op(op, operation).name.lower()
        if is_ours and device == "cpu":
            if not (group is None or isinstance(group, ProcessGroup)) or is_coalescing():
                return "", "", "", ""
            # A saved program would communicate in whichever group has the same token in the process that loads it.
            if group is not None and getattr(torch.compiler, "_is_exporting_flag", False):  # since torch 2.7
                return "", "", "", ""
            define()
            return "operator", name, token_of(group), traced_line()
        if not is_ours or _serves(operation, name, dtype, device, group):
            return "torch", name, "", ""
    except (CommError, AttributeError, LookupError, RuntimeError, TypeError):
        pass  # a group or an op that is wrong, as the call outside of the graph says
    return "", "", "", ""


def _serves(operation: str, op: str, dtype: torch.dtype, device: str, group: ProcessGroup | None) -> bool:
    """Return whether the group is fit, and its library does just this itself, without compression."""
    capabilities = slot.backend.capabilities(group, device)
    slot.backend.check_group(group)
    if threshold(operation, group) is not None:
        return False
    if not op:
        return operation in capabilities.operations and dtype in capabilities.dtypes
    reduce_op = parse_reduce_op(op, operation)
    if needed_order(group, reduce_op, dtype, capabilities, slot.backend.get_world_size(group)) is not None:
        return False
    # A library may have this operation for sums alone.
    native = operation in capabilities.operations or reduce_op is ReduceOp.SUM
    return native and (reduce_op, dtype) in capabilities.reductions
