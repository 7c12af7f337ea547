"""Checks all calls of a block before the first of them sends anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from comm_collectives.all_gather import all_gather, all_gather_into_tensor, check_all_gather, check_into_tensor
from comm_collectives.arguments import check_tensor, enter
from comm_collectives.collectives import all_reduce
from comm_collectives.reduce_scatter import check_reduce_scatter, reduce_scatter_tensor
from comm_utils.backend import Backend
from comm_utils.errors import ArgumentError, ArgumentTypeError, CommError
from comm_utils.fast_path import FastPathKey
from comm_utils.reduce_op import parse_reduce_op
from comm_utils.torch_support.reduction_encoding import encoding_for

__all__ = ["Call", "are_right", "check"]


class Call(NamedTuple):
    """One call of a block; ``number`` counts all of them, from 1."""

    number: int
    key: FastPathKey
    tensors: tuple[Any, ...]


def check(calls: Sequence[Call]) -> None:
    """Check the arguments of all calls, as each of them would.

    Raises:
        ArgumentError, ArgumentTypeError, BrokenGroupError: the first that is wrong, with its number.
    """
    backends: dict[FastPathKey, Backend | None] = {}
    for call in calls:
        try:
            if call.key not in backends:
                backends[call.key] = enter(call.key[0], call.key[2])
            _check(backends[call.key], call.key, call.tensors)
        except CommError as error:
            error.args = (f"{error} (call {call.number} within coalescing())",)
            raise


def are_right(key: FastPathKey, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether calls of one kind, each with one of these tensors, have arguments that are right.

    Raises:
        CommError: the group cannot be used.
    """
    try:
        backend = enter(key[0], key[2])
        for tensor in tensors:
            _check(backend, key, (tensor,))
    except (ArgumentError, ArgumentTypeError):
        return False
    return True


def _check(backend: Backend | None, key: FastPathKey, tensors: tuple[Any, ...]) -> None:
    name, op, group = key
    if backend is not None:  # else this rank is no member, and the call does nothing
        _CHECKS[name](name, backend, tensors, op, group)


def _check_all_reduce(name: str, backend: Backend, tensors: tuple[Any, ...], op: Any, group: Any) -> None:
    (tensor,) = tensors
    check_tensor(name, "tensor", tensor, backend, group, written=True)
    _check_op(name, op, tensor, backend, group)


def _check_all_gather(name: str, backend: Backend, tensors: tuple[Any, ...], _: Any, group: Any) -> None:
    outputs, source = tensors
    check_all_gather(name, outputs, source, backend, group)


def _check_into_tensor(name: str, backend: Backend, tensors: tuple[Any, ...], _: Any, group: Any) -> None:
    output, source = tensors
    check_into_tensor(name, output, source, backend, group)


def _check_reduce_scatter(name: str, backend: Backend, tensors: tuple[Any, ...], op: Any, group: Any) -> None:
    output, source = tensors
    check_reduce_scatter(name, output, source, backend, group)
    _check_op(name, op, source, backend, group)


def _check_op(name: str, op: Any, tensor: torch.Tensor, backend: Backend, group: Any) -> None:
    encoding_for(name, parse_reduce_op(op, name), tensor.dtype, backend.capabilities(group, tensor.device.type))


_CHECKS: dict[str, Callable[[str, Backend, tuple[Any, ...], Any, Any], None]] = {
    all_reduce.__name__: _check_all_reduce,
    all_gather.__name__: _check_all_gather,
    all_gather_into_tensor.__name__: _check_into_tensor,
    reduce_scatter_tensor.__name__: _check_reduce_scatter,
}
