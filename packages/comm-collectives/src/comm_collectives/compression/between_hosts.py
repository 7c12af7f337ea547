"""Hierarchical collectives that encode what travels between hosts, and nothing else, as ZeRO++ quantizes gradients.

Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023, section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.distributed import ProcessGroup

from comm_collectives import composed
from comm_collectives.compression import pipeline
from comm_collectives.compression.agreement import Agreement
from comm_collectives.compression.codec import Codec
from comm_collectives.compression.failures import broken
from comm_collectives.compression.link import Link, Sizes
from comm_collectives.compression.settings import Compression
from comm_collectives.failed_steps import failed_step
from comm_collectives.hierarchy.between import Between
from comm_collectives.hierarchy.layout import Layout
from comm_collectives.hierarchy.plan import Plan, find_layout, find_plan
from comm_utils.backend import Backend, Work
from comm_utils.errors import CommError
from comm_utils.reduce_op import ReduceOp
from comm_utils.torch_support.remedies import without_remedy

__all__ = ["EncodedBetween", "run", "suits"]

#: The steps of a collective, given what does the one between hosts.
Steps: TypeAlias = Callable[[Backend, Plan, "EncodedBetween"], None]


class EncodedBetween(Between):
    """Exchanges shares encoded, in the pieces of compressed collectives, and returns when that is complete.

    Args:
        average: return averages over all ranks, of shares that are sums over the ranks of a host.
    """

    piece_bytes = 32 << 20
    waits = True

    def __init__(self, backend: Backend, plan: Plan, codec: Codec, average: bool) -> None:
        super().__init__(backend, plan)
        self._link, self._average = Link(backend, plan.between, codec), average

    def all_reduce(self, share: torch.Tensor, op: ReduceOp) -> None:
        pipeline.all_reduce(self._link, self._prescaled(share), self._average, None)

    def reduce_scatter(self, output: torch.Tensor, share: torch.Tensor, op: ReduceOp) -> None:
        rows = torch.split(self._prescaled(share), output.numel())
        pipeline.reduce_scatter(self._link, output, rows, self._average, None)

    def all_gather(self, share: torch.Tensor, own: torch.Tensor) -> None:
        pipeline.all_gather(self._link, torch.split(share, own.numel()), own)

    def _prescaled(self, share: torch.Tensor) -> torch.Tensor:
        return share.div_(self._plan.layout.ranks_per_host) if self._average else share


def suits(compression: Compression, backend: Backend, group: ProcessGroup | None, *tensors: torch.Tensor) -> bool:
    """Return whether a call on ``tensors``, one a rank or one for all, is to go in steps.

    Where hosts have one rank each, or different numbers of them, everything travels encoded, in one step.
    """
    return (
        compression.between_hosts
        and len({one.numel() for one in tensors}) == 1
        and tensors[0].device.type == "cpu"
        and find_layout(backend, group) is not None
    )


def run(
    call: str,
    backend: Backend,
    group: ProcessGroup | None,
    counted: torch.Tensor,
    op: ReduceOp | None,
    async_op: bool,
    compression: Compression,
    what: str,
    wire_bytes: Callable[[Layout, Sizes], int],
    steps: Steps,
    result: Any,
) -> Work | None:
    """Do ``steps``, now or in the group's thread, and have them recorded as one call of the user's.

    All ranks of the group compare what they are about to do before they send anything else.

    Args:
        what: the collective, its sizes and its dtype.
        wire_bytes: what this rank sends to other hosts, in pieces of these sizes.
    """
    codec, layout = compression.codec, find_layout(backend, group)
    assert codec is not None
    assert layout is not None
    of_all = f"{what}{' (avg)' if op is ReduceOp.AVG else ''} with {compression.describe_call()}"

    def agreed_plan(inner: Backend, used: ProcessGroup | None) -> Plan:
        Agreement(inner, used, of_all).check()
        return find_plan(inner, used)

    def body(inner: Backend, used: ProcessGroup | None) -> None:
        plan = agreed_plan(inner, used)
        try:
            steps(inner, plan, EncodedBetween(inner, plan, codec, op is ReduceOp.AVG))
        except CommError as error:
            failed_step(call, inner, used, plan.groups, error)
            raise
        except Exception as error:
            for one in (plan.within, plan.between):
                inner.mark_broken(one, f"{call}: {without_remedy(error)}")
            raise broken(call, inner, used, compression, error) from error

    sent = wire_bytes(layout, Sizes(codec, len(layout.hosts), layout.host))
    method = repr(compression)
    return composed.run(
        call, backend, group, counted, op, async_op, body, result, method, sent, composed.NO_ROOT, agreed_plan
    )
