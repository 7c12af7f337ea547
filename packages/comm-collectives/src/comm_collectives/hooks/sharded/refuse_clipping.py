"""Notice ``torch.nn.utils`` that clip gradients or add up a norm where there are none, or a part of them on each rank.

Programs import these functions before hooks are registered, so that another function under the same name would be
called by nobody. Each of them calls the function that it wraps in ``torch.no_grad()``; that one is replaced.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch.nn.utils import clip_grad

from comm_utils.errors import ArgumentError
from comm_utils.weak_collections import members_of

__all__ = ["DividedTensor", "refuse_clipping"]

_NORM = "whose gradients are divided among the ranks, so that the norm would be that of a part of them or of nothing"
_NOTHING = "whose gradients are those of the optimizer's tensors, so that nothing would be clipped"
_CLIP_NORM = "call handle.clip_grad_norm(max_norm) on all ranks"
_GET_NORM = "call handle.clip_grad_norm(math.inf), which returns the norm and clips nothing, on all ranks"
# By the function in torch.nn.utils.clip_grad: its public name, whether tensors with a part of the gradients and these
# gradients are refused as well as parameters without any, the consequence and the remedy.
_FUNCTIONS = {
    "clip_grad_norm_": ("clip_grad_norm_", True, _NORM, _CLIP_NORM),
    "_get_total_norm": (
        "get_total_norm", True, _NORM, _GET_NORM
    ),
    "_clip_grads_with_norm_": ("clip_grads_with_norm_", False, _NOTHING, _CLIP_NORM),
    "clip_grad_value_": (
        "clip_grad_value_", False, _NOTHING, "call it on the tensors in optimizer.param_groups, on all ranks"
    ),
}  # fmt: skip

#: A description for messages, the tensor, and whether it has the gradient that an optimizer takes, which is a part, so
#: that norms alone are wrong. Otherwise it has none, as the model's parameters with sharded hooks.
DividedTensor = tuple[str, torch.Tensor, bool]


class _Holder(Protocol):
    call: str

    def divided_tensors(self) -> Iterable[DividedTensor]: ...


class _Refusal:
    holders: ClassVar[weakref.WeakSet[_Holder]] = weakref.WeakSet()
    undo: ClassVar[list[Callable[[], None]]] = []


def refuse_clipping(holder: _Holder) -> Callable[[], None]:
    """Have the functions raise for the tensors that ``holder`` names; return what ends this."""
    _Refusal.holders.add(holder)
    if not _Refusal.undo:
        _Refusal.undo += [end for name in _FUNCTIONS if (end := _replace(name)) is not None]

    def undo() -> None:
        _Refusal.holders.discard(holder)
        if not _Refusal.holders:
            while _Refusal.undo:
                _Refusal.undo.pop()()

    return undo


def _replace(name: str) -> Callable[[], None] | None:
    """Replace the function that a wrapper calls; return what ends this, or None where torch has another form."""
    wrapper = getattr(clip_grad, name, None)
    original = getattr(wrapper, "__wrapped__", None)
    for cell in getattr(wrapper, "__closure__", None) or ():
        if original is not None and cell.cell_contents is original:
            cell.cell_contents = _checked(name, original)
            return functools.partial(setattr, cell, "cell_contents", original)
    return None


def _checked(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    call, refuses_all, consequence, remedy = _FUNCTIONS[name]

    @functools.wraps(original)
    def checked(*positional: Any, **named: Any) -> Any:
        name = next((one for one in ("parameters", "tensors") if one in named), None)
        if name is None and not positional:
            return original(**named)  # which raises
        given, rest = (positional[0], positional[1:]) if positional else (named.pop(str(name)), ())
        tensors = [given] if isinstance(given, torch.Tensor) else list(given)
        names = {id(one): described for described, one, has_part in _divided() if refuses_all or not has_part}
        for one in tensors:
            if id(one) in names:
                raise ArgumentError(f"torch.nn.utils.{call}: got {names[id(one)]}, {consequence}; {remedy}")
        # torch warns of an empty generator.
        return original(tensors if tensors or not isinstance(given, types.GeneratorType) else given, *rest, **named)

    return checked


def _divided() -> Iterator[DividedTensor]:
    for holder in members_of(_Refusal.holders):
        for described, one, has_part in holder.divided_tensors():
            described = f"{described} of a model with the hooks of {holder.call}()"
            yield described, one, has_part
            if has_part and one.grad is not None:
                yield f"the gradient of {described}", one.grad, True
