"""Parameters that two pipeline stages share, such as the embedding of the first and the head of the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from comm_collectives.annotations import Group
from comm_collectives.collectives import all_reduce, broadcast
from comm_collectives.groups import get_process_group_ranks, get_rank, get_world_size, new_group
from comm_collectives.hooks.group_arguments import group_along
from comm_collectives.hooks.handle import handles_of
from comm_collectives.hooks.model_agreement import agree_on_model, check_on_all_ranks
from comm_collectives.hooks.sharded.handle import Sharded
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown
from comm_utils.torch_support import factories

__all__ = ["TiedParameter", "tie_parameter"]


class TiedParameter:
    """A parameter of which some ranks of a pipeline hold copies; made by :func:`tie_parameter`.

    Attributes:
        parameter: this rank's copy; None on ranks without one.
    """

    def __init__(self, parameter: torch.Tensor | None, group: Group, is_shared: bool) -> None:
        self.parameter = parameter
        self._group, self._is_shared = group, is_shared

    def start(self) -> None:
        """Let the gradients that are there now, which are sums already, count once in :meth:`reduce_gradients`.

        Only the first rank with a copy keeps them; on the others ``.grad`` becomes None until then. So they may be
        averaged over data-parallel ranks in between, together with gradients that are new.

        Raises:
            ArgumentError: the parameter has sharded hooks.
        """
        self.check_unsharded("TiedParameter.start")
        if self.parameter is not None and self._is_shared and get_rank(self._group) != 0:
            # Not zeros in place: data-parallel hooks tell by the version of the memory what was reduced before.
            self.parameter.grad = None

    def check_unsharded(self, call: str) -> None:
        """Check that the gradients stay with the parameter: sharded hooks take them away as they arrive.

        Args:
            call: the user's call, for messages.

        Raises:
            ArgumentError: the parameter has sharded hooks.
        """
        if self._is_shared:
            _check_unsharded(call, self.parameter)

    def reduce_gradients(self) -> None:
        """Sum the gradients of the copies, so that all take the same step; where no copy has one, all have none.

        Sparse gradients become dense, as those of the other copies may be.

        Before further gradients are added, call :meth:`start`.
        """
        if self.parameter is None or not self._is_shared:
            return
        gradient = self.parameter.grad
        used = factories.full((1,), gradient is not None, dtype=torch.uint8, device=self.parameter.device)
        all_reduce(used, "max", self._group, compression="none")
        if gradient is None:
            if not used.item():
                return
            gradient = self.parameter.grad = torch.zeros_like(self.parameter)
        elif gradient.is_sparse:
            gradient = self.parameter.grad = gradient.to_dense()
        all_reduce(gradient, "sum", self._group)


def tie_parameter(
    parameter: torch.Tensor | None, group: Any = None, *, ranks: Sequence[int] = (0, -1)
) -> TiedParameter:
    """Make the copies of a parameter in several stages equal, and return what sums their gradients.

    Called by all ranks of the pipeline group.

    Args:
        parameter: this rank's copy, overwritten with that of the first of ``ranks``; None on other ranks. Where one
            rank has both stages, let both use one parameter.
        group: the pipeline group, ``ParallelGroups`` or a ``DeviceMesh``; None is the world group.
        ranks: the ranks within the group that have a copy; negative ones count from the end.

    Raises:
        ArgumentError: a rank of ``ranks`` gave no parameter, or one with sharded hooks; names the rank.
        CollectiveMismatchError: the copies have different shapes, dtypes or orders in memory; names the ranks.
    """
    call = "tie_parameter"
    group = group_along(call, "group", group, "pipeline")
    W, rank = get_world_size(group), get_rank(group)
    holders: list[int] = []
    source: list[int] = []

    def prepare() -> tuple[Mapping[str, torch.Tensor], Mapping[str, object]]:
        if any(not isinstance(one, int) or not -W <= one < W for one in ranks):
            raise ArgumentError(f"{call}: ranks: got {shown(ranks)}; expected ranks of the group, {-W} to {W - 1}")
        given = [one % W for one in ranks]
        source.extend(given[:1])
        holders.extend(sorted(set(given)))
        if rank in holders and not isinstance(parameter, torch.Tensor):
            raise ArgumentTypeError(f"{call}: parameter: got {shown(parameter)}; expected a tensor on ranks {holders}")
        if rank in holders and len(holders) > 1:
            _check_unsharded(call, parameter)
        return {}, {"ranks": holders, "ranks[0]": source[0] if source else None}

    check_on_all_ranks(call, prepare, group)
    if rank not in holders or parameter is None:
        return TiedParameter(None, None, False)
    if len(holders) == 1:
        return TiedParameter(parameter, None, False)
    members = get_process_group_ranks(group)
    own = group
    if len(holders) < W:
        own = new_group([members[one] for one in holders], group_desc="tied parameters", sort_ranks=False)
    agree_on_model(call, {"parameter": parameter}, None, own)
    with torch.no_grad():
        broadcast(parameter.detach(), members[source[0]], own)
    return TiedParameter(parameter, own, True)


def _check_unsharded(call: str, parameter: torch.Tensor | None) -> None:
    if not isinstance(parameter, nn.Parameter):
        return
    for handle in handles_of(nn.ParameterList([parameter])):
        if isinstance(handle, Sharded):
            raise ArgumentError(
                f"{call}: the tied parameter of shape {tuple(parameter.shape)} has the hooks of {handle.call}(), which "
                "take its gradient to the rank that owns it; expected one without them: use "
                "register_data_parallel_hooks(), or register sharded hooks on the other modules of the stage alone"
            )
