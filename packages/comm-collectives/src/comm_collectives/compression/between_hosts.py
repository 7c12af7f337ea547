"""Hierarchical collectives that encode what travels between hosts, and nothing else, as ZeRO++ quantizes gradients.

Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023, section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed import ProcessGroup

from comm_collectives.composed import Method
from comm_collectives.compression import pipeline
from comm_collectives.compression.agreement import Agreement
from comm_collectives.compression.codec import Codec
from comm_collectives.compression.compressed_call import CompressedCall
from comm_collectives.compression.feedback import Feedback
from comm_collectives.compression.link import Link, Sizes
from comm_collectives.compression.shares import Shares
from comm_collectives.compression.states import find_state
from comm_collectives.failed_steps import breaking
from comm_collectives.hierarchy import algorithms
from comm_collectives.hierarchy.between import Between
from comm_collectives.hierarchy.layout import Layout
from comm_collectives.hierarchy.plan import Plan, find_layout, find_plan
from comm_collectives.memory import memory_view
from comm_collectives.reduction import Scaling
from comm_utils.backend import Backend, Work
from comm_utils.reduce_op import ReduceOp

__all__ = ["EncodedBetween", "all_gather", "all_reduce", "reduce_scatter", "suits"]


class EncodedBetween(Between):
    """Exchanges shares encoded, in the pieces of compressed collectives, and returns when that is complete.

    Args:
        average: return averages over all ranks, of shares that are sums over the ranks of a host.
        feedback: what shares have lost; None without.
    """

    piece_bytes = 32 << 20
    waits = True
    sum_dtype = torch.float32

    def __init__(self, backend: Backend, plan: Plan, codec: Codec, average: bool, feedback: Feedback | None) -> None:
        super().__init__(backend, plan)
        self._link, self._average = Link(backend, plan.between, codec), average
        # Shares are sums over a host; the average of the hosts' averages is that of all ranks.
        self._scaling = Scaling(1.0 / plan.layout.ranks_per_host) if average else Scaling()
        self._losses = iter(()) if feedback is None else iter(feedback.of_pieces())

    def all_reduce(self, share: torch.Tensor, op: ReduceOp) -> None:
        pipeline.all_reduce(self._link, self._scaling.prescale(share), self._average, next(self._losses, None))

    def reduce_scatter(self, output: torch.Tensor, share: torch.Tensor, op: ReduceOp) -> None:
        rows = torch.split(self._scaling.prescale(share), output.numel())
        pipeline.reduce_scatter(self._link, output, rows, self._average, next(self._losses, None))

    def all_gather(self, share: torch.Tensor, own: torch.Tensor) -> None:
        pipeline.all_gather(self._link, torch.split(share, own.numel()), own)


def suits(call: CompressedCall, *tensors: torch.Tensor) -> bool:
    """Return whether ``call`` on ``tensors``, one a rank or one for all, is to go in steps.

    Where hosts have one rank each, or different numbers of them, everything travels encoded, in one step.
    """
    return (
        call.compression.between_hosts
        and len({one.numel() for one in tensors}) == 1
        and tensors[0].device.type == "cpu"
        and find_layout(call.backend, call.group) is not None
    )


def all_reduce(call: CompressedCall, tensor: torch.Tensor) -> Work | None:
    """See ``calls.all_reduce``."""
    layout, sizes = _sizes(call)
    elements = memory_view(tensor)

    def shares() -> Shares:
        pieces = algorithms.all_reduce_pieces(layout, elements, EncodedBetween.piece_bytes)
        return Shares.of_all_reduce(layout, sizes, elements.numel(), pieces)

    feedback, refusal = _feedback(call, tensor, shares)

    def steps(inner: Backend, plan: Plan, between: EncodedBetween) -> None:
        unsent = None if feedback is None else feedback.take_unsent()
        # In float32: elements of 16 bits would round most of it away.
        values = None if unsent is None else elements + unsent
        algorithms.all_reduce(inner, plan, elements, ReduceOp.SUM, between, values)

    what = f"all_reduce of {elements.numel()} {elements.dtype}"
    sent = sizes.all_reduce_bytes(-(-elements.numel() // layout.ranks_per_host))
    return _run(call, what, sent, steps, feedback, refusal)


def reduce_scatter(
    call: CompressedCall, output: torch.Tensor, slices: Sequence[torch.Tensor], place: torch.Tensor
) -> Work | None:
    """See ``calls.reduce_scatter``."""
    layout, sizes = _sizes(call)
    row = output.numel()

    def shares() -> Shares:
        pieces = algorithms.reduce_scatter_pieces(layout, output, EncodedBetween.piece_bytes)
        return Shares.of_reduce_scatter(layout, row, pieces)

    feedback, refusal = _feedback(call, place, shares)

    def steps(inner: Backend, plan: Plan, between: EncodedBetween) -> None:
        unsent, rows = None if feedback is None else feedback.take_unsent(), slices
        if unsent is not None:
            rows = [one + more for one, more in zip(slices, torch.split(unsent, row), strict=True)]
        algorithms.reduce_scatter(inner, plan, output, rows, ReduceOp.SUM, between)

    what = f"reduce_scatter of {len(slices)}x{row} {output.dtype}"
    sent = (sizes.size - 1) * sizes.wire_bytes(row)
    return _run(call, what, sent, steps, feedback, refusal)


def all_gather(call: CompressedCall, targets: Sequence[torch.Tensor], source: torch.Tensor) -> Work | None:
    """See ``calls.all_gather``."""
    _, sizes = _sizes(call)

    def steps(inner: Backend, plan: Plan, between: EncodedBetween) -> None:
        algorithms.all_gather(inner, plan, targets, source, between)

    what = f"all_gather of {source.numel()} {source.dtype}"
    sent = (sizes.size - 1) * sizes.wire_bytes(source.numel())
    return _run(call, what, sent, steps, None, "")


def _sizes(call: CompressedCall) -> tuple[Layout, Sizes]:
    """Return the layout of the group, and the sizes of what its hosts exchange."""
    layout = find_layout(call.backend, call.group)
    assert layout is not None
    return layout, Sizes(call.codec, len(layout.hosts), layout.host)


def _feedback(
    call: CompressedCall, place: torch.Tensor, make_shares: Callable[[], Shares]
) -> tuple[Feedback | None, str]:
    """Return what shares have lost, None without error feedback, and why this rank refuses to go on from that."""
    if not call.compression.error_feedback:
        return None, ""
    shares = make_shares()
    return find_state(
        lambda members: call.compression.feedback(place, shares.count, 0, call.averages, members, shares),
        call.backend,
        call.group,
    )


def _run(
    call: CompressedCall,
    what: str,
    wire_bytes: int,
    steps: Callable[[Backend, Plan, EncodedBetween], None],
    feedback: Feedback | None,
    refusal: str,
) -> Work | None:
    """Do ``steps``, now or in the group's thread, and have them recorded as one call of the program's.

    All ranks of the group compare what they are about to do before they send anything else.

    Args:
        what: the collective, its sizes and its dtype.
        wire_bytes: what this rank sends to other hosts.
        steps: the collective, given what does the step between hosts.
        refusal: see ``agreement.Agreement``.
    """
    compression = call.compression
    of_all = f"{what}{' (avg)' if call.averages else ''} with {compression.describe_call()}"

    def agreed_plan(inner: Backend, used: ProcessGroup | None) -> Plan:
        Agreement(inner, used, of_all, refusal=refusal).check()
        return find_plan(inner, used)

    def body(inner: Backend, used: ProcessGroup | None) -> None:
        plan = agreed_plan(inner, used)
        with breaking(call.name, inner, used, plan.groups, what=f"the compression {compression!r}"):
            steps(inner, plan, EncodedBetween(inner, plan, call.codec, call.averages, feedback))
        call.finish()

    return call.run(body, Method(repr(compression), wire_bytes), agreed_plan)
