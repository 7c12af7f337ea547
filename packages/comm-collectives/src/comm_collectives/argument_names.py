"""The spellings of arguments of ``deepspeed.comm`` and of older torch, which every collective accepts.

Other names of parameters, and DeepSpeed's ``prof``, ``log_name`` and ``debug``, which tell its comms logger whether and
under which name to record a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch.compiler import is_dynamo_compiling

from comm_collectives import traced
from comm_collectives.arguments import as_flag
from comm_collectives.graph_operators import FORMS
from comm_collectives.keyword_errors import explain_call
from comm_collectives.labels import labelled
from comm_utils.errors import ArgumentTypeError
from comm_utils.given import shown
from comm_utils.operations.table import ROWS

__all__ = ["ALIASES", "LABELS", "MISSING", "call_with", "refuse_incomplete"]

#: function -> {other name: name of the parameter}
ALIASES: Mapping[str, Mapping[str, str]] = {
    **{row.name: row.aliases for row in ROWS if row.aliases},
    "configure": {"deepspeed_config": "config"},
}

#: Parameters that DeepSpeed has on every call, at the end and in this order.
LABELS = ("prof", "log_name", "debug")


class _Missing:
    """Stands for an argument that was not given; no tensor, so that no fast path takes it."""

    def __repr__(self) -> str:
        return "nothing"


MISSING: Any = _Missing()


def refuse_incomplete(function: Callable[..., Any], given: Mapping[str, Any]) -> NoReturn:
    """Raise ArgumentTypeError for a call that lacks a required argument.

    Args:
        given: every argument by its own name; :data:`MISSING` where there was none.
    """
    _refuse(function, _without_missing(given))


def call_with(
    function: Callable[..., Any],
    positional: Sequence[str],
    labels: Sequence[str],
    given: Mapping[str, Any],
    more: Sequence[Any],
    named: Mapping[str, Any],
) -> Any:
    """Call ``function`` with what was given under other names, or beyond its own parameters.

    ``prof=True`` records the call even where the comms logger records only some operations, ``log_name`` is the name to
    record it under. ``debug`` is ignored: in DeepSpeed it is a text that no one reads.

    Args:
        positional: names of the function's parameters that may be given by position.
        labels: those of :data:`LABELS` that it takes.
        given: every argument by its own name; :data:`MISSING` where there was none.
        more: arguments by position after the last one.
        named: arguments by a name that is no parameter's.
    """
    name: str = function.__name__
    if len(more) > len(labels):
        takes, got = len(positional), len(positional) + len(more)
        raise ArgumentTypeError(f"{name}() takes {takes} positional arguments but {got} were given")
    arguments = _without_missing(given)
    said: dict[str, Any] = {}
    for place, value in enumerate(more):  # torch 2.6 cannot trace a zip of different lengths
        said[labels[place]] = value
    aliases = ALIASES.get(name, {})
    for key, value in named.items():
        if key in labels:
            if key in said:
                raise ArgumentTypeError(f"{name}: {key}: got it by position and by name; expected one of them")
            said[key] = value
            continue
        parameter = aliases.get(key)
        if parameter is None:
            _refuse(function, {**arguments, key: value}, [*aliases, *labels])
        if arguments.get(parameter) is not None:
            raise ArgumentTypeError(f"{name}: {key}: got it and another name of {parameter!r}; expected one of them")
        arguments[parameter] = value
    log_name, prof = said.get("log_name"), as_flag(name, "prof", said.get("prof"))
    if log_name is not None and not isinstance(log_name, str):
        raise ArgumentTypeError(f"{name}: log_name: got {shown(log_name)}; expected a string")
    if is_dynamo_compiling():
        if name in FORMS:
            return traced.call(name, arguments, log_name, prof)
        return function(**arguments)
    if not prof and log_name is None:
        return function(**arguments)
    with labelled(log_name, prof):
        return function(**arguments)


def _without_missing(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not MISSING}


def _refuse(function: Callable[..., Any], arguments: Mapping[str, Any], other_names: Sequence[str] = ()) -> NoReturn:
    explained = explain_call(function, (), arguments, other_names=other_names)
    raise explained or ArgumentTypeError(f"{function.__name__}: got arguments that do not fit its signature")
