"""Handles of registered hooks: what is registered on which parameters, and how it comes off again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TypeVar

import torch
from torch import nn

from comm_collectives.annotations import Group
from comm_collectives.groups import get_process_group_ranks
from comm_utils.errors import ArgumentError, ArgumentTypeError, CommError
from comm_utils.given import shown
from comm_utils.log import logger
from comm_utils.weak_collections import members_of

__all__ = ["GRADIENTS", "LAYERS", "Handle", "check_module", "check_unregistered", "handles_of", "trainable_parameters"]

#: Kinds of hooks. A parameter has at most one handle of each kind.
GRADIENTS, LAYERS = "gradients", "layers"

# Hooks keep their handle alive, and a handle that nothing keeps alive has no hooks.
_registered: weakref.WeakSet[Handle] = weakref.WeakSet()
_count = 0

Self = TypeVar("Self", bound="Handle")


class Handle:
    """The hooks that one call registered on a model; leaving its ``with`` block removes them.

    A subclass registers its hooks in its own ``__init__`` and gives what undoes each of them to :meth:`on_removal`.

    Args:
        call: the function that the user called, for messages.
        model: the module that the hooks are of.
        parameters: those that the hooks act on, by their names in ``model``.
        kind: :data:`GRADIENTS` for hooks that reduce gradients, :data:`LAYERS` for those that change layers.

    Attributes:
        divided: the parameters of which each rank has a part, if there are any.
        divided_over: the global ranks that have these parts.
    """

    divided: Iterable[torch.Tensor] = ()
    divided_over: Iterable[int] = ()

    def __init__(self, call: str, model: nn.Module, parameters: Mapping[str, torch.Tensor], kind: str) -> None:
        global _count
        self.call, self.model, self.kind = call, model, kind
        self.parameters = dict(parameters)
        self._undo: list[Callable[[], object]] = []
        self._is_registered = True
        self._number = _count = _count + 1
        _registered.add(self)

    @property
    def is_registered(self) -> bool:
        """Return whether the hooks are in place: False after :meth:`remove`."""
        return self._is_registered

    def on_removal(self, undo: Callable[[], object]) -> None:
        """Have :meth:`remove` call ``undo``; the last one given is called first."""
        self._undo.append(undo)

    def after_removal(self, undo: Callable[[], object]) -> None:
        """Have :meth:`remove` call ``undo`` after all that it was given until now."""
        self._undo.insert(0, undo)

    def remove(self) -> None:
        """Take the hooks off again, without a trace; a second call does nothing.

        Raises:
            ArgumentError: other hooks were registered on the same parameters later; remove these first.
        """
        if not self._is_registered:
            return
        later = [other for other in _sharing(self.parameters) if other._number > self._number]
        if later:
            raise ArgumentError(
                f"remove: the hooks of {later[-1].call}() were registered on the same parameters later; remove these "
                f"before those of {self.call}()"
            )
        self._is_registered = False
        _registered.discard(self)
        while self._undo:
            self._undo.pop()()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.remove()
        except CommError as failure:
            if error is None:
                raise
            logger.warning(
                "%s: after %s, its hooks could not be removed in order: %s", self.call, type(error).__name__, failure
            )


def _sharing(parameters: Mapping[str, torch.Tensor]) -> list[Handle]:
    """Return the handles that have one of ``parameters``, in the order of their registration."""
    wanted = set(map(id, parameters.values()))
    found = [one for one in members_of(_registered) if not wanted.isdisjoint(map(id, one.parameters.values()))]
    return sorted(found, key=lambda one: one._number)


def handles_of(model: nn.Module) -> list[Handle]:
    """Return the handles whose hooks act on parameters of ``model``, in the order of their registration."""
    return _sharing(dict(model.named_parameters()))


def check_module(call: str, model: object) -> nn.Module:
    """Return ``model``.

    Raises:
        ArgumentTypeError: it is no ``torch.nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"{call}: model: got {shown(model)}; expected a torch.nn.Module")
    return model


