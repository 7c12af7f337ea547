"""Sizes and names of the axes of parallelism, validated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown

__all__ = ["MESH_NAMES", "axes_of_mesh", "checked_sizes"]

#: Names of the dimensions of a mesh that are understood, by axis.
MESH_NAMES = {
    "pipeline": ("pipeline", "pp", "pipe", "pipeline_parallel"),
    "data": ("data", "dp", "data_parallel"),
    "expert": ("expert", "ep", "expert_parallel"),
    "context": ("context", "cp", "context_parallel"),
    "tensor": ("tensor", "tp", "model", "mp", "tensor_parallel"),
}


def checked_sizes(call: str, sizes: Mapping[str, Any], world_size: int) -> dict[str, int]:
    """Return ``sizes`` with that of the data axis.

    Args:
        call: the user's call, for messages.
        sizes: of data (or None), pipeline, context, tensor and expert.
        world_size: of the job.

    Raises:
        ArgumentError: they do not multiply to the world size; shows the arithmetic.
    """
    for name, size in sizes.items():
        if size is None and name == "data":
            continue
        if not isinstance(size, int) or isinstance(size, bool):
            raise ArgumentTypeError(f"{call}: {name}: got {shown(size)}; expected an integer of 1 or more")
        if size < 1:
            raise ArgumentError(f"{call}: {name}: got {size}; expected an integer of 1 or more")
    others = {name: sizes[name] for name in ("pipeline", "context", "tensor")}
    product = torch.Size(others.values()).numel()
    factors = " * ".join(f"{name} {size}" for name, size in others.items())
    data = sizes["data"]
    if data is None:
        if world_size % product:
            raise ArgumentError(
                f"{call}: got {factors} = {product}, which does not divide the world size, {world_size}; choose sizes "
                "whose product does"
            )
        data = world_size // product
    if data * product != world_size:
        raise ArgumentError(
            f"{call}: got data {data} * {factors} = {data * product} ranks; expected {world_size}, the world size "
            "(expert divides data and takes no ranks of its own)"
        )
    if data % sizes["expert"]:
        raise ArgumentError(
            f"{call}: expert: got {sizes['expert']}; expected a divisor of data, {data}, which it divides"
        )
    return {**sizes, "data": data}


def axes_of_mesh(call: str, mesh: Any, names: Mapping[str, str]) -> list[str]:
    """Return the axis of each dimension of ``mesh``.

    Args:
        call: the user's call, for messages.
        mesh: a ``DeviceMesh``.
        names: names of dimensions by axis, besides :data:`MESH_NAMES`.

    Raises:
        ArgumentError: a dimension has no name, or one that is no axis, or two are for one axis.
    """
    if not hasattr(mesh, "mesh_dim_names"):
        raise ArgumentTypeError(f"{call}: mesh: got {shown(mesh)}; expected a DeviceMesh")
    if mesh.mesh_dim_names is None:
        raise ArgumentError(
            f"{call}: mesh: got one whose dimensions have no names; pass mesh_dim_names=('data', 'tensor') or the "
            "like to init_device_mesh"
        )
    unknown = [axis for axis in names if axis not in MESH_NAMES]
    if unknown:
        raise ArgumentError(f"{call}: names: got {shown(unknown[0])}; expected axes among {', '.join(MESH_NAMES)}")
    known = {alias: axis for axis, aliases in MESH_NAMES.items() for alias in aliases}
    known.update({name: axis for axis, name in names.items()})
    axes: list[str] = []
    for name in mesh.mesh_dim_names:
        if name not in known:
            raise ArgumentError(
                f"{call}: mesh: got a dimension {name!r}; expected names among {', '.join(MESH_NAMES)}, or "
                f"names={{'data': {name!r}}} or the like"
            )
        if known[name] in axes:
            raise ArgumentError(f"{call}: mesh: got two dimensions for {known[name]}: {_joined(mesh.mesh_dim_names)}")
        axes.append(known[name])
    return axes


def _joined(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
