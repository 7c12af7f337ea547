"""Checks that gradients of a pipeline's stages are reduced by the hooks that stages and tied parameters have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from comm_collectives.hooks.handle import GRADIENTS, handles_of
from comm_collectives.hooks.pipeline.actions import BACKWARD, Compute, Schedule
from comm_collectives.hooks.pipeline.tied import TiedParameter
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown

__all__ = ["check_no_sync", "check_tied"]


def check_no_sync(call: str, schedule: Schedule, rank: int, stages: Mapping[int, Any]) -> None:
    """Check that the last backward pass of a rank, the only one outside of ``no_sync``, makes all hooks reduce.

    Args:
        call: the user's call, for messages.
        schedule: whose passes the rank runs.
        rank: within the pipeline group.
        stages: those of the rank, by number.

    Raises:
        ArgumentError: another stage has hooks that the stage of this pass has not; names both.
    """
    passes = [one for one in schedule.actions[rank] if isinstance(one, Compute) and one.kind == BACKWARD]
    if not passes:
        return
    last = passes[-1].stage
    found = {stage: handles_of(module) for stage, module in stages.items() if isinstance(module, nn.Module)}
    for stage, handles in found.items():
        for handle in handles:
            if handle.kind == GRADIENTS and handle not in found.get(last, []):
                raise ArgumentError(
                    f"{call}: no_sync: the hooks of {handle.call}() on stage {stage} have no parameter of stage "
                    f"{last}, whose backward pass is this rank's last and the only one outside of no_sync, so they "
                    "would never reduce gradients; expected one handle for all stages of the rank: call "
                    f"{handle.call}(nn.ModuleList(stages))"
                )


def check_tied(call: str, tied: Any) -> None:
    """Check that gradients of ``tied`` stay with their parameters.

    Args:
        call: the user's call, for messages.
        tied: what the user gave.

    Raises:
        ArgumentError: one has sharded hooks.
        ArgumentTypeError: it is no list or tuple, or one is no :class:`TiedParameter`.
    """
    if not isinstance(tied, (list, tuple)):
        raise ArgumentTypeError(f"{call}: tied: got {shown(tied)}; expected a list of results of tie_parameter()")
    for one in tied:
        if not isinstance(one, TiedParameter):
            raise ArgumentTypeError(f"{call}: tied: got {shown(one)}; expected results of tie_parameter()")
        one.check_unsharded(call)
