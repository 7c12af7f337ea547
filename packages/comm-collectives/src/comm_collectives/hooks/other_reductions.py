"""Models whose gradients torch reduces itself: hooks that reduce them once more would give wrong ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_utils.errors import ArgumentError

__all__ = ["refuse_in_ddp", "refuse_reduced"]

_REMEDY = "use hooks.use_reduction() with what torch reduces, or register hooks on a model that is not wrapped"


def refuse_reduced(call: str, model: nn.Module) -> None:
    """Check that no module of ``model`` has its gradients reduced by torch.

    Args:
        call: the user's call, for messages.

    Raises:
        ArgumentError: names the module.
    """
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel) or hasattr(module, "set_requires_gradient_sync"):
            got = f"one with a {type(module).__name__}, {name!r}" if name else f"a {type(module).__name__}"
            raise ArgumentError(f"{call}: model: got {got}, which reduces gradients itself; {_REMEDY}")


def refuse_in_ddp(call: str, parameters: Mapping[str, torch.Tensor]) -> None:
    """Check that no forward of a ``DistributedDataParallel`` which reduces one of ``parameters`` is under way.

    Args:
        call: the user's call, for messages.

    Raises:
        ArgumentError: names the parameter.
    """
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if active is None:
        return
    reduced = {id(one) for one in active._module_parameters if one.requires_grad}
    for name, one in parameters.items():
        if id(one) in reduced:
            raise ArgumentError(
                f"{call}: DistributedDataParallel reduces the gradient of parameter {name!r}, and so would the hooks "
                f"of register_data_parallel_hooks(); {_REMEDY}"
            )
