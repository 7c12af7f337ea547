"""Layers of which each rank computes a part: what runs instead of, before and behind their own forward."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from comm_collectives.annotations import Group
from comm_collectives.groups import get_rank, get_world_size
from comm_collectives.hooks.tensor_parallel.regions import (
    copy_to_tensor_parallel_region,
    gather_from_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
)
from comm_collectives.hooks.tensor_parallel.sequence import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from comm_utils.errors import ArgumentError

__all__ = ["Undo", "add_column", "add_gather", "add_row", "add_scatter", "add_vocabulary"]

Undo = Callable[[], object]


def add_column(module: nn.Linear, group: Group, sequence_dim: int | None, gather_output: bool) -> list[Undo]:
    """Let ``module``, whose output features are divided, take whole inputs; return what undoes this."""

    def enter(_: nn.Module, inputs: tuple[Any, ...], by_name: dict[str, Any]) -> Any:
        if inputs:
            return (whole(inputs[0]), *inputs[1:]), by_name
        if "input" in by_name:
            return inputs, {**by_name, "input": whole(by_name["input"])}
        return None  # forward() says what is missing

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        if sequence_dim is None:
            return copy_to_tensor_parallel_region(tensor, group)
        return gather_from_sequence_parallel_region(tensor, group, sequence_dim)

    def leave(_: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return gather_from_tensor_parallel_region(output, group)

    entering = module.register_forward_pre_hook(enter, with_kwargs=True)
    undo: list[Undo] = [entering.remove, _attribute(module, "out_features")]
    module.out_features = module.weight.shape[0]
    if gather_output:
        undo.append(module.register_forward_hook(leave).remove)
    return undo


def add_row(module: nn.Linear, group: Group, sequence_dim: int | None) -> list[Undo]:
    """Let ``module``, whose input features are divided, return sums over the ranks; return what undoes this."""

    def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        output = _summed(F.linear(input, self.weight), group, sequence_dim)
        # The bias is added once, behind the sum, in the dtype that autocast may have given to it.
        return output if self.bias is None else output + self.bias.to(output.dtype)

    undo: list[Undo] = [_attribute(module, "in_features"), _instead(module, forward)]
    module.in_features = module.weight.shape[1]
    return undo


def add_vocabulary(module: nn.Embedding, group: Group, sequence_dim: int | None) -> list[Undo]:
    """Let ``module``, whose rows are divided, take ids of the whole vocabulary; return what undoes this."""
    rows = module.weight.shape[0]
    first = get_rank(group) * rows
    padding = module.padding_idx
    own_padding = padding - first if padding is not None and first <= padding < first + rows else None

    def forward(self: nn.Embedding, input: torch.Tensor) -> torch.Tensor:
        _check_ids(input, rows * get_world_size(group))
        own = input - first
        elsewhere = (own < 0) | (own >= rows)
        found = F.embedding(own.masked_fill(elsewhere, 0), self.weight, own_padding, sparse=self.sparse)
        return _summed(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), group, sequence_dim)

    undo: list[Undo] = [_attribute(module, "num_embeddings"), _instead(module, forward)]
    module.num_embeddings = rows
    return undo


def add_scatter(module: nn.Module, group: Group, sequence_dim: int) -> list[Undo]:
    """Let each rank keep its part of the sequence of what ``module`` returns; return what undoes this."""

    def leave(_: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return scatter_to_sequence_parallel_region(output, group, sequence_dim)

    return [module.register_forward_hook(leave).remove]


def add_gather(module: nn.Module, group: Group, sequence_dim: int) -> list[Undo]:
    """Let ``module`` return the whole sequence, for the same computation on every rank; return what undoes this."""

    def leave(_: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return gather_from_sequence_parallel_region(output, group, sequence_dim, tensor_parallel_output_grad=False)

    return [module.register_forward_hook(leave).remove]


def _check_ids(ids: torch.Tensor, size: int) -> None:
    """Check ids of a whole vocabulary on the CPU; elsewhere that would wait for the device.

    Raises:
        ArgumentError: one is none of the vocabulary.
    """
    if ids.is_cpu and ids.numel() and not torch.compiler.is_compiling():
        least, most = ids.aminmax()
        if least < 0 or most >= size:
            wrong = least if least < 0 else most
            raise ArgumentError(f"embedding: input: got the id {int(wrong)}, expected 0 to {size - 1}")


def _summed(tensor: torch.Tensor, group: Group, sequence_dim: int | None) -> torch.Tensor:
    if sequence_dim is None:
        return reduce_from_tensor_parallel_region(tensor, group)
    return reduce_scatter_to_sequence_parallel_region(tensor, group, sequence_dim)


def _attribute(module: nn.Module, name: str) -> Undo:
    value = getattr(module, name)
    return lambda: setattr(module, name, value)


def _instead(module: nn.Module, forward: Callable[..., Any]) -> Undo:
    """Let ``module`` run ``forward`` instead of its class's; its hooks run as before."""
    # A method, which copy.deepcopy binds to the copy.
    module.forward = types.MethodType(forward, module)

    def undo() -> None:
        del module.forward

    return undo
