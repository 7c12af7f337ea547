"""``state_dict()`` and ``load_state_dict()`` of modules whose parameters are freed between uses (stage 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from comm_utils.errors import ArgumentError

__all__ = ["watch_state_calls"]


def watch_state_calls(model: nn.Module, is_open: Callable[[], bool]) -> Callable[[], None]:
    """Have these calls raise while parameters are freed, and return copies while they are not; return what ends this.

    Args:
        model: the model; its modules without parameters are left as they are.
        is_open: returns whether all parameters are gathered for the caller.
    """
    undo = [end for module in model.modules() if _has_parameters(module) for end in _watch(module, is_open)]

    def end_all() -> None:
        while undo:
            undo.pop()()

    return end_all


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _watch(own: nn.Module, is_open: Callable[[], bool]) -> list[Callable[[], None]]:
    # A copy of the module has these hooks, and its parameters are its own.

    def refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if module is own and not is_open():
            raise ArgumentError(
                "state_dict: got called on a model whose parameters are freed between uses (stage 3); use "
                "handle.full_state_dict() on all ranks, or handle.state_dict() for this rank's part"
            )

    def refuse_loading(module: nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if module is not own:
            return
        if metadata.get("assign_to_params_buffers"):
            raise ArgumentError(
                "load_state_dict: got assign=True, which replaces parameters that have the hooks of "
                "register_sharded_hooks(stage=3); call it without, or remove() the hooks before"
            )
        if not is_open():
            raise ArgumentError(
                "load_state_dict: got called on a model whose parameters are freed between uses (stage 3); call it "
                "within handle.full_parameters(writes=True)"
            )

    def copy(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        if module is not own:
            return
        for name in module._parameters:
            value = state_dict.get(prefix + name)
            # Views of a parameter would outlive its memory. Parameters themselves are what keep_vars=True asks for.
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                state_dict[prefix + name] = value.clone()

    hooked: Any = own
    return [
        hooked.register_state_dict_pre_hook(refuse).remove,
        hooked.register_load_state_dict_pre_hook(refuse_loading).remove,
        hooked.register_state_dict_post_hook(copy).remove,
    ]
