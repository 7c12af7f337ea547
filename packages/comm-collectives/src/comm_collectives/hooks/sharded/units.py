"""The parts of a model that are gathered together in stage 3, and the modules that use them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from comm_collectives.hooks.sharded.flat_shard import FlatShard

__all__ = ["ModulePart", "Unit", "divide_model", "group_by_kind"]

# Modules that hold others and are not called themselves.
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass
class ModulePart:
    """A part of the model that is gathered as one.

    Attributes:
        name: of ``module`` in the model; "" for the model itself.
        module: the call of it, or of a module within it, uses the part.
        is_whole: all modules within ``module`` belong to the part; otherwise only its own parameters do.
        parameters: by name in the model; none of another part.
    """

    name: str
    module: nn.Module
    is_whole: bool
    parameters: dict[str, nn.Parameter]


@dataclass
class Unit:
    """A part of the model with its flat memories.

    Attributes:
        name: of its module.
        is_whole: it has the modules within its module as well.
        flats: one for each dtype and device, and for parameters with and without gradients.
        depth: calls of its modules that run at this time.
        is_needed: an access from outside of its modules needs it until the end of the forward or backward.
    """

    name: str
    is_whole: bool
    flats: list[FlatShard] = field(default_factory=list)
    depth: int = 0
    is_needed: bool = False

    def is_gathered(self) -> bool:
        """Return whether all parameters have their values."""
        return all(flat.is_gathered for flat in self.flats)

    def encloses(self, other: Unit) -> bool:
        """Return whether the module of ``other`` is within that of this unit."""
        return not self.is_whole and (not self.name or other.name.startswith(f"{self.name}."))


def divide_model(model: nn.Module, bucket_size_bytes: int) -> list[ModulePart]:
    """Return the parts of ``model``, in the order of its modules: the largest modules of at most that size.

    A module that is larger is divided into the modules in it; parameters of its own are a part themselves. A module
    without others in it is not divided.
    """
    taken: set[int] = set()
    return list(_parts("", model, bucket_size_bytes, taken))


def _parts(name: str, module: nn.Module, limit_bytes: int, taken: set[int]) -> Iterator[ModulePart]:
    everything = _untaken(name, module, taken, recurse=True)
    if not everything:
        return
    size_bytes = sum(one.numel() * one.element_size() for one in everything.values())
    if size_bytes <= limit_bytes and not isinstance(module, _NEVER_CALLED):
        taken.update(map(id, everything.values()))
        yield ModulePart(name, module, True, everything)
        return
    own = _untaken(name, module, taken, recurse=False)
    if own:
        taken.update(map(id, own.values()))
        yield ModulePart(name, module, False, own)
    for child_name, child in module.named_children():
        yield from _parts(f"{name}.{child_name}" if name else child_name, child, limit_bytes, taken)


def _untaken(prefix: str, module: nn.Module, taken: set[int], recurse: bool) -> dict[str, nn.Parameter]:
    found = module.named_parameters(prefix, recurse)
    return {name: parameter for name, parameter in found if id(parameter) not in taken}


def group_by_kind(
    parameters: dict[str, nn.Parameter],
) -> list[tuple[list[str], list[nn.Parameter]]]:
    """Return names and parameters of each dtype and device, with and without gradients, in their order."""
    kinds: dict[tuple[torch.dtype, torch.device, bool], tuple[list[str], list[nn.Parameter]]] = {}
    for name, parameter in parameters.items():
        kind = parameter.dtype, parameter.device, parameter.requires_grad
        names, members = kinds.setdefault(kind, ([], []))
        names.append(name)
        members.append(parameter)
    return list(kinds.values())
