import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from torch.distributed import HashStore, TCPStore

from comm_backend_torch import provider, starts
from comm_backend_torch.capabilities import capabilities_of
from comm_utils import BackendUnavailableError, CommTimeoutError, NotInitializedError, PeerLostError, ReduceOp, Setup
from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.flight_recorder.recorder import RECORDER
from comm_utils.testing import run_ranks
from comm_utils.torch_support.group_creation import GroupMaker
from comm_utils.torch_support.initialization import device_libraries


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("cpu:gloo,cuda:nccl", {"cpu": "gloo", "cuda": "nccl"}),
        ("CPU:GLOO", {"cpu": "gloo"}),
        ("nccl", {"cuda": "nccl"}),
        ("a-plugin", {"cpu": "a-plugin"}),
    ],
)
def test_device_libraries(backend: str, expected: dict[str, str]) -> None:
    assert device_libraries(backend) == expected


def spaced() -> list[float]:
    backend = provider.initialize(Setup("gloo", 0, 1, HashStore()))
    group = backend.create_group([0], "spaced", backend="cpu: gloo , cuda:gloo ")
    tensor = torch.ones(2)
    backend.all_reduce(tensor, "sum", group)
    return tensor.tolist()


def test_spaces_between_devices_of_a_group_are_left_out() -> None:
    assert run_ranks(spaced, 1) == [[1.0, 1.0]]


def test_gloo_serves_the_cpu() -> None:
    assert device_libraries("gloo")["cpu"] == "gloo"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_library_that_cannot_be_had_is_refused_with_the_remedy() -> None:
    with pytest.raises(BackendUnavailableError, match=r"backend 'nccl' cannot be used: .*; (install|check)"):
        provider.initialize(Setup("nccl", 0, 1, HashStore()))
    assert not torch.distributed.is_initialized()


def too_few_ranks() -> str:
    # One of two ranks: the other never comes.
    store = TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=1))
    with pytest.raises(
        CommTimeoutError, match=r"rank 0: not every rank of \[0, 1\] came to make the group: \[1\] did not within 1 s"
    ):
        provider.initialize(Setup("gloo", 0, 2, store, timedelta(seconds=1)))
    return "timeout"


def test_ranks_that_never_come_are_a_timeout() -> None:
    assert run_ranks(too_few_ranks, 1, timeout_s=40) == ["timeout"]


def destroyed_under_us() -> None:
    backend = provider.initialize(Setup("gloo", 0, 1, HashStore()))
    backend.all_reduce(torch.ones(1))
    fast = backend.fast_path("all_reduce", "sum")
    assert fast is not None
    assert fast(torch.ones(1)) is True
    group = backend.create_group([0], "alone")
    backend.all_reduce(torch.ones(1), "sum", group)
    torch.distributed.destroy_process_group(group)
    assert "alone" in RECORDER._groups
    backend._forget_ended()  # as when the next group is met
    assert "alone" not in RECORDER._groups
    with pytest.raises(NotInitializedError, match="no longer exists"):
        backend.get_rank(group)
    torch.distributed.destroy_process_group()
    assert not backend.is_initialized()
    assert fast(torch.ones(1)) is False
    with pytest.raises(NotInitializedError, match=r"init_distributed|initialize\(setup\)"):
        backend.check_group()
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    tensor = torch.ones(1)
    assert fast(tensor) is False  # it was the other world's
    again = backend.fast_path("all_reduce", "sum")
    assert again is not None
    assert again(tensor) is True
    assert tensor.item() == 1
    torch.distributed.destroy_process_group()


def test_a_world_that_is_destroyed_through_torch() -> None:
    run_ranks(destroyed_under_us, 1)


def test_a_group_that_could_not_be_made_needs_no_description_any_more() -> None:
    before, planned, limit = set(RECORDER._ended), RingGroup("never made", (0, 1), "", "gloo"), timedelta(seconds=0.3)
    with pytest.raises(CommTimeoutError, match="did not within"):
        GroupMaker().make("new_group", planned, 0, HashStore(), limit, pytest.fail)
    assert "never made (making)" not in RECORDER._groups
    assert len(RECORDER._ended.keys() - before) == 1


def test_who_waits_in_vain_to_make_a_group_learns_of_both_groups_and_calls() -> None:
    first, second = RingGroup("first", (0, 1), "", "fake"), RingGroup("second", (0, 2), "", "fake")
    maker, store, limit = GroupMaker(), HashStore(), timedelta(seconds=0.3)

    def create() -> c10d.ProcessGroup:
        return maker.make("new_group", second, 0, store, limit, pytest.fail)

    both = r"^new_group on rank 0: the group of ranks \[0, 2\] .* makes the group of ranks \[0, 1\] in all_reduce, "
    with pytest.raises(CommTimeoutError, match=both):
        maker.make("all_reduce", first, 0, store, limit, create)


def adopted_fake_world() -> tuple[str, int, int]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    assert provider.adopts("fake")
    backend = provider.adopt()
    backend.all_reduce(torch.ones(4))
    backend.barrier()
    return backend.get_backend(), backend.get_rank(), backend.get_world_size()


def test_the_fake_backend_is_adopted_like_any_other() -> None:
    assert run_ranks(adopted_fake_world, 1) == [("fake", 3, 8)]


