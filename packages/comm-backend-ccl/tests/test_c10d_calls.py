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