def trainable_parameters(call: str, model: nn.Module, ignored: Iterable[nn.Parameter] = ()) -> dict[str, nn.Parameter]:
    """Return the parameters of ``model`` that require gradients, each once, by name in the order of ``model``.

    Those that are ``ignored`` are left out.

    Raises:
        ArgumentTypeError: one has no shape yet (``torch.nn.LazyLinear``) or no elements (``torch.device("meta")``).
        ArgumentError: there is none, or the forward of an embedding changes it (``max_norm``); within
            ``torch.inference_mode()``.
    """
    if torch.is_inference_mode_enabled():
        raise ArgumentError(
            f"{call}: got called within torch.inference_mode(), which makes tensors that no backward can use; register "
            "hooks before it, or use torch.no_grad()"
        )
    skipped = set(map(id, ignored))
    found = {
        name.removeprefix("_orig_mod."): one
        for name, one in model.named_parameters()
        if one.requires_grad and id(one) not in skipped
    }
    for name, parameter in found.items():
        if nn.parameter.is_lazy(parameter):
            raise ArgumentTypeError(
                f"{call}: model: parameter {name!r} has no shape yet; call the model once before registering hooks"
            )
        if parameter.is_meta:
            raise ArgumentTypeError(
                f"{call}: model: parameter {name!r} is on the meta device; materialize the model with "
                "model.to_empty(device=...) and initialize it before registering hooks"
            )
    _refuse_max_norm(call, model, found)
    if not found:
        raise ArgumentError(f"{call}: model: got one without parameters that require gradients; expected at least one")
    return found


def _refuse_max_norm(call: str, model: nn.Module, trainable: Mapping[str, nn.Parameter]) -> None:
    trained = set(map(id, trainable.values()))
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.max_norm is None:
            continue
        if id(module.weight) in trained:
            raise ArgumentError(
                f"{call}: model: module {name.removeprefix('_orig_mod.')!r} has max_norm={module.max_norm}, with which "
                "a forward changes the rows that its rank uses, so that weights would differ between ranks; expected "
                "an embedding without it: normalize its output instead"
            )


def check_unregistered(
    call: str,
    parameters: Mapping[str, torch.Tensor],
    kinds: Iterable[str] = (GRADIENTS,),
    *,
    group: Group = None,
    model: nn.Module | None = None,
    ignored: Iterable[nn.Parameter] = (),
) -> None:
    """Check that no hooks of ``kinds`` act on one of ``parameters``, and that ``group`` can have one ``model``.

    Args:
        call: the user's call, for messages.
        parameters: those that hooks are to be registered on.
        kinds: of other hooks that they may not have.
        group: whose ranks are to have the same ``model``; None is the world group.
        model: None leaves out the check of ``group``.
        ignored: parameters of ``model`` that may differ between the ranks.

    Raises:
        ArgumentError: names the parameter and the call that registered its hooks; or the parameter of ``model`` of
            which ranks of ``group`` have different parts.
    """
    kinds = tuple(kinds)
    for handle in _sharing(parameters):
        if handle.kind in kinds:
            taken = set(map(id, handle.parameters.values()))
            name = next(name for name, one in parameters.items() if id(one) in taken)
            raise ArgumentError(
                f"{call}: model: parameter {name!r} has the hooks of {handle.call}(); call remove() of the handle that "
                "it returned before"
            )
    if model is not None:
        skipped = set(map(id, ignored))
        every = {name: one for name, one in model.named_parameters() if id(one) not in skipped}
        _check_undivided(call, every, group)


def _check_undivided(call: str, parameters: Mapping[str, torch.Tensor], group: Group) -> None:
    """Check that no two ranks of ``group`` have different parts of one of ``parameters``."""
    for handle in _sharing(parameters):
        parts = set(map(id, handle.divided))
        names = [name for name, one in parameters.items() if id(one) in parts]
        if names and len(set(handle.divided_over).intersection(get_process_group_ranks(group))) > 1:
            raise ArgumentError(
                f"{call}: model: parameter {names[0].removeprefix('_orig_mod.')!r} is divided over ranks "
                f"{sorted(handle.divided_over)} by {handle.call}(), and the group has several of them; expected a "
                "group whose ranks have the same parts: pass group=groups.data.group"
            )
