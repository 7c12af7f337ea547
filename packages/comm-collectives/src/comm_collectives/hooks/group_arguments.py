"""The group that the argument of a model-parallel function stands for."""

from __future__ import annotations

from typing import Any

from torch.distributed import ProcessGroup

from comm_collectives.hooks.parallel_groups import ParallelGroup, ParallelGroups
from comm_collectives.hooks.parallel_sizes import MESH_NAMES
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown

__all__ = ["group_along"]


def group_along(call: str, name: str, value: Any, axis: str) -> ProcessGroup | None:
    """Return the process group of ``axis`` in the argument called ``name``; None is the world group.

    Args:
        call: the user's call, for messages.
        value: a process group, a :class:`ParallelGroup`, a :class:`ParallelGroups`, a ``DeviceMesh`` or None.
        axis: such as ``"tensor"``.

    Raises:
        ArgumentError: a mesh has no such dimension.
        ArgumentTypeError: it is none of these, or this rank is not a member of the group.
    """
    if value is None:
        return None
    if isinstance(value, ProcessGroup):
        return value
    if isinstance(value, ParallelGroups):
        return getattr(value, axis).group  # type: ignore[no-any-return]
    if isinstance(value, ParallelGroup):
        return value.group
    if hasattr(value, "mesh_dim_names"):
        names = value.mesh_dim_names or ()
        if len(value.mesh.shape) == 1:
            return value.get_group()  # type: ignore[no-any-return]
        for one in MESH_NAMES[axis]:
            if one in names:
                return value.get_group(one)  # type: ignore[no-any-return]
        raise ArgumentError(
            f"{call}: {name}: got a DeviceMesh with dimensions {names}; expected one dimension, or one named "
            f"{' or '.join(map(repr, MESH_NAMES[axis]))}"
        )
    raise ArgumentTypeError(
        f"{call}: {name}: got {shown(value)}; expected a process group of which this rank is a member, "
        "ParallelGroups, a DeviceMesh, or None for the world group"
    )