def operators_of_a_fast_call() -> bool:
    """Return whether a profiler sees the operator of torch's dispatcher."""
    from torch.profiler import ProfilerActivity, profile

    backend = provider.initialize(Setup("gloo", 0, 1, HashStore()))
    fast = backend.fast_path("all_reduce", "sum")
    assert fast is not None
    direct = torch.full((3,), 2.0)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        assert fast(torch.ones(3)) is True
    assert fast(direct) is True
    assert torch.equal(direct, torch.full((3,), 2.0))
    gathered = torch.zeros(3)
    into = backend.fast_path("all_gather_into_tensor")
    assert into is not None
    assert into(gathered, direct) is True
    assert torch.equal(gathered, direct)
    return any(one.key == "c10d::allreduce_" for one in profiled.key_averages())


def test_a_profiler_sees_the_operators_of_fast_calls() -> None:
    assert run_ranks(operators_of_a_fast_call, 1) == [True]


def barriers_beside_an_accelerator() -> None:
    """Every barrier is one of gloo where torch's default is the accelerator's library, as beside NCCL."""
    backend = provider.initialize(Setup("gloo", 0, 1, HashStore()))
    fast = backend.fast_path("barrier")
    assert fast is not None
    c10d.distributed_c10d._get_default_group()._set_default_backend(c10d.ProcessGroup.BackendType.NCCL)
    for _ in range(2):
        backend.barrier()
        assert fast() is True
        with torch.autograd.profiler.profile():
            assert fast() is True
        backend.during("barrier", timedelta(seconds=30)).barrier()
        work = backend.barrier(async_op=True)
        assert work is not None
        work.wait()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_barrier_takes_one_library_however_it_is_called() -> None:
    run_ranks(barriers_beside_an_accelerator, 1)


@pytest.mark.parametrize(
    ("devices", "device_ids", "expected"),
    [
        (("cpu", "cuda"), None, "cpu"),
        (("cuda", "cpu"), None, "cpu"),
        (("cpu", "cuda"), [1], "cuda"),
        (("cuda",), None, "cuda"),
        (("cpu",), [0], "cpu"),
    ],
)
def test_the_device_of_a_barrier(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...], device_ids: list[int] | None, expected: str
) -> None:
    monkeypatch.setattr(starts, "present", list)
    state: Any = SimpleNamespace(devices=devices)
    assert starts.device_of_barrier(state, device_ids) == expected
    asked: list[Any] = []
    library: Any = SimpleNamespace(barrier=asked.append)
    kind = starts.CallKind("barrier", "barrier", state, expected, None, None, False, library, None, device_ids)
    start = starts.STARTS["barrier"](kind)
    assert start is not None
    start()
    (options,) = asked
    assert options.device == torch.device(expected, 1 if device_ids == [1] else None)
    assert options.device_ids == (device_ids or [])


def breaks_during_a_call() -> None:
    backend = provider.initialize(Setup("gloo", 0, 1, HashStore()))
    assert backend.fast_path("all_reduce", "sum") is not None
    backend.mark_broken(None, "a call in another thread failed")
    for async_op in (False, True):
        assert backend.fast_path("all_reduce", "sum", None, async_op) is None


def test_a_broken_group_has_no_fast_path() -> None:
    run_ranks(breaks_during_a_call, 1)


def test_an_unknown_library_gets_cautious_capabilities() -> None:
    unknown = capabilities_of("somebody-elses")
    assert (ReduceOp.SUM, torch.float32) in unknown.reductions
    assert (ReduceOp.SUM, torch.bfloat16) not in unknown.reductions
    assert not unknown.tags
    assert not unknown.any_source


def test_every_library_states_its_availability() -> None:
    found = provider.availability()
    registered = {name.lower() for name in c10d.Backend._plugins}  # another test may have registered torch's fake one
    assert set(found) - registered == {"gloo", "nccl", "mpi", "ucc", "xccl"}
    assert found["gloo"].usable
    assert torch.__version__ in found["gloo"].reason


def leave_while_others_join() -> str:
    store, rank, world_size = next(c10d.rendezvous("env://"))
    if rank == 0:
        store.wait(["about to join"])
        return ""  # and its store with it
    store.set("about to join", "")
    with pytest.raises(PeerLostError) as caught:
        provider.initialize(Setup("gloo", rank, world_size, store, timedelta(seconds=30)))
    return str(caught.value)


def test_a_rank_that_leaves_during_the_start_is_no_timeout() -> None:
    for _ in range(3):
        _, found = run_ranks(leave_while_others_join, 2, timeout_s=60)
        assert found.startswith("rank 1 of 2: another rank ended or gave up while the gloo world group was created")


WORLDS = """
from torch.distributed import HashStore
from comm_backend_torch import provider
from comm_utils import Setup
for _ in range(3):
    provider.initialize(Setup("gloo", 0, 1, HashStore())).destroy_process_group()
raise ValueError("after three worlds")
"""


def test_a_traceback_has_its_prefix_once_however_many_worlds_there_were() -> None:
    ended = subprocess.run([sys.executable, "-c", WORLDS], capture_output=True, text=True, check=False)
    assert "\n[rank0]: ValueError: after three worlds" in ended.stderr
    assert "[rank0]: [rank0]" not in ended.stderr
