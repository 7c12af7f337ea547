"""``untraced.NAME``: the function NAME of this package for a compiled program, which calls it outside of its graph.

Where ``torch.compile`` traces a call that cannot be in a graph, the call goes here. The graph breaks once, torch says
that it broke at ``eager_NAME`` and why, and the call does what it does without a compiler.

A function that may be called without any tensor asks ``torch.compiler.is_dynamo_compiling()`` by this full name: torch
looks at the code of such a function only where it mentions a module of torch, and would otherwise trace what it calls.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup

from comm_utils.active import is_active, slot
from comm_utils.backend import Work
from comm_utils.errors import CommError
from comm_utils.reduce_op import ReduceOp, parse_reduce_op

all_gather: Callable[..., Any]
all_gather_coalesced: Callable[..., Work | None]
all_gather_into_tensor: Callable[..., Work | None]
all_reduce: Callable[..., Work | None]
all_reduce_coalesced: Callable[..., Work | None]
all_to_all: Callable[..., Work | None]
all_to_all_single: Callable[..., Work | None]
barrier: Callable[..., Work | None]
batch_isend_irecv: Callable[..., list[Work]]
broadcast: Callable[..., Work | None]
gather: Callable[..., Work | None]
inference_all_reduce: Callable[..., Work | None]
irecv: Callable[..., Work | None]
isend: Callable[..., Work | None]
monitored_barrier: Callable[..., None]
recv: Callable[..., Any]
reduce: Callable[..., Work | None]
reduce_scatter: Callable[..., Work | None]
reduce_scatter_coalesced: Callable[..., Any]
reduce_scatter_tensor: Callable[..., Work | None]
scatter: Callable[..., Work | None]
send: Callable[..., Work | None]

all_gather_object: Callable[..., None]
allgather_object: Callable[..., Any]
broadcast_object: Callable[..., Any]
broadcast_object_list: Callable[..., None]
gather_object: Callable[..., None]
recv_object_list: Callable[..., int]
reduce_object: Callable[..., Any]
scatter_object_list: Callable[..., None]
send_object_list: Callable[..., None]

NO_OP = "no op"
#: :func:`_serves`, asked once while tracing.
serves: Callable[[str, Any, torch.dtype, str, ProcessGroup | None], bool]

_WHOLE = (
    "{name} goes into a graph only without async_op and timeout, on contiguous tensors that need no gradient, and with "
    "an op and a dtype that the library of the group has"
)
_REASONS = dict.fromkeys(
    ("all_gather_into_tensor", "all_reduce", "all_to_all_single", "inference_all_reduce", "reduce_scatter_tensor"),
    _WHOLE,
)
_NEVER = "{name} has no form that torch.compile could put into a graph"
_OBJECTS = "{name} exchanges Python objects, which cannot be in a graph"


def __getattr__(name: str) -> Any:
    """Made when it is asked for: what ``torch.compiler`` is needed for imports a compiler, which takes seconds."""
    if name not in __annotations__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "serves":
        constant: Any = torch.compiler.assume_constant_result
        globals()[name] = found = constant(_serves)
        return found
    is_object = "object" in name
    package = importlib.import_module("comm_collectives.objects" if is_object else "comm_collectives")
    reason = _REASONS.get(name, _OBJECTS if is_object else _NEVER).format(name=name)
    globals()[name] = found = _eager(getattr(package, name), reason)
    return found


def _eager(function: Callable[..., Any], reason: str) -> Any:
    def eager(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    eager.__name__ = eager.__qualname__ = f"eager_{function.__name__}"
    disable: Any = torch.compiler.disable
    if "reason" in inspect.signature(disable).parameters:  # not in torch 2.6
        return disable(eager, reason=reason)
    return disable(eager)


def _serves(operation: str, op: Any, dtype: torch.dtype, device: str, group: ProcessGroup | None) -> bool:
    """Return whether the group is fit and its library does just this itself.

    ``op`` is :data:`NO_OP` if nothing is reduced.
    """
    if not is_active():
        return True  # torch.distributed alone was set up: there is nothing of ours to call instead
    try:
        capabilities = slot.backend.capabilities(group, device)
        slot.backend.check_group(group)
        if op == NO_OP:
            return operation in capabilities.operations and dtype in capabilities.dtypes
        reduce_op = parse_reduce_op(op, operation)
        # A library may have this operation for sums alone.
        native = operation in capabilities.operations or reduce_op is ReduceOp.SUM
        return native and (reduce_op, dtype) in capabilities.reductions
    except (CommError, AttributeError, LookupError, RuntimeError, TypeError):
        return False  # a group or an op that is wrong, as the call outside of the graph says
