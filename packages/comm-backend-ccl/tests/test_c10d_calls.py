"""Calls through ``torch.distributed`` whose arguments are wrong or unusual, on both engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as c10d

from comm_backend_ccl import oneccl_library, registration, shared_memory
from comm_utils.errors import ArgumentError
from comm_utils.testing import RankPool

ENGINES = [
    pytest.param(
        "1", id="shared-memory", marks=pytest.mark.skipif(shared_memory.unavailable_reason() is not None, reason="")
    ),
    pytest.param(
        "0", id="oneccl", marks=pytest.mark.skipif(oneccl_library.unavailable_reason() is not None, reason="")
    ),
]


def start() -> None:
    registration.register()
    c10d.init_process_group("ccl")


@pytest.fixture(scope="module", params=ENGINES)
def two(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    env = {"CCL_SHARED_MEMORY": request.param, "CUDA_VISIBLE_DEVICES": ""}
    with RankPool(2, env=env, setup=start) as pool:
        yield pool


def refused(call: Callable[[], object], text: str) -> None:
    """Check that a call is refused on this rank alone: the other one does not make it, and the group stays usable."""
    if c10d.get_rank() == 0:
        with pytest.raises(ArgumentError, match=text):
            call()
    tensor = torch.ones(3)
    c10d.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3


def run_sizes_that_do_not_fit() -> None:
    group = c10d.group.WORLD
    assert group is not None
    memory = torch.zeros(64)
    output, large = memory[:4], torch.ones(32)
    refused(lambda: c10d.all_to_all_single(output, large), "an output of 4 elements and an input of 32")
    refused(lambda: c10d.all_to_all_single(torch.zeros(8), torch.ones(4)), "an output of 8 elements and an input of 4")
    refused(lambda: group.alltoall_base(output, large, [], []), "an output of 4 elements and an input of 32")
    few, many = [output], [torch.ones(2), torch.ones(2)]
    refused(lambda: group.allgather_into_tensor_coalesced(few, many), "got 1 outputs for 2 inputs")
    refused(lambda: group.allgather_into_tensor_coalesced([output, output], [many[0], large]), "a tensor of 4 elements")
    refused(lambda: group.reduce_scatter_tensor_coalesced(few, many), "got 1 outputs for 2 inputs")
    refused(lambda: group.reduce_scatter_tensor_coalesced(many, [output, large]), "a tensor of 32 elements")
    refused(lambda: group.allgather_coalesced([few, few], many), "got 1 outputs for 2 inputs")
    refused(lambda: group.allgather_coalesced([many, [output, output]], many), "a tensor of 4 elements")
    assert not memory.any()


def test_sizes_that_do_not_fit_are_refused_before_anything_is_sent(two: RankPool) -> None:
    two.run(run_sizes_that_do_not_fit)


def run_exchange_of_other_shapes() -> None:
    """Parts of as many elements, of another shape."""
    output = torch.zeros(2, 4)
    c10d.all_to_all_single(output, torch.full((4, 2), c10d.get_rank() + 1.0))
    assert output.tolist() == [[1.0] * 4, [2.0] * 4]


def test_an_exchange_takes_tensors_of_other_shapes(two: RankPool) -> None:
    two.run(run_exchange_of_other_shapes)


def run_where_outputs_are_inputs() -> None:
    """The sizes are those at which the engines work in pieces."""
    count, rank = 1 << 18, c10d.get_rank()
    for _ in range(3):
        parts = torch.stack((torch.full((count,), 1.0 + rank), torch.full((count,), 10.0 + rank)))
        for place in (0, 1):  # where this rank's part is, and where it is not
            both = parts.clone()
            c10d.reduce_scatter_tensor(both[place], both)
            assert both[place].unique().tolist() == [3.0 if rank == 0 else 21.0]
        both = parts.clone()
        c10d.all_to_all_single(both, both)
        assert both[:, 0].tolist() == ([1.0, 2.0] if rank == 0 else [10.0, 11.0])
        assert both.max(1).values.tolist() == both.min(1).values.tolist()
        both = parts.clone().view(-1)
        c10d.all_to_all_single(both, both, [count, count], [count, count])
        assert both.view(2, -1).min(1).values.tolist() == ([1.0, 2.0] if rank == 0 else [10.0, 11.0])
        for place in (0, 1):
            both = parts.clone()
            c10d.all_gather_into_tensor(both.view(-1), both[place])
            expected = [1.0 + 9 * place, 2.0 + 9 * place]
            assert both.min(1).values.tolist() == both.max(1).values.tolist() == expected


def test_outputs_may_lie_where_inputs_do(two: RankPool) -> None:
    two.run(run_where_outputs_are_inputs)


def run_wrong_ranks_and_own_parts() -> None:
    group, x = c10d.group.WORLD, torch.ones(4)
    assert group is not None
    outside = "root: got rank 7; expected one of the group, 0 to 1"
    refused(lambda: c10d.broadcast(x, group_src=7), outside)
    refused(lambda: c10d.reduce(x, group_dst=7), outside)
    refused(lambda: c10d.gather(x, None, group_dst=7), outside)
    refused(lambda: c10d.scatter(x, None, group_src=7), outside)
    refused(lambda: group.broadcast(x, root=-1), "root: got rank -1")
    refused(lambda: group.send([x], 7), "got rank 7 as the peer; expected another rank of the group")
    refused(lambda: group.send([x], 0), "got rank 0 as the peer; expected another rank of the group")
    refused(lambda: group.recv([x], 7), "got rank 7 as the peer; expected another rank of the group")
    own = "got 2 elements to send to this rank itself, and room for 1; expected as many"
    refused(lambda: c10d.all_to_all_single(torch.zeros(3), torch.ones(3), [1, 2], [2, 1]), own)
    refused(lambda: c10d.all_to_all_single(torch.zeros(2), torch.ones(3), None, [2, 1]), own)
    refused(lambda: c10d.all_to_all([torch.ones(1), x], [torch.ones(2), x]), own)


def test_what_a_rank_alone_can_know_is_refused_before_anything_is_sent(two: RankPool) -> None:
    two.run(run_wrong_ranks_and_own_parts)


def run_lazy_views() -> None:
    rank = c10d.get_rank()
    negated = torch._neg_view(torch.full((4,), rank + 1.0))
    outputs = [torch.zeros(4), torch._neg_view(torch.zeros(4))]
    c10d.all_gather(outputs, negated)
    assert [one.tolist() for one in outputs] == [[-1.0] * 4, [-2.0] * 4]
    c10d.all_gather_into_tensor(both := torch.zeros(8), negated)
    assert both.tolist() == [-1.0] * 4 + [-2.0] * 4
    c10d.broadcast(copied := torch._neg_view(torch.full((4,), rank + 1.0)), 1)
    assert copied.tolist() == [-2.0] * 4
    c10d.all_reduce(negated, c10d.ReduceOp.MAX)
    assert negated.tolist() == [-1.0] * 4
    # What torch's own function refuses to view as real numbers.
    numbers, group = torch.full((4,), 1 + 1j * (rank + 1)).conj(), c10d.group.WORLD
    assert group is not None
    group.broadcast(numbers, root=1).wait()
    assert numbers.tolist() == [1 - 2j] * 4


def test_lazily_negated_and_conjugated_views_travel_as_their_elements(two: RankPool) -> None:
    two.run(run_lazy_views)


def run_ops_that_a_dtype_lacks() -> None:
    eighth, numbers = torch.ones(2, dtype=torch.float8_e5m2), torch.ones(2)
    bitwise, scaled = c10d.ReduceOp.BAND, c10d._make_nccl_premul_sum(2.0)
    refused(lambda: c10d.all_reduce(eighth), "^allreduce: torch.float8_e5m2 tensors can be moved but not reduced")
    refused(lambda: c10d.all_reduce(numbers, bitwise), "^allreduce: op 'band' is not defined for torch.float32")
    refused(lambda: c10d.all_reduce(numbers, scaled), "^allreduce: op: got ReduceOp.PREMUL_SUM")
    refused(lambda: c10d.reduce(numbers, 0, bitwise), "^reduce: op 'band'")
    refused(lambda: c10d.reduce_scatter(numbers, [numbers, numbers], bitwise), "^reduce_scatter: op 'band'")
    flat = torch.ones(4)
    refused(lambda: c10d.reduce_scatter_tensor(numbers, flat, bitwise), "^reduce_scatter_tensor: op 'band'")
    refused(lambda: c10d.all_reduce_coalesced([numbers], bitwise), "^allreduce_coalesced: op 'band'")


def test_ops_that_a_dtype_lacks_are_refused_by_the_name_of_the_call(two: RankPool) -> None:
    two.run(run_ops_that_a_dtype_lacks)
