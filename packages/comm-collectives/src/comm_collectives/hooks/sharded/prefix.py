"""The prefix of names in a checkpoint, by which different tensors have different names in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from comm_collectives.hooks.handle import LAYERS, handles_of
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown

__all__ = ["check_names", "check_prefix"]


def check_prefix(call: str, prefix: object, model: nn.Module) -> None:
    """Check that there is a prefix where ranks have different tensors under the same names.

    Args:
        call: the user's call, for messages.
        prefix: what the user gave.
        model: whose hooks tell whether its layers are divided among ranks.

    Raises:
        ArgumentTypeError: ``prefix`` is no string.
        ArgumentError: it is empty, and layers of ``model`` are divided.
    """
    if not isinstance(prefix, str):
        raise ArgumentTypeError(f"{call}: prefix: got {shown(prefix)}; expected a string such as 'stage0.'")
    divided = [one for one in handles_of(model) if one.kind == LAYERS]
    if divided and not prefix:
        raise ArgumentError(
            f"{call}: prefix: got none for a model whose layers {divided[0].call}() divides among ranks, which would "
            "save different tensors under one name; give the ranks with the same part of the layers a prefix of their "
            "own, such as 'tensor0.' and 'tensor1.'"
        )


def check_names(state: Mapping[str, Any], model: nn.Module, prefix: str) -> None:
    """Check that the model's part of ``state`` has all parameters of ``model``, with ``prefix``; for loading.

    Raises:
        ArgumentError: names the first parameter that it has not, or it is no such state.
    """
    if "model" not in state:
        if "optimizer" not in state:
            raise ArgumentError(
                f"load_state_dict: state: got one with {shown(list(state)[:3])}; expected 'model', 'optimizer' or "
                "both, as in what state_dict() returns, or {'model': handle.full_state_dict()}"
            )
        return
    for name, _ in model.named_parameters():
        if prefix + name not in state["model"]:
            raise ArgumentError(
                f"load_state_dict: state: got nothing for parameter {prefix + name!r}; expected what state_dict() "
                f"returns here with prefix={prefix!r}"
            )
