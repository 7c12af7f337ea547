"""Translation of the calls of ``deepspeed.comm`` and of older releases of torch.

Other names of parameters, and DeepSpeed's ``prof``, ``log_name`` and ``debug``, which tell its comms logger whether and
under which name to record a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from torch.compiler import is_dynamo_compiling

import comm_collectives
from comm_utils.active import slot
from comm_utils.errors import ArgumentTypeError

__all__ = ["ALIASES", "LABELS", "compatible", "shortened"]

_MISSING = object()
_SUM = "sum"

P = ParamSpec("P")
T = TypeVar("T")

#: function -> {other name: name of the parameter}
ALIASES: Mapping[str, Mapping[str, str]] = {
    "all_gather_coalesced": {
        "outputs": "output_tensors",
        "inputs": "input_tensors",
        "output_tensor_lists": "output_tensors",
        "input_tensor_list": "input_tensors",
    },
    "all_gather_into_tensor": {"output": "output_tensor", "input": "input_tensor", "tensor": "input_tensor"},
    "all_to_all": {"output_list": "output_tensor_list", "input_list": "input_tensor_list"},
    "all_to_all_single": {"output_tensor": "output", "input_tensor": "input", "tensor": "input"},
    "configure": {"deepspeed_config": "config"},
    "reduce_scatter": {"output_tensor": "output", "input": "input_list", "input_tensor": "input_list"},
    "reduce_scatter_tensor": {"output_tensor": "output", "input_tensor": "input", "tensor": "input"},
}

#: Parameters that DeepSpeed has on every call, at the end and in this order.
LABELS = ("prof", "log_name", "debug")


def compatible(function: Callable[P, T], labels: bool = True) -> Callable[P, T]:
    """Return ``function`` with other names of its parameters accepted as keywords, and with :data:`LABELS`.

    ``prof=True`` records the call even where the comms logger records only some operations, ``log_name`` is the name to
    record it under. ``debug`` is ignored: in DeepSpeed it is a text that no one reads.
    """
    name = function.__name__
    aliases = ALIASES.get(name, {})
    accepted = LABELS if labels else ()
    special = frozenset((*aliases, *accepted))
    code: Any = function
    positional = code.__code__.co_argcount

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if (kwargs and not special.isdisjoint(kwargs)) or len(args) > positional:
            return _adapted(function, aliases, accepted, positional, args, kwargs)
        return function(*args, **kwargs)

    return call


def shortened(full: Callable[P, T]) -> Callable[P, T]:
    """``full``, a compatible function of a tensor, an op and a group, by the fast path of the backend.

    What is looked up here was remembered by ``full`` when it had checked a like call.
    """
    name = full.__name__
    anything: Any = full

    @functools.wraps(full)
    def call(tensor: Any = _MISSING, op: Any = _SUM, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not (args or kwargs or is_dynamo_compiling()):
            try:
                shortest = slot.backend.prepared.get(name if op is _SUM and group is None else (name, group, op))
            except (RuntimeError, TypeError):  # not initialised, or no op: the full check says so
                shortest = None
            if shortest is not None and shortest(tensor):
                return None
        if tensor is _MISSING:
            given = {"group": group} if group is not None else {}
            return anything(*args, **(given if op is _SUM else {"op": op, **given}), **kwargs)
        return anything(tensor, op, group, *args, **kwargs)

    return call


def _adapted(
    function: Callable[..., T],
    aliases: Mapping[str, str],
    labels: tuple[str, ...],
    positional: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> T:
    name = function.__name__
    given = _canonical(name, aliases, kwargs)
    if len(args) <= positional + len(labels):
        for label, value in zip(labels, args[positional:], strict=False):
            if label in given:
                raise ArgumentTypeError(f"{name}: {label}: got it by position and by name; expected one of them")
            given[label] = value
        args = args[:positional]
    said = {label: given.pop(label, None) for label in labels}
    log_name, prof = said.get("log_name"), bool(said.get("prof"))
    if log_name is not None and not isinstance(log_name, str):
        raise ArgumentTypeError(f"{name}: log_name: got {log_name!r:.60}; expected a string")
    # What torch.compile puts into a graph is not recorded, under whatever name.
    if (not prof and log_name is None) or is_dynamo_compiling():
        return function(*args, **given)
    with comm_collectives.labelled(log_name, prof):
        return function(*args, **given)


def _canonical(name: str, aliases: Mapping[str, str], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in kwargs.items():
        parameter = aliases.get(key, key)
        if parameter in result:
            raise ArgumentTypeError(f"{name}: {key}: got it and another name of {parameter!r}; expected one of them")
        result[parameter] = value
    return result
