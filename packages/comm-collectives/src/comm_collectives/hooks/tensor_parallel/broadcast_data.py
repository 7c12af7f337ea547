"""A batch that only the first rank of a tensor-parallel group has loaded, for all ranks of the group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from comm_collectives.collectives import broadcast
from comm_collectives.groups import get_process_group_ranks, get_rank
from comm_collectives.hooks.group_arguments import group_along
from comm_collectives.objects import allgather_object
from comm_utils.errors import ArgumentError, ArgumentTypeError, CollectiveMismatchError, CommError
from comm_utils.given import shown
from comm_utils.torch_support import factories

__all__ = ["broadcast_data"]


def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, torch.Tensor] | None,
    datatype: torch.dtype,
    group: Any = None,
    *,
    device: torch.device | str | None = None,
) -> dict[str, torch.Tensor]:
    """Return the tensors that the first rank of the group has under ``keys``; Megatron-LM's call.

    Args:
        keys: names of tensors, the same on every rank.
        data: on the first rank, tensors of ``datatype`` by name, with any shapes; only read. Ignored on other ranks,
            which need not know the shapes.
        datatype: the dtype of all these tensors.
        group: the tensor-parallel group, ``ParallelGroups``, or a ``DeviceMesh``; None is the world group.
        device: of the result; None for that of the first rank's tensors, by its type.

    Returns:
        New tensors by name, in the order of ``keys``.

    Raises:
        ArgumentError: ``data`` of the first rank lacks a key or has another dtype there. The other ranks raise as
            well and name that rank.
        CollectiveMismatchError: ranks gave different keys or dtypes; names the rank.
    """
    call = "broadcast_data"
    group = group_along(call, "group", group, "tensor")
    ranks = get_process_group_ranks(group)
    keys = list(keys)
    tensors: list[torch.Tensor] = []
    mine: dict[str, Any] = {"error": None, "keys": keys, "dtype": str(datatype), "device": "cpu", "shapes": []}
    error: CommError | None = None
    if get_rank(group) == 0:
        try:
            tensors = _checked(call, keys, data, datatype)
            mine["shapes"] = [list(one.shape) for one in tensors]
            mine["device"] = tensors[0].device.type if tensors else "cpu"
        except CommError as raised:
            error, mine["error"] = raised, str(raised)
    # All ranks learn of all, so that they raise together where one of them is wrong.
    everyones = allgather_object(mine, group)
    first = everyones[0]
    if error is not None:
        raise error
    if first["error"] is not None:
        raise ArgumentError(f"{call}: rank {ranks[0]} refused its arguments: {first['error']}")
    for rank, one in zip(ranks, everyones, strict=True):
        for name in ("keys", "dtype"):
            if one[name] != first[name]:
                raise CollectiveMismatchError(
                    f"{call}: {name}: got {one[name]} on rank {rank} and {first[name]} on rank {ranks[0]}; expected "
                    "the same on all ranks"
                )
    shapes = [torch.Size(shape) for shape in first["shapes"]]
    place = _device(device, first["device"])
    total = sum(shape.numel() for shape in shapes)
    flat = factories.empty(total, dtype=datatype, device=place)
    if tensors:
        torch.cat([one.detach().reshape(-1).to(place) for one in tensors], out=flat)
    if total:
        broadcast(flat, ranks[0], group)
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return {key: part.view(shape) for key, part, shape in zip(keys, parts, shapes, strict=True)}


def _device(device: torch.device | str | None, kind: str) -> torch.device:
    if device is not None:
        return torch.device(device)
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _checked(call: str, keys: Sequence[str], data: Any, datatype: Any) -> list[torch.Tensor]:
    if not isinstance(datatype, torch.dtype):
        raise ArgumentTypeError(f"{call}: datatype: got {shown(datatype)}; expected a torch.dtype")
    if not isinstance(data, Mapping):
        raise ArgumentTypeError(f"{call}: data: got {shown(data)}; expected a dictionary of tensors on the first rank")
    for key in keys:
        if key not in data:
            raise ArgumentError(f"{call}: data: has no {key!r}; it has {', '.join(map(repr, data)) or 'nothing'}")
        if not isinstance(data[key], torch.Tensor):
            raise ArgumentTypeError(f"{call}: data[{key!r}]: got {shown(data[key])}; expected a tensor")
        if data[key].dtype != datatype:
            raise ArgumentError(f"{call}: data[{key!r}]: got {data[key].dtype}; expected {datatype}, as datatype says")
    return [data[key] for key in keys]
