"""The groups of a job that divides its ranks among data, pipeline, context, tensor and expert parallelism.

Ranks are numbered as in Megatron-LM: neighbours are of one tensor-parallel group, then come context, data and pipeline
parallelism, ``rank = ((pipeline * D + data) * C + context) * T + tensor``. Expert parallelism takes no ranks of its
own: it divides the data axis, as in Megatron-LM and DeepSpeed, so ``expert`` neighbours along that axis hold different
experts, and ranks that are ``expert`` apart hold the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup

from comm_collectives.annotations import Timeout
from comm_collectives.arguments import active
from comm_collectives.groups import get_process_group_ranks, new_group
from comm_collectives.hooks.model_agreement import check_on_all_ranks
from comm_collectives.hooks.parallel_sizes import MESH_NAMES, axes_of_mesh, checked_sizes
from comm_utils.errors import ArgumentError
from comm_utils.given import shown
from comm_utils.log import logger
from comm_utils.torch_support import factories

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ParallelGroup", "ParallelGroups"]

#: Axes of the grid of ranks, the slowest first.
_GRID = ("pipeline", "data", "context", "tensor")
# The dimensions along which each axis reaches; "outer" and "expert" are the two parts of the data axis.
_AXES = {
    "data": ("outer", "expert"),
    "pipeline": ("pipeline",),
    "context": ("context",),
    "tensor": ("tensor",),
    "expert": ("expert",),
    "expert_data": ("outer",),
    "data_context": ("outer", "expert", "context"),
    "model": ("pipeline", "tensor"),
}
_DIMENSIONS = ("pipeline", "outer", "expert", "context", "tensor")
_TITLES = {
    "data": "data parallel",
    "pipeline": "pipeline parallel",
    "context": "context parallel",
    "tensor": "tensor parallel",
    "expert": "expert parallel",
    "expert_data": "expert data parallel",
    "data_context": "data and context parallel",
    "model": "model parallel",
}


@dataclass(frozen=True)
class ParallelGroup:
    """Hold this rank's group along one axis.

    Attributes:
        axis: such as ``"tensor"``.
        name: for logs and errors, such as ``"tensor parallel 0"``; groups of an axis count by their lowest rank.
        group: the process group.
        ranks: the global ranks of its members, in the order of their ranks within the group.
        rank: this rank's number within the group.
    """

    axis: str
    name: str
    group: ProcessGroup
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        """Return the number of its members."""
        return len(self.ranks)

    def __str__(self) -> str:
        return f"{self.name} (ranks {', '.join(map(str, self.ranks))})"


class ParallelGroups:
    """The groups of this rank along each axis; made by :meth:`from_sizes` or :meth:`from_mesh`.

    Attributes:
        data: ranks with the same parameters and other data; gradients are reduced over it.
        pipeline: ranks with the stages of one pipeline, in order.
        context: ranks with parts of the same sequences.
        tensor: ranks with parts of the same layers.
        expert: ranks with different experts, neighbours along the data axis; tokens are exchanged over it.
        expert_data: ranks with the same experts; their gradients are reduced over it.
        data_context: data and context together: what reduces gradients where context parallelism is used.
        model: pipeline and tensor together: ranks that hold one copy of the model.
    """

    data: ParallelGroup
    pipeline: ParallelGroup
    context: ParallelGroup
    tensor: ParallelGroup
    expert: ParallelGroup
    expert_data: ParallelGroup
    data_context: ParallelGroup
    model: ParallelGroup

    def __init__(
        self, grid: torch.Tensor, make: Callable[[str, tuple[int, ...], str], ProcessGroup], rank: int
    ) -> None:
        """Find this rank's group along each axis.

        Args:
            grid: (pipeline, outer, expert, context, tensor), the global ranks; data is outer times expert.
            make: returns the group of an axis, of its ranks and its name.
            rank: this rank.
        """
        self._grid, self._rank = grid, rank
        for axis in _AXES:
            for number, members in enumerate(_groups_along(grid, axis)):
                if rank in members:
                    name = f"{_TITLES[axis]} {number}"
                    setattr(
                        self, axis, ParallelGroup(axis, name, make(axis, members, name), members, members.index(rank))
                    )

    @classmethod
    def from_sizes(
        cls,
        *,
        data: int | None = None,
        pipeline: int = 1,
        context: int = 1,
        tensor: int = 1,
        expert: int = 1,
        timeout: Timeout = None,
    ) -> ParallelGroups:
        """Return the groups for these sizes; called by all ranks with the same.

        Args:
            data: number of copies of the model; None for the world size divided by the other sizes.
            pipeline: number of pipeline stages.
            context: number of parts of a sequence.
            tensor: number of parts of a layer.
            expert: number of parts of the experts; divides ``data``.
            timeout: of the groups, in seconds or as a timedelta; None is that of ``init_distributed``.

        Raises:
            ArgumentError: the sizes do not multiply to the world size, or ``expert`` does not divide ``data``.
            CollectiveMismatchError: ranks gave different sizes; names one of them.
        """
        call = "ParallelGroups.from_sizes"
        world = active(call).get_process_group_ranks(None)
        sizes = {"data": data, "pipeline": pipeline, "context": context, "tensor": tensor, "expert": expert}
        found: dict[str, int] = {}

        def prepare() -> tuple[Mapping[str, torch.Tensor], Mapping[str, object]]:
            found.update(checked_sizes(call, sizes, len(world)))
            return {}, found

        check_on_all_ranks(call, prepare)
        shape = (found["pipeline"], found["data"] // expert, expert, context, tensor)
        return cls._made(call, factories.tensor(world).reshape(shape), {}, timeout)

    @classmethod
    def from_mesh(
        cls, mesh: DeviceMesh, *, names: Mapping[str, str] | None = None, timeout: Timeout = None
    ) -> ParallelGroups:
        """Return the groups of a ``DeviceMesh`` over all ranks; groups of its dimensions are used as they are.

        Where ranks do not ascend along a dimension of the mesh, a group in the order of the mesh takes the place of its
        own, which torch sorts.

        Args:
            mesh: its dimensions are named, after axes ("data", "pipeline", "context", "tensor", "expert") or their
                usual short forms ("dp", "pp", "cp", "tp", "ep"). With a dimension for experts, the data axis is the
                data dimension times that of experts.
            names: other names of dimensions, by axis, such as ``{"tensor": "columns"}``.
            timeout: of groups that the mesh does not have.

        Raises:
            ArgumentError: a dimension has no name or one that is no axis, or ranks are missing in the mesh.
        """
        call = "ParallelGroups.from_mesh"
        world = active(call).get_process_group_ranks(None)
        axes = axes_of_mesh(call, mesh, names or {})
        if sorted(mesh.mesh.flatten().tolist()) != sorted(world):
            raise ArgumentError(
                f"{call}: mesh: got one of ranks {sorted(mesh.mesh.flatten().tolist())}; expected all {len(world)} "
                "ranks of the world, each once"
            )
        order = [axes.index(axis) for axis in ("pipeline", "data", "expert", "context", "tensor") if axis in axes]
        shape = [mesh.mesh.shape[axes.index(axis)] if axis in axes else 1 for axis in MESH_NAMES]
        grid = mesh.mesh.permute(order).reshape(shape)
        given = {
            axis: mesh.get_group(place) for place, axis in enumerate(axes) if axis != "data" or "expert" not in axes
        }
        if "expert" in axes and "data" in axes:
            given["expert_data"] = mesh.get_group(axes.index("data"))
        return cls._made(call, grid, given, timeout)

    @classmethod
    def _made(
        cls, call: str, grid: torch.Tensor, given: Mapping[str, ProcessGroup], timeout: Timeout
    ) -> ParallelGroups:
        rank = active(call).get_rank(None)
        made: dict[tuple[int, ...], ProcessGroup] = {}

        def make(axis: str, members: tuple[int, ...], name: str) -> ProcessGroup:
            # Axes with the same ranks share a group: data, and data and context together, without context parallelism.
            if members not in made:
                # A mesh sorts the ranks of its groups.
                if axis in given and tuple(get_process_group_ranks(given[axis])) == members:
                    made[members] = given[axis]
                else:
                    made[members] = new_group(members, timeout, group_desc=name, sort_ranks=False)
            return made[members]

        groups = cls(grid, make, rank)
        if rank == 0:
            logger.info("%s: %s", call, groups._sizes_text())
        logger.debug("%s: %s", call, groups)
        return groups

    @property
    def axes(self) -> dict[str, ParallelGroup]:
        """Return this rank's groups by axis."""
        return {axis: getattr(self, axis) for axis in _AXES}

    def ranks_along(self, axis: str) -> list[tuple[int, ...]]:
        """Return the global ranks of every group of ``axis``, in the order of their numbers.

        Raises:
            ArgumentError: there is no such axis.
        """
        if axis not in _AXES:
            raise ArgumentError(f"ranks_along: axis: got {shown(axis)}; expected one of {', '.join(_AXES)}")
        return _groups_along(self._grid, axis)

    def to_mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """Return a ``DeviceMesh`` of these groups, for torch's own tools; no group is created.

        Its dimensions are "pipeline", "data", "context" and "tensor".

        Args:
            device_type: ``"cpu"``, ``"cuda"`` or ``"xpu"``.
        """
        from torch.distributed.device_mesh import DeviceMesh  # at the first use: it imports much

        grid = self._grid.flatten(1, 2)
        groups = [getattr(self, axis).group for axis in _GRID]
        return DeviceMesh.from_group(groups, device_type, grid, mesh_dim_names=_GRID)

    def _sizes_text(self) -> str:
        sizes = " * ".join(f"{axis} {getattr(self, axis).size}" for axis in ("data", "pipeline", "context", "tensor"))
        return f"{sizes} = {self._grid.numel()} ranks; expert {self.expert.size} of data {self.data.size}"

    def __str__(self) -> str:
        mine = "; ".join(str(one) for one in self.axes.values() if one.size > 1)
        return f"rank {self._rank} is in {mine}" if mine else f"rank {self._rank} is alone on every axis"

    def __repr__(self) -> str:
        return f"<ParallelGroups {self._sizes_text()}>"


def _groups_along(grid: torch.Tensor, axis: str) -> list[tuple[int, ...]]:
    along = [_DIMENSIONS.index(dimension) for dimension in _AXES[axis]]
    across = [dimension for dimension in range(grid.dim()) if dimension not in along]
    size = torch.Size(grid.shape[dimension] for dimension in along).numel()
    return sorted(tuple(members) for members in grid.permute(*across, *along).reshape(-1, size).tolist())
