"""Parameters that a model gets after its hooks were registered: nothing reduces the gradients of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from comm_utils.errors import ArgumentError

__all__ = ["ModelChanges", "refuse_assignment"]

_CHANGES = "load_state_dict(assign=True), torch.nn.utils.parametrizations or a new module"


class ModelChanges:
    """Remembers the parameters that ``model`` has now.

    Args:
        model: the model.
        consequence: of a gradient of another parameter, for messages.
        ignored: parameters that may be replaced.
    """

    def __init__(self, model: nn.Module, consequence: str, ignored: Iterable[nn.Parameter] = ()) -> None:
        self._model, self._consequence = model, consequence
        skipped = set(map(id, ignored))
        every = list(model.named_parameters(remove_duplicate=False))
        self._replaceable = {name for name, one in every if id(one) in skipped}
        self._kept: list[Any] = [one for _, one in every]
        self._modules: list[tuple[nn.Module, list[nn.Module | None]]] = []
        self._find_modules()
        # By id, what a conversion replaces after torch.__future__.set_swap_module_params_on_conversion(True): it takes
        # the hooks along. Autograd's references keep it, so that its address means nothing else.
        with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
            self._known = {id(one): one._cdata for _, one in every}
            self._kept += [get_gradient_edge(one) for _, one in every if one.requires_grad]

    def _find_modules(self) -> None:
        self._modules = [(one, list(one._modules.values())) for one in self._model.modules()]

    def refuse_added(self, call: str) -> None:
        """Check that no parameter that requires a gradient was added, or has taken the place of another.

        Args:
            call: the user's call, for messages.

        Raises:
            ArgumentError: names the parameter.
        """
        if any(children != list(module._modules.values()) for module, children in self._modules):
            self._find_modules()
        for module, _ in self._modules:
            for one in module._parameters.values():
                if one is not None and self._known.get(id(one)) != one._cdata and one.requires_grad:
                    self._refuse(call)
                    return

    def _refuse(self, call: str) -> None:
        for name, one in self._model.named_parameters(remove_duplicate=False):
            if self._known.get(id(one)) != one._cdata and one.requires_grad and name not in self._replaceable:
                if not isinstance(one, nn.Parameter):
                    _refuse_functional_call(call, name)
                raise ArgumentError(
                    f"{call}: parameter {name.removeprefix('_orig_mod.')!r} was added or replaced after the hooks were "
                    f"registered, as by {_CHANGES}, so {self._consequence}: remove() the hooks before such a change, "
                    "and register them and make the optimizer after it"
                )

    def release(self) -> None:
        """Let go of the parameters."""
        self._kept.clear()


def _refuse_functional_call(call: str, name: str) -> None:
    raise ArgumentError(
        f"{call}: parameter {name.removeprefix('_orig_mod.')!r} is a tensor that is no nn.Parameter, as within "
        "torch.func.functional_call(), whose gradients no hook reduces: call it on copy.deepcopy(model), in stage 3 "
        "made within handle.full_parameters(), or remove() the hooks before"
    )


def refuse_assignment(call: str, model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    """Have ``load_state_dict(assign=True)`` raise where it would replace one of ``parameters``; return what ends this.

    Args:
        call: what registered hooks on them, for messages.
        model: the model.
        parameters: by name; others of ``model`` may be replaced.
    """
    known = set(map(id, parameters.values()))
    hooks: list[Any] = []
    for module in model.modules():
        names = [name for name, one in module._parameters.items() if id(one) in known]
        if names:
            hooked: Any = module
            hooks.append(hooked.register_load_state_dict_pre_hook(_Assignments(call, names)))

    def undo() -> None:
        while hooks:
            hooks.pop().remove()

    return undo


class _Assignments:
    """Refuses them in a module, and nothing in copies of it."""

    def __init__(self, call: str, names: list[str]) -> None:
        self._call, self._names = call, names

    def __call__(
        self, module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
    ) -> None:
        replaced = [prefix + name for name in self._names if prefix + name in state]
        if metadata.get("assign_to_params_buffers") and replaced:
            raise ArgumentError(
                f"load_state_dict: got assign=True, which replaces parameter {replaced[0]!r}, which has the hooks of "
                f"{self._call}(); call it without, or remove() the hooks before"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _Assignments, ("", [])
