"""Other names of parameters: DeepSpeed's and older ones of torch, in one table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from comm_utils.errors import ArgumentTypeError

__all__ = ["ALIASES", "accepting_aliases"]

P = ParamSpec("P")
T = TypeVar("T")

#: function -> {alias: name of the parameter}
ALIASES: Mapping[str, Mapping[str, str]] = {
    "all_gather_into_tensor": {"output": "output_tensor", "input": "input_tensor"},
    "all_gather_coalesced": {
        "outputs": "output_tensors",
        "inputs": "input_tensors",
        "output_tensor_lists": "output_tensors",
        "input_tensor_list": "input_tensors",
    },
    "reduce_scatter": {"output_tensor": "output", "input": "input_list", "input_tensor": "input_list"},
    "reduce_scatter_tensor": {"output_tensor": "output", "input_tensor": "input"},
    "all_to_all_single": {"output_tensor": "output", "input_tensor": "input"},
    "all_to_all": {"output_list": "output_tensor_list", "input_list": "input_tensor_list"},
}


def accepting_aliases(function: Callable[P, T]) -> Callable[P, T]:
    """``function`` with its aliases accepted as keywords; itself where it has none, so that it costs nothing."""
    name = function.__name__
    aliases = ALIASES.get(name)
    if aliases is None:
        return function

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if kwargs and not aliases.keys().isdisjoint(kwargs):
            return function(*args, **_canonical(name, aliases, kwargs))
        return function(*args, **kwargs)

    return call


def _canonical(name: str, aliases: Mapping[str, str], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in kwargs.items():
        parameter = aliases.get(key, key)
        if parameter in result:
            raise ArgumentTypeError(f"{name}: {key}: got it and another name of {parameter!r}; expected one of them")
        result[parameter] = value
    return result
