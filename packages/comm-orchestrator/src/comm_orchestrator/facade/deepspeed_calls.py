"""Calls that DeepSpeed makes in ways that this API refuses to its own users, or that it expects to act otherwise.

``comm_orchestrator.deepspeed.replace_comm()`` puts them into ``deepspeed.comm``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch

import comm_collectives
from comm_collectives.in_order import in_order
from comm_utils import operations

__all__ = ["all_gather", "as_expected"]


@functools.wraps(comm_collectives.all_gather)
def all_gather(tensor_list: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Collect every rank's tensor, as :func:`comm_collectives.all_gather`; one output may stand for several ranks.

    DeepSpeed's Muon pads its last list with one tensor, and does not read what arrives there.

    Args:
        tensor_list: W tensors; one that is there several times receives the data of the last of these ranks, as in
            torch.
        *args: as there.
        **kwargs: as there.
    """
    if isinstance(tensor_list, (list, tuple)) and len(set(map(id, tensor_list))) < len(tensor_list):
        tensor_list = _without_repetition(tensor_list)
    return comm_collectives.all_gather(tensor_list, *args, **kwargs)


def _without_repetition(outputs: Sequence[Any]) -> list[Any]:
    """Return the list with new memory at all places of a tensor but its last one."""
    last = {id(output): position for position, output in enumerate(outputs)}
    return [
        torch.empty_like(output, requires_grad=False)
        if isinstance(output, torch.Tensor) and position < last[id(output)]
        else output
        for position, output in enumerate(outputs)
    ]


def as_expected(value: Any) -> Any:
    """Return what DeepSpeed takes for ``value``: collectives whose handles wait in order."""
    row = operations.find(value.__name__) if inspect.isfunction(value) else None
    if row is None or row.pattern.is_message or not {"group", "async_op"} <= inspect.signature(value).parameters.keys():
        return value
    return in_order(value)
