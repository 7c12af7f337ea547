"""The tensors in what modules and functions take and return."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ["Outputs", "outputs_of", "tensors_in"]

# What an output may be made of. Attributes lead further than that, for example to a program's settings.
_DEPTH = 8
_MOST_OBJECTS = 4096
_PLAIN = (
    bool, int, float, complex, str, bytes, range, slice, type, type(None), Enum,
    torch.dtype, torch.device, torch.layout, torch.Generator, nn.Module,
)  # fmt: skip


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Return the tensors in ``value``: a tensor, a list, tuple, mapping or dataclass of such, or anything else."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name, None))


@dataclass
class Outputs:
    """The tensors found in the output of a module.

    Attributes:
        tensors: those that a backward may come through, also in attributes of objects.
        is_opaque: there is something else that may hold tensors, such as a function or a generator.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    is_opaque: bool = False


def outputs_of(value: Any) -> Outputs:
    """Return the tensors that require gradients in ``value``, the output of a module: any object."""
    found = Outputs()
    _search(value, _DEPTH, found, {})
    return found


def _search(value: Any, depth: int, found: Outputs, seen: dict[int, Any]) -> None:
    if isinstance(value, torch.Tensor):
        if value.requires_grad and id(value) not in seen:
            seen[id(value)] = value
            found.tensors.append(value)
        return
    if isinstance(value, _PLAIN) or type(value).__module__ == "numpy" or id(value) in seen:
        return
    if not depth or len(seen) == _MOST_OBJECTS:
        found.is_opaque = True
        return
    seen[id(value)] = value
    parts = _parts(value)
    if parts is None:
        found.is_opaque = True
        return
    for one in parts:
        _search(one, depth - 1, found, seen)


def _parts(value: Any) -> list[Any] | None:
    """Return what ``value`` is made of; None where it does not show that."""
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    parts: list[Any] = []
    is_container = isinstance(value, (Mapping, list, tuple, set, frozenset, deque))
    if is_container:
        parts += value.values() if isinstance(value, Mapping) else value
    slots = [name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    attributes = getattr(value, "__dict__", None)
    if not is_container and not slots and (attributes is None or callable(getattr(value, "__get__", None))):
        return None
    for name in slots:
        try:
            parts.append(object.__getattribute__(value, name))
        except AttributeError:  # not set, or private to its class
            continue
    # Not of nn.Parameter, which is not a result.
    parts += attributes.values() if isinstance(attributes, dict) else ()
    return [one for one in parts if is_container or not isinstance(one, nn.Parameter)]


def _names(slots: Any) -> tuple[str, ...]:
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
