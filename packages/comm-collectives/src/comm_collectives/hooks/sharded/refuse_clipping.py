"""Notice ``torch.nn.utils.clip_grad_norm_`` where it finds no gradients, or a part of them on each rank."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol

import torch
from torch.nn.utils import clip_grad

from comm_utils.errors import ArgumentError

__all__ = ["refuse_clipping"]

# clip_grad_norm_ calls it by this name, also where a program has imported clip_grad_norm_ itself before.
_NAME = "_clip_grads_with_norm_"


class _Holder(Protocol):
    def divided_tensors(self) -> Iterable[tuple[str, torch.Tensor]]: ...


class _Refusal:
    holders: ClassVar[weakref.WeakSet[_Holder]] = weakref.WeakSet()
    original: ClassVar[Any] = None


def refuse_clipping(holder: _Holder) -> Callable[[], None]:
    """Have ``clip_grad_norm_`` raise for the tensors that ``holder`` names; return what ends this."""
    _Refusal.holders.add(holder)
    if _Refusal.original is None and hasattr(clip_grad, _NAME):
        _Refusal.original = getattr(clip_grad, _NAME)
        setattr(clip_grad, _NAME, _checked(_Refusal.original))

    def undo() -> None:
        _Refusal.holders.discard(holder)
        if not _Refusal.holders and _Refusal.original is not None:
            setattr(clip_grad, _NAME, _Refusal.original)
            _Refusal.original = None

    return undo


def _checked(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def clip(parameters: Any, *arguments: Any, **named: Any) -> None:
        clipped = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        names = {id(one): name for holder in list(_Refusal.holders) for name, one in holder.divided_tensors()}
        for one in clipped:
            if id(one) in names:
                raise ArgumentError(
                    f"torch.nn.utils.clip_grad_norm_: got {names[id(one)]} of a model with the hooks of "
                    "register_sharded_hooks(), whose gradients are divided among the ranks, so that the norm would be "
                    "that of a part of them or of nothing; call handle.clip_grad_norm(max_norm) on all ranks"
                )
        original(clipped, *arguments, **named)

    return clip
