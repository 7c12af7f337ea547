"""The conformance suite fails for each of the faults in ``faulty_backends.py``, and passes without one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from comm_backend_torch import TorchBackend
from comm_utils.operations import PRIMITIVES
from comm_utils.testing import RankFailure
from comm_utils.testing.conformance import BackendConformance

#: fault -> the suite's test, number of ranks, and what its failure says.
FAULTS = {
    "untouched_by_reduce": ("native_reductions", 2, "reduce .* asynchronously"),
    "untouched_by_broadcast": ("native_movements", 2, "broadcast .* asynchronously"),
    "untouched_by_all_gather": ("native_movements", 2, "all_gather .* asynchronously"),
    "untouched_by_all_gather_into_tensor": ("native_movements", 2, "all_gather_into_tensor .* asynchronously"),
    "untouched_by_all_to_all_single": ("native_movements", 2, "all_to_all_single .* asynchronously"),
    "untouched_by_gather": ("native_movements", 2, "gather .* asynchronously"),
    "untouched_by_scatter": ("native_movements", 2, "scatter .* asynchronously"),
    "zeroed_by_all_gather": ("native_movements", 2, "input of all_gather "),
    "zeroed_by_all_gather_into_tensor": ("native_movements", 2, "input of all_gather_into_tensor "),
    "zeroed_by_all_to_all_single": ("native_movements", 2, "input of all_to_all_single "),
    "zeroed_by_gather": ("native_movements", 2, "input of gather "),
    "group_rank_of_reduce": ("native_reductions", 2, r"reduce .* on ranks \[1, 0\], which names group ranks"),
    "group_rank_of_broadcast": ("native_movements", 2, r"broadcast .* on ranks \[1, 0\], which names group ranks"),
    "group_rank_of_gather": ("native_movements", 2, "gather"),
    "group_rank_of_scatter": ("native_movements", 2, "scatter"),
    "group_rank_of_isend": ("messages", 3, "isend|irecv|send"),
    "group_rank_of_irecv": ("messages", 3, "irecv|recv"),
    "send_goes_astray": ("messages", 3, "send"),
    "isend_goes_astray": ("messages", 3, "send"),
    "all_reduce_without_get_future": ("asynchronous_handles", 2, "NotImplementedError: get_future"),
    "all_reduce_without_is_success": ("asynchronous_handles", 2, "NotImplementedError: is_success"),
    "all_reduce_without_synchronize": ("asynchronous_handles", 2, "NotImplementedError: synchronize"),
    "all_reduce_without_result": ("asynchronous_handles", 2, "NotImplementedError: result"),
    "all_reduce_without_exception": ("asynchronous_handles", 2, "NotImplementedError: exception"),
    "irecv_without_source_rank": ("messages", 2, "NotImplementedError: source_rank"),
    "recv_of_a_wrong_sender": ("messages", 2, "recv .*: got .*; expected rank"),
    "barrier_without_handle": ("native_movements", 2, "barrier .* returned no handle"),
    "create_group_sorts": ("groups", 2, "get_process_group_ranks"),
    "mark_broken_does_nothing": ("state", 1, "check_group raises nothing|outlive mark_broken"),
    "get_timeout_is_wrong": ("state", 1, "get_timeout: got 0:00:01; expected 0:01:00"),
    "empty_shared_raises": ("state", 1, "NotImplementedError: empty_shared"),
    "empty_shared_of_one_dtype": ("state", 1, "empty_shared of torch.int64: got torch.float32"),
    "batch_isend_irecv_raises": ("messages", 2, "NotImplementedError: batch_isend_irecv"),
    "no_reductions": ("native_reductions", 1, "states no native reduction"),
    "no_dtypes": ("native_movements", 1, "does not move bytes"),
    "adopt_raises": ("state", 1, "NotImplementedError: adopt$"),
    "adopts_raises": ("state", 1, "NotImplementedError: adopts$"),
}


def run(provider: str, test: str, world_size: int, fast_paths: frozenset[str] = frozenset()) -> None:
    class Tested(BackendConformance):
        backend_class, backend = TorchBackend, "gloo"

    Tested.provider, Tested.fast_paths = f"faulty_backends:{provider}", fast_paths
    getattr(Tested(), f"test_{test}")(world_size)


@pytest.fixture(autouse=True)
def providers_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


# Each starts ranks: one of each test of the suite, and the others slow.
QUICK = {test: fault for fault, (test, *_) in FAULTS.items()}.values()


@pytest.mark.parametrize("fault", [pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in FAULTS])
def test_a_fault_fails(fault: str) -> None:
    test, world_size, said = FAULTS[fault]
    with pytest.raises(RankFailure) as failure:
        run(fault, test, world_size)
    assert re.search(said, str(failure.value), re.MULTILINE), failure.value


@pytest.mark.slow
@pytest.mark.parametrize(("test", "world_size"), sorted({one[:2] for one in FAULTS.values()}))
def test_no_fault_passes(test: str, world_size: int) -> None:
    run("faultless", test, world_size)


@pytest.mark.parametrize("test", ["fast_path", "native_reductions", "course_of_a_call", "state"])
def test_a_backend_without_fast_paths_passes_unless_it_means_to_have_them(test: str) -> None:
    run("without_fast_paths", test, 2)


@pytest.mark.parametrize("test", ["fast_path", "native_reductions"])
def test_a_fast_path_that_is_missing_fails(test: str) -> None:
    with pytest.raises(RankFailure, match="there is no fast"):
        run("without_fast_paths", test, 2, PRIMITIVES)
