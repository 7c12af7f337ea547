"""Calls of ``deepspeed.comm`` that DeepSpeed makes in its own ways, without DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from world_helpers import BACKENDS, on

import comm_orchestrator as dist
from comm_collectives.in_order import _started, in_order
from comm_orchestrator.facade.deepspeed_calls import all_gather, as_expected
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]


def padded_lists() -> None:
    """Gather as ZeRO-3 with Muon does: one matrix, and one tensor for the ranks that have none."""
    rank = dist.get_rank()
    for kind in (torch.Tensor.clone, torch.nn.Parameter):
        for async_op in (True, False):
            matrix: torch.Tensor = kind(torch.full((2, 2), rank + 1.0))
            padding = torch.full_like(matrix, rank + 1.0)
            outputs = [matrix, padding, padding]
            with torch.no_grad():
                work = all_gather(outputs, outputs[rank], group=dist.get_world_group(), async_op=async_op)
            if async_op:
                work.wait()
            assert outputs[0] is matrix
            assert torch.equal(matrix, torch.ones(2, 2))
            assert torch.equal(padding, torch.full((2, 2), 3.0))  # the last one's
    same = torch.empty(1)
    all_gather(tensor_list=[same] * 3, tensor=torch.tensor([rank + 1.0]), log_name="padded")
    assert same.item() == 3.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_tensor_for_several_ranks_receives_the_last_ones(bare_pools: Pools, backend: str) -> None:
    bare_pools(3).run(on, backend, padded_lists)


def other_forms() -> None:
    rank = dist.get_rank()
    assert [one.item() for one in all_gather(torch.tensor([rank]))] == [0, 1]
    assert [one.item() for one in all_gather(tensor=torch.tensor([rank]))] == [0, 1]
    memory = torch.ones(5)
    wrong: list[tuple[Any, type[Exception], str]] = [
        ([memory[:4], memory[1:]], ArgumentError, "got tensors that share memory"),
        ([memory[:4], memory[:4]], ArgumentError, "got tensors that share memory"),
        ([None, None], ArgumentTypeError, "got None; expected a tensor"),
        ([torch.ones(4, 1).expand(4, 2)] * 2, ArgumentError, "which has gaps or overlaps in memory"),
    ]
    for outputs, kind, text in wrong:
        with pytest.raises(kind, match=rf"^all_gather: tensor_list(\[.\])?: .*{text}"):
            all_gather(outputs, torch.ones(4))
    with pytest.raises(ArgumentError, match=r"^all_gather: tensor_list: got tensors that share memory"):
        dist.all_gather([memory] * 2, torch.ones(5))


def test_other_calls_are_as_ever(bare_pools: Pools) -> None:
    bare_pools(2).run(on, "gloo", other_forms)


def wait_for_the_last() -> None:
    """Start several calls and wait for the last one alone, as ZeRO-3 does to gather parameters."""
    rank = dist.get_rank()
    start_gather, start_reduce = in_order(dist.all_gather_into_tensor), in_order(dist.all_reduce)
    other = dist.new_group([0, 1])
    for _ in range(5):
        part = torch.full((1 << 20,), rank + 1.0)
        gathered, average, short = torch.zeros(2 << 20), part.clone(), torch.ones(2)
        whole = torch.full((1 << 10,), rank + 1, dtype=torch.int16)
        unawaited = start_gather(gathered, part, group=other, async_op=True)
        dropped = [start_reduce(one, op, other, True) for one, op in ((average, "avg"), (whole, "sum"))]
        del dropped
        assert start_reduce(short, "sum", other, True).wait()
        assert torch.equal(gathered, torch.arange(1.0, 3.0).repeat_interleave(1 << 20))
        assert torch.equal(average, torch.full_like(average, 1.5))
        assert torch.equal(whole, torch.full_like(whole, 3))
        assert unawaited.is_completed()
    assert start_reduce(torch.ones(1)) is None
    last = start_gather(torch.empty(2), torch.ones(1), async_op=True)
    assert last.result().tolist() == [1.0, 1.0]
    assert last.exception() is None
    assert not _started
    reduced = torch.ones(2)
    (found,) = start_reduce(reduced, async_op=True).get_future().wait()
    assert found is reduced
    assert found.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wait_for_the_last_call_waits_for_those_before(bare_pools: Pools, backend: str) -> None:
    bare_pools(2).run(on, backend, wait_for_the_last)


def compiled_calls() -> None:
    start = in_order(dist.all_reduce)

    def twice(tensor: torch.Tensor, async_op: bool) -> torch.Tensor:
        work = start(tensor, async_op=async_op)
        if async_op:
            work.wait()
        return 2 * tensor

    for async_op in (False, True):
        compiled = torch.compile(twice, backend="eager", fullgraph=not async_op)
        assert compiled(torch.ones(3), async_op).tolist() == [4.0] * 3


def test_calls_that_wait_in_order_can_be_compiled(bare_pools: Pools) -> None:
    bare_pools(2).run(on, "gloo", compiled_calls)


def test_handles_of_replaced_collectives_wait_in_order() -> None:
    assert as_expected(dist.all_gather_into_tensor) is in_order(dist.all_gather_into_tensor)
    for other in (dist.send, dist.isend, dist.get_rank, dist.ReduceOp, dist.init_distributed):
        assert as_expected(other) is other
