"""Collectives in the memory that the ranks of a host share: what is special about them."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as c10d

import comm_orchestrator as dist
from comm_backend_ccl import shared_tensors
from comm_utils.active import active_backend
from comm_utils.testing import RankPool, run_ranks, run_ranks_outcomes

Pools: TypeAlias = Callable[[int], RankPool]

_FOUND = dist.available_backends()["ccl"]
_HERE = "between" in _FOUND.details.get("shared memory", "")
pytestmark = pytest.mark.skipif(not _HERE, reason=_FOUND.details.get("shared memory", _FOUND.reason))

LARGE = 300_001


def start() -> None:
    dist.init_distributed("ccl", verbose=False)


@pytest.fixture(scope="module")
def shared(rank_environment: dict[str, Any]) -> Any:
    with RankPool(4, env=rank_environment, setup=start) as four, RankPool(2, env=rank_environment, setup=start) as two:
        yield {2: two, 4: four}.__getitem__


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers whose sums depend on their order."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(count, generator=generator) * 10.0 ** torch.randint(-3, 4, (count,), generator=generator)).to(
        dtype
    )


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


# --- tensors that live where peers can reach them


def run_shared_tensors() -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    mine = dist.empty_shared((W, 1000, 100))
    assert type(mine) is torch.Tensor
    assert (mine.shape, mine.dtype, mine.device.type) == ((W, 1000, 100), torch.float32, "cpu")
    assert mine.is_contiguous()
    private = values(rank, mine.numel()).view_as(mine)
    for call in (
        lambda t: dist.all_reduce(t),
        lambda t: dist.all_reduce(t[1]),
        lambda t: dist.broadcast(t, W - 1),
        lambda t: dist.all_gather_into_tensor(t, t[rank].clone()),
        lambda t: dist.all_gather_into_tensor(t, t[rank]),
        lambda t: dist.reduce_scatter_tensor(t[rank], t.clone(), "avg"),
        lambda t: dist.reduce(t, 1),
    ):
        expected = private.clone()
        call(expected)
        mine.copy_(private)
        call(mine)
        assert bits(mine) == bits(expected)
    for call in (
        lambda o, i: dist.all_gather_into_tensor(o, i[0]),
        lambda o, i: dist.reduce_scatter_tensor(o[0], i),
        lambda o, i: dist.all_to_all_single(o, i),
    ):
        expected, output = torch.zeros_like(private), torch.zeros_like(private)
        call(expected, private)
        mine.copy_(private)
        call(output, mine)
        assert bits(output) == bits(expected)
        assert bits(mine) == bits(private)


@pytest.mark.parametrize("world_size", [2, 4])
def test_collectives_on_shared_tensors_give_the_same_bits(shared: Pools, world_size: int) -> None:
    shared(world_size).run(run_shared_tensors)


def run_ordinary() -> None:
    rank = dist.get_rank()
    layer = torch.nn.Linear(400, 400)
    for parameter in layer.parameters():
        parameter.data = dist.empty_shared(parameter.shape).copy_(parameter.data)
        parameter.grad = dist.empty_shared(parameter.shape).zero_()
    where = layer.weight.grad.data_ptr()  # type: ignore[union-attr]
    layer(torch.full((2, 400), rank + 1.0)).sum().backward()
    assert layer.weight.grad.data_ptr() == where  # type: ignore[union-attr]
    dist.all_reduce(layer.weight.grad)
    assert (layer.weight.grad == 6.0).all()
    pair = dist.new_group([0, 1])
    again = dist.empty_shared(LARGE, torch.bfloat16, pair)
    again.fill_(rank + 0.5)
    dist.all_reduce(again, "avg", pair)
    assert (again == 1.0).all()
    assert dist.empty_shared((0, 3)).shape == (0, 3)
    assert dist.empty_shared((), torch.complex64).fill_(1j).item() == 1j
    for wrong, text in (
        ((-1,), "shape: got"),
        (("a",), "shape"),
        (2**62, r"shape: got \(4611686018427387904,\) of torch.float32, 16 EiB; expected less than 4 EiB"),
        ((2**40, 2**40), "shape: got .* EiB; expected less than"),
        ((2**63, 0), "shape: got .* expected less than"),
        ((10**400,), "shape: got .* expected less than"),
    ):
        with pytest.raises(dist.ArgumentError, match=text):
            dist.empty_shared(wrong)  # type: ignore[arg-type]
    with pytest.raises(dist.ArgumentTypeError, match=r"dtype: got 'float32'; expected a torch\.dtype"):
        dist.empty_shared(3, "float32")  # type: ignore[arg-type]
    dist.destroy_process_group(pair)


def test_they_are_ordinary_tensors(shared: Pools) -> None:
    shared(2).run(run_ordinary)


def run_reused() -> list[int]:
    sizes = []
    for _ in range(3):
        held = dist.empty_shared(LARGE)
        held.fill_(1.0)
        dist.all_reduce(held)
        view = held[10:]
        del held
        assert view[0].item() == 2.0  # which keeps the memory
        del view
        gc.collect()
        found = dist.shared_memory_stats()
        sizes.append(found["used_bytes"] + found["free_bytes"])
    return sizes


def test_memory_is_used_again(shared: Pools) -> None:
    for sizes in shared(2).run(run_reused):
        assert len(set(sizes)) == 1


def resident_mib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssShmem:")[2].split()[0]) // 1024


def run_growing(sizes_mib: list[float]) -> None:
    """One tensor alive at a time."""
    before = dist.shared_memory_stats()
    descriptors, resident = len(os.listdir("/proc/self/fd")), resident_mib()
    for size in sizes_mib:
        tensor = dist.empty_shared(int(size * 2**20), torch.uint8)
        tensor.fill_(1)
        del tensor
    found = dist.shared_memory_stats()
    assert found["tensors"] == before["tensors"]
    assert found["used_bytes"] == before["used_bytes"]
    assert found["free_bytes"] <= found["bound_bytes"] <= max(64, 2 * max(sizes_mib)) * 2**20
    assert found["descriptors"] == 1
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1
    assert resident_mib() - resident <= found["bound_bytes"] / 2**20 + 2


@pytest.mark.parametrize("sizes", [[one / 200 for one in range(1, 301)], [float(one) for one in range(1, 130, 16)]])
def test_freed_memory_serves_tensors_of_other_sizes(shared: Pools, sizes: list[float]) -> None:
    shared(2).run(run_growing, sizes, timeout_s=60)


def run_returned() -> None:
    """Blocks move, merge and are returned between operations; no rank reads what was there before."""
    rank, W = dist.get_rank(), dist.get_world_size()
    held: list[torch.Tensor] = []
    for turn in range(24):
        count = 40_000 + 17_001 * (turn * 7 % 11)
        tensor = dist.empty_shared(count)
        tensor.fill_(rank + turn)
        dist.all_reduce(tensor)
        expected = turn * W + W * (W - 1) // 2
        assert (tensor == expected).all(), turn
        output = dist.empty_shared(W * count)
        dist.all_gather_into_tensor(output, tensor.add_(rank))
        assert output.view(W, count)[:, 0].tolist() == [float(expected + one) for one in range(W)]
        held.append(tensor)
        if turn % 3 == 2:
            del held[:2], tensor, output
        if turn % 6 == rank:  # at another time on each rank
            large = dist.empty_shared(2**25, torch.uint8)
            del large
    dist.barrier()


def test_memory_that_was_returned_is_never_read(shared: Pools) -> None:
    shared(4).run(run_returned, timeout_s=60)


def run_fsdp() -> list[list[float]]:
    from torch.distributed.fsdp import fully_shard

    losses = []
    for from_group in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 64))
        fully_shard(model, mesh=c10d.init_device_mesh("cpu", (2,)))
        if from_group:
            if not hasattr(model, "set_allocate_memory_from_process_group_for_comm"):
                return [[], []]
            model.set_allocate_memory_from_process_group_for_comm(True)  # type: ignore[operator]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mine = []
        for step in range(4):
            torch.manual_seed(10 * step + dist.get_rank())
            loss = model(torch.randn(8, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mine.append(loss.item())
        losses.append(mine)
    return losses


def test_fsdp2_allocates_in_memory_of_the_group(shared: Pools) -> None:
    for ordinary, allocated in shared(2).run(run_fsdp, timeout_s=100):
        assert ordinary == allocated


# --- the same bits, whatever


def run_deterministic(dtype: torch.dtype) -> bytes:
    rank = dist.get_rank()
    mine = values(rank, LARGE, dtype)
    whole = mine.clone()
    dist.all_reduce(whole)
    parts = mine.clone()
    for part in parts.split((7, 100, 4096, LARGE - 4203)):
        dist.all_reduce(part)
    assert bits(parts) == bits(whole)
    moved = torch.empty(LARGE + 3, dtype=dtype)[3:].copy_(mine)
    works = [dist.all_reduce(part, async_op=True) for part in moved.split(50_000)]
    for work in works:
        work.wait()  # type: ignore[union-attr]
    assert bits(moved) == bits(whole)
    scattered = torch.empty(LARGE - LARGE % 4, dtype=dtype)
    W = dist.get_world_size()
    part = scattered.numel() // W
    dist.reduce_scatter_tensor(scattered[:part], mine[: scattered.numel()].clone())
    assert bits(scattered[:part]) == bits(whole[rank * part : (rank + 1) * part])
    return bits(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_sum_has_the_same_bits_however_it_was_made(shared: Pools, dtype: torch.dtype) -> None:
    found = shared(4).run(run_deterministic, dtype)
    assert len(set(found)) == 1


def run_sum_of(parts: int) -> bytes:
    """The sum of 4 parts, of which each rank has summed its own first."""
    rank = dist.get_rank()
    mine = [values(rank * parts + one, LARGE) for one in range(parts)]
    total = sum(mine[1:], mine[0])
    dist.all_reduce(total)
    return bits(total)


def test_a_sum_does_not_depend_on_the_number_of_ranks(shared: Pools) -> None:
    """Ranks are added as a balanced tree, so two ranks that hold two parts each come to what four ranks come to."""
    assert set(shared(4).run(run_sum_of, 1)) == set(shared(2).run(run_sum_of, 2))


def test_every_build_of_the_kernels_gives_the_same_bits(shared: Pools, rank_environment: dict[str, Any]) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    expected = [shared(4).run(run_deterministic, dtype) for dtype in dtypes]
    for kernels in ("portable", "avx2", "avx512"):
        with RankPool(4, env={**rank_environment, "CCL_KERNELS": kernels}, setup=start) as other:
            assert [other.run(run_deterministic, dtype) for dtype in dtypes] == expected, kernels


# --- calls that differ

DIFFERENT: dict[str, tuple[Callable[[], object], Callable[[], object], str]] = {
    "op": (
        lambda: dist.all_reduce(torch.ones(5), "max"),
        lambda: dist.all_reduce(torch.ones(5), "sum"),
        "all_reduce(5 x float32, max)",
    ),
    "size": (
        lambda: dist.all_reduce(torch.ones(5)),
        lambda: dist.all_reduce(torch.ones(6)),
        "all_reduce(6 x float32, sum)",
    ),
    "large size": (
        lambda: dist.all_reduce(torch.ones(LARGE)),
        lambda: dist.all_reduce(torch.ones(LARGE + 1)),
        f"all_reduce({LARGE + 1} x float32, sum)",
    ),
    "dtype": (
        lambda: dist.all_reduce(torch.ones(5)),
        lambda: dist.all_reduce(torch.ones(5, dtype=torch.int32)),
        "all_reduce(5 x int32, sum)",
    ),
    "operation": (
        lambda: dist.barrier(),
        lambda: dist.all_reduce(torch.ones(5)),
        "barrier on rank",
    ),
    "root": (
        lambda: dist.reduce(torch.ones(5), 0),
        lambda: (dist.reduce(torch.ones(5), 1), dist.barrier()),
        "root 1",
    ),
    "dtype of a message": (
        lambda: dist.recv(torch.ones(3, dtype=torch.int32), 1),
        lambda: (dist.send(torch.ones(3), 0), dist.barrier()),
        "rank 1 sends 3 x float32, and rank 0 expects 3 x int32",
    ),
    "split sizes": (
        lambda: dist.all_to_all_single(torch.ones(5), torch.ones(5), [2, 3], [2, 3]),
        lambda: dist.all_to_all_single(torch.ones(5), torch.ones(5), [4, 1], [4, 1]),
        "disagree about how much",
    ),
}


@pytest.fixture(scope="module")
def unwatched(rank_environment: dict[str, Any]) -> Any:
    """Ranks of which only the engine compares calls: the watch, which does as well, may be sooner."""
    with RankPool(2, env={**rank_environment, "COMM_CHECKS__ENABLED": "false"}, setup=start) as ranks:
        yield ranks


def run_different(case: str) -> str:
    call = DIFFERENT[case][0 if dist.get_rank() == 0 else 1]
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(3), "sum", group)
    try:
        call()
        dist.barrier()
    except dist.CollectiveMismatchError as error:
        dist.destroy_process_group()
        start()
        return str(error)
    raise AssertionError("nothing was noticed")


@pytest.mark.parametrize("case", DIFFERENT)
def test_calls_that_differ_are_an_error_on_every_rank(unwatched: RankPool, case: str) -> None:
    for message in unwatched.run(run_different, case, timeout_s=30):
        assert DIFFERENT[case][2] in message
        assert "destroy_process_group()" in message


def run_both_ways(default: torch.dtype) -> None:
    rank, ones, pair = dist.get_rank(), torch.ones(2), torch.ones(1)
    calls: list[tuple[Callable[[], Any], torch.Tensor, float]] = [
        (dist.barrier, torch.ones(1), 1),
        (lambda: dist.all_reduce(ones.fill_(1)), ones, 2),
        (lambda: dist.inference_all_reduce(ones.fill_(1)), ones, 2),
        (lambda: dist.broadcast(ones.fill_(rank), 1), ones, 1),
        (lambda: dist.all_gather_into_tensor(ones, pair.fill_(3)), ones, 3),
        (lambda: dist.reduce_scatter_tensor(pair, ones.fill_(2)), pair, 4),
        (lambda: dist.all_to_all_single(ones, ones.clone().fill_(5)), ones, 5),
    ]
    torch.set_default_dtype(default)
    try:
        for turn in range(6):
            for call, changed, value in calls:
                if (turn + rank) % 3 == 0:
                    active_backend().fast_paths.clear()  # as after a new group, or a change of the comms logger
                call()
                assert changed.unique().tolist() == [value], (call, turn)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16, torch.float64])
def test_ranks_may_take_different_ways_to_the_same_call(shared: Pools, default: torch.dtype) -> None:
    shared(2).run(run_both_ways, default, timeout_s=60)


def test_settings_that_mean_nothing_are_named(rank_environment: dict[str, Any]) -> None:
    odd = {"CCL_KERNELS": "portabel", "CCL_SHARED_MEMORY": "maybe"}
    odd |= {"CCL_SHARED_MEMORY_TRANSFER": "fast", "CCL_SHARED_MEMORY_LEARNING": "no"}
    for outcome in run_ranks_outcomes(start, 2, env=rank_environment | odd):
        assert "CCL_KERNELS: got 'portabel', expected one of avx512, avx2, neon, portable" in outcome.stderr
        assert "CCL_SHARED_MEMORY: got 'maybe', expected 0 or 1; shared memory is used" in outcome.stderr
        assert "CCL_SHARED_MEMORY_TRANSFER: got 'fast', expected one of cached, streamed, single_copy" in outcome.stderr
        assert "CCL_SHARED_MEMORY_LEARNING: got 'no', expected 0 or 1; the fastest is measured" in outcome.stderr


# --- arithmetic


def run_flushing(flushes: list[bool], late: int) -> list[float]:
    """Reduce denormals while threads flush them; the rank that is late waits in its progress thread."""
    tiny = torch.full((1000,), 1e-39)
    dist.all_reduce(torch.ones(1), async_op=True).wait()  # from here on there is a progress thread
    torch.set_flush_denormal(flushes[dist.get_rank()])
    try:
        if dist.get_rank() != late:
            time.sleep(0.3)
        work = dist.all_reduce(tiny, async_op=True)
        if dist.get_rank() == late:
            time.sleep(0.6)
        work.wait()
    finally:
        torch.set_flush_denormal(False)
    return sorted(set(tiny.tolist()))


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("flushes", [[True, True], [True, False]], ids=["all ranks", "one rank"])
def test_threads_that_flush_denormals_get_the_same_bits(shared: Pools, flushes: list[bool], late: int) -> None:
    tiny = torch.full((1000,), 1e-39)
    assert shared(2).run(run_flushing, flushes, late) == [sorted(set((tiny + tiny).tolist()))] * 2


# --- memory


def run_without_room() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    dist.init_distributed("ccl", verbose=False, timeout=20)


def test_too_little_memory_is_told_on_every_rank(rank_environment: dict[str, Any]) -> None:
    for outcome in run_ranks_outcomes(run_without_room, 2, env=rank_environment):
        assert "rank 0: shared memory of " in outcome.message
        assert "MiB cannot be created (File too large); raise the limit of file sizes (ulimit -f)" in outcome.message
        assert "CCL_SHARED_MEMORY=0 does without shared memory" in outcome.message


def run_too_large() -> None:
    with pytest.raises(
        dist.BackendUnavailableError,
        match=r"empty_shared: .* needs 268435456 MiB of shared memory, and \d+ MiB is available",
    ):
        dist.empty_shared(2**46)
    # What no tensor can have is refused before, as an argument; the backend does not rely on that.
    for shape in ((2**62,), (2**40, 2**40)):
        with pytest.raises(dist.BackendUnavailableError, match=r"empty_shared: .* needs \d{5,} MiB of shared memory"):
            shared_tensors.empty_shared(shape, torch.float32)
    dist.barrier()


def test_a_tensor_that_does_not_fit_is_told(shared: Pools) -> None:
    shared(2).run(run_too_large)


def run_names() -> None:
    before = set(Path("/dev/shm").iterdir())
    kept = dist.empty_shared(LARGE)
    group = dist.new_group([0, 1])
    dist.all_reduce(kept, "sum", group)
    assert set(Path("/dev/shm").iterdir()) == before
    own = list(Path("/proc/self/fd").iterdir())
    ours = [path for path in own if path.is_symlink() and os.readlink(path).startswith("/memfd:comm")]
    assert len(ours) >= 3  # of two groups, and of all tensors
    for path in ours:
        assert path.stat().st_mode & 0o777 == 0o600
    dist.destroy_process_group(group)


def test_memory_has_no_name_that_could_stay(shared: Pools) -> None:
    shared(2).run(run_names)


def run_without_oneccl() -> str:
    dist.init_distributed(verbose=False)
    tensor = torch.ones(LARGE)
    dist.all_reduce(tensor)
    assert (tensor == 2).all()
    name = dist.get_backend()
    dist.destroy_process_group()
    return name


def test_it_works_where_oneccl_does_not(rank_environment: dict[str, Any]) -> None:
    env = {**rank_environment, "CCL_OFI_LIBRARY_PATH": "/nowhere/libfabric.so"}
    assert run_ranks(run_without_oneccl, 2, env=env) == ["ccl", "ccl"]


# --- ranks that come late, and limits


def run_late(seconds: float) -> tuple[str, float]:
    group = dist.new_group([0, 1], timeout=seconds)
    dist.barrier(group)
    late = dist.get_rank() == 1
    if late:
        time.sleep(2 * seconds)
    begin = time.monotonic()
    with pytest.raises(dist.CommTimeoutError) as caught:
        dist.all_reduce(torch.ones(3), group=group)
    taken = time.monotonic() - begin
    with pytest.raises(dist.BrokenGroupError):
        dist.all_reduce(torch.ones(3), group=group)
    return str(caught.value), taken


def test_a_late_rank_learns_at_once_that_its_peers_gave_up(shared: Pools) -> None:
    (waited, _), (came, taken) = shared(2).run(run_late, 1.0, timeout_s=30)
    assert "timed out after 1 s, as seen by rank 0: rank 1 (pid " in waited
    assert "has not called all_reduce, for which rank 0 waits" in waited
    assert "That is this rank, which came too late" in came
    assert "rank 0 timed out waiting for rank 1" in came
    assert taken < 0.8


def run_three_late() -> str:
    group = dist.new_group([0, 1, 2, 3], timeout=1.0)
    dist.barrier(group)
    if dist.get_rank() in (1, 3):
        time.sleep(1.5)
    with pytest.raises(dist.CommTimeoutError) as caught:
        dist.all_gather_into_tensor(torch.ones(4 * LARGE), torch.ones(LARGE), group)
    return str(caught.value)


def test_every_rank_names_those_that_did_not_come(shared: Pools) -> None:
    for message in shared(4).run(run_three_late, timeout_s=30):
        assert "rank 1 (pid " in message
        assert "rank 3 (pid " in message


def run_out_of_descriptors() -> str:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    dist.init_distributed("ccl", verbose=False, timeout=20)
    groups = []
    try:
        for _ in range(64):
            groups.append(dist.new_group([0, 1]))
            dist.all_reduce(torch.ones(3), group=groups[-1])
    except dist.BackendUnavailableError as error:
        return str(error)
    raise AssertionError("64 groups were made with 64 descriptors")


def test_the_limit_of_descriptors_is_named_on_every_rank(rank_environment: dict[str, Any]) -> None:
    for message in run_ranks(run_out_of_descriptors, 2, env=rank_environment):
        assert "has reached its limit of 64 open files; raise it before the start (ulimit -n 4096" in message


# --- operations under way


def wait_for_a_late_rank() -> float:
    """Return the processor time, in seconds, of all threads in the second in which the other rank is late."""
    tensor = torch.ones(LARGE)
    dist.all_reduce(tensor, async_op=True).wait()  # type: ignore[union-attr]
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(1.5)
    begun = time.process_time()
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    if dist.get_rank() == 0:
        time.sleep(1.0)
        assert not work.is_completed()
    used = time.process_time() - begun
    work.wait()
    return used


def test_an_operation_under_way_does_not_take_a_core(shared: Pools) -> None:
    assert shared(2).run(wait_for_a_late_rank)[0] < 0.1
