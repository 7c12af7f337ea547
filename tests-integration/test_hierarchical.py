"""Hierarchical collectives: ranks of one machine that are told to be on several hosts.

Real hosts, with a network between them, are in ``launchers/test_hierarchical_across_hosts.py``.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from world_helpers import BACKENDS, world_on

import comm_orchestrator as dist
from comm_collectives.compression.between_hosts import EncodedBetween
from comm_collectives.hierarchy import algorithms, choice
from comm_collectives.hierarchy import plan as plans
from comm_collectives.hierarchy.backend import HierarchicalBackend
from comm_collectives.hierarchy.between import Between
from comm_collectives.hierarchy.layout import layout_of, set_hosts
from comm_collectives.wrapping import bare_backend
from comm_utils.errors import ArgumentError, BackendUnavailableError, CollectiveMismatchError, CommError
from comm_utils.testing import RankPool, patience, per_rank, run_ranks, run_ranks_outcomes

Pools = Callable[[int], RankPool]

MAKING = "making groups within hosts and between them"
HOST_BY_HOST, ROUND_ROBIN = (0, 0, 1, 1), (0, 1, 0, 1)
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def on(backend: str, host_of: tuple[int, ...], body: Callable[..., Any], *args: Any) -> Any:
    """Call ``body`` on every rank of a world on ``backend`` whose ranks are said to be on these hosts."""
    with world_on(backend):
        set_hosts(host_of)
        try:
            return body(*args)
        finally:
            dist.configure(enabled=False)
            dist.reset_log()


def values(count: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Return elements whose sums are exact in every dtype, whatever their order."""
    return ((torch.arange(count) * 7 + rank * 3) % 5).to(dtype)


def methods() -> list[str]:
    return sorted({row.method for row in dist.log_rows()})


def every_collective(piece_bytes: int, dtypes: tuple[torch.dtype, ...] = DTYPES) -> list[str]:
    """Compare hierarchical calls with flat ones; return the methods of the former."""
    rank, W = dist.get_rank(), dist.get_world_size()
    algorithms._PIECE_BYTES = piece_bytes
    dist.configure(enabled=True)
    dist.reset_log()

    def both(call: Callable[[], Any]) -> Any:
        dist.set_hierarchical(False)
        expected = call()
        dist.set_hierarchical(0)
        found = call()
        assert torch.equal(found, expected)
        return found

    for dtype in dtypes:
        for count in (0, 1, 7, 1001):

            def reduced(op: str, asynchronous: bool, dtype: torch.dtype = dtype, count: int = count) -> torch.Tensor:
                tensor = values(count, dtype, rank)
                work = dist.all_reduce(tensor, op, async_op=asynchronous)
                if work is not None:
                    work.wait()
                return tensor

            def scattered(op: str, dtype: torch.dtype = dtype, count: int = count) -> torch.Tensor:
                output = torch.empty(count, dtype=dtype)
                dist.reduce_scatter_tensor(output, values(W * count, dtype, rank), op)
                again = torch.empty(count, dtype=dtype)
                dist.reduce_scatter(again, list(values(W * count, dtype, rank).view(W, count)), op)
                assert torch.equal(again, output)
                return output

            def gathered(dtype: torch.dtype = dtype, count: int = count) -> torch.Tensor:
                output = torch.empty(W * count, dtype=dtype)
                dist.all_gather_into_tensor(output, values(count, dtype, rank))
                listed = [torch.empty(count, dtype=dtype) for _ in range(W)]
                dist.all_gather(listed, values(count, dtype, rank))
                assert torch.equal(torch.cat(listed), output)
                return output

            def sent(src: int, dtype: torch.dtype = dtype, count: int = count) -> torch.Tensor:
                tensor = values(count, dtype, rank)
                dist.broadcast(tensor, src)
                assert torch.equal(tensor, values(count, dtype, src))
                return tensor

            ops = ["sum"] if dtype is torch.complex64 else ["sum", "max", "product"]
            for op in ops + (["avg"] if dtype.is_floating_point else []):
                both(lambda op=op: reduced(op, False))
                both(lambda op=op: reduced(op, True))
                both(lambda op=op: scattered(op))
            both(gathered)
            for src in range(W) if dtype is dtypes[0] else (W - 1,):
                both(lambda src=src: sent(src))
    uneven = [torch.ones(r + 1) * (rank + 1) for r in range(W)]
    part = torch.empty(rank + 1)
    dist.reduce_scatter(part, uneven)
    assert torch.equal(part, torch.full((rank + 1,), float(sum(range(1, W + 1)))))
    pieces = [torch.empty(r + 1) for r in range(W)]
    dist.all_gather(pieces, torch.full((rank + 1,), float(rank)))
    assert [piece.tolist() for piece in pieces] == [[float(r)] * (r + 1) for r in range(W)]
    algorithms._PIECE_BYTES = 4 << 20
    return methods()


@pytest.mark.parametrize(
    ("backend", "host_of", "piece_bytes"),
    [
        ("gloo", HOST_BY_HOST, 4 << 20),
        ("gloo", ROUND_ROBIN, 2048),
        ("shared memory", HOST_BY_HOST, 4 << 20),
        ("shared memory", ROUND_ROBIN, 2048),
        ("oneCCL", ROUND_ROBIN, 2048),
        pytest.param("oneCCL", HOST_BY_HOST, 4 << 20, marks=pytest.mark.slow),
    ],
)
def test_every_collective_has_the_result_of_a_flat_one(
    bare_pools: Pools, backend: str, host_of: tuple[int, ...], piece_bytes: int
) -> None:
    found = bare_pools(4).run(on, backend, host_of, every_collective, piece_bytes)
    assert found == [["", "hierarchical(2 hosts x 2 ranks)"]] * 4


@pytest.mark.parametrize("host_of", [(0, 0, 0, 1, 1, 1), (0, 1, 2, 0, 1, 2)])
def test_other_numbers_of_hosts(bare_pools: Pools, host_of: tuple[int, ...]) -> None:
    expected = f"hierarchical({len(set(host_of))} hosts x {6 // len(set(host_of))} ranks)"
    assert bare_pools(6).run(on, "gloo", host_of, every_collective, 1000, DTYPES[:2]) == [["", expected]] * 6


def which_are_hierarchical() -> dict[str, list[str]]:
    """Return the methods of calls on groups of other layouts, and with other settings."""
    rank, W = dist.get_rank(), dist.get_world_size()
    dist.configure(enabled=True)
    found: dict[str, list[str]] = {}

    def called(name: str, group: Any = None, count: int = 1000) -> None:
        dist.reset_log()
        tensor = torch.ones(count)
        dist.all_reduce(tensor, group=group)
        members = W if group is None else dist.get_world_size(group)
        assert tensor[0] == members
        found[name] = methods()

    dist.set_hierarchical(4000)
    called("at the size")
    called("below it", count=999)
    called("again", count=1001)
    dist.set_hierarchical(False)
    called("never")
    dist.set_hierarchical(0)
    whole = dist.new_group(list(range(W)))
    called("another group of all", whole)
    dist.set_hierarchical(False, whole)
    called("that group never", whole)
    called("the world still")
    if rank < 3:
        called("two ranks and one", dist.new_group([0, 1, 2]))
    if rank in (0, 2):
        called("one rank a host", dist.new_group([0, 2]))
    if rank in (0, 1):
        called("one host", dist.new_group([0, 1]))
    set_hosts(None)
    called("hosts that nobody knows", dist.new_group(list(range(W))))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_hierarchical(bare_pools: Pools, backend: str) -> None:
    name = ["hierarchical(2 hosts x 2 ranks)"]
    of_world = {
        "at the size": name,
        "below it": [""],
        "again": name,
        "never": [""],
        "another group of all": name,
        "that group never": [""],
        "the world still": name,
        "hosts that nobody knows": [""],
    }
    of_some = {"two ranks and one": (0, 1, 2), "one rank a host": (0, 2), "one host": (0, 1)}
    for rank, found in enumerate(bare_pools(4).run(on, backend, HOST_BY_HOST, which_are_hierarchical)):
        assert found == of_world | {one: [""] for one, ranks in of_some.items() if rank in ranks}


def measured() -> list[tuple[int | None, bool]]:
    """Return from where on calls were found to be faster, and whether one of 2 MiB took that choice."""
    dist.configure(enabled=True)
    found = []
    for call in (
        lambda: dist.all_reduce(torch.ones(1 << 19)),
        lambda: dist.broadcast(torch.ones(1 << 19), 1),
        lambda: dist.all_gather_into_tensor(torch.empty(1 << 19), torch.ones(1 << 17)),
        lambda: dist.reduce_scatter_tensor(torch.empty(1 << 17), torch.ones(1 << 19)),
    ):
        call()
        dist.reset_log()
        call()
        (plan,) = plans._plans.values()
        limit = list(plan.min_size_bytes.values())[-1]
        (row,) = dist.log_rows()
        found.append((limit, bool(row.method) == (limit is not None and limit <= 2 << 20)))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_measure_what_is_faster(bare_pools: Pools, backend: str) -> None:
    first, *others = bare_pools(4).run(on, backend, HOST_BY_HOST, measured)
    assert all(one == first for one in others)
    assert len(first) == 4
    for limit, chosen in first:
        assert limit is None or limit in choice._MEASURED_BYTES
        assert chosen


def asynchronous() -> list[str]:
    """Start calls, do others, and wait in another order."""
    rank, W = dist.get_rank(), dist.get_world_size()
    dist.configure(enabled=True)
    dist.reset_log()
    dist.set_hierarchical(0)
    tensors = [torch.full((5000,), float(rank + number)) for number in range(6)]
    handles = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    between = torch.full((5000,), float(rank))
    dist.all_reduce(between)
    for handle in reversed(handles):
        handle.wait()
    assert between[0] == sum(range(W))
    for number, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full((5000,), float(sum(range(W)) + number * W)))
    return methods()


@pytest.mark.parametrize("backend", BACKENDS)
def test_asynchronous_calls(bare_pools: Pools, backend: str) -> None:
    assert bare_pools(4).run(on, backend, ROUND_ROBIN, asynchronous) == [["hierarchical(2 hosts x 2 ranks)"]] * 4


def left_by_groups() -> bool:
    """Return whether groups that are destroyed leave neither groups nor connections behind."""
    W = dist.get_world_size()

    def held() -> tuple[int, int]:
        return len(distributed_c10d._world.pg_map), len(os.listdir("/proc/self/fd"))

    def make_use_and_destroy() -> None:
        group = dist.new_group(list(range(W)))
        dist.all_reduce(torch.ones(1000), group=group)
        dist.all_reduce(torch.ones(1000), group=group, async_op=True).wait()
        dist.destroy_process_group(group)

    dist.set_hierarchical(0)
    make_use_and_destroy()
    time.sleep(1)  # by then, the watch has opened the rings of the other ranks
    before = held()
    for _ in range(3):
        make_use_and_destroy()
    end = time.monotonic() + patience()
    while held() > before and time.monotonic() < end:
        time.sleep(0.01)
    dist.barrier()
    return held() <= before


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_leave_nothing(bare_pools: Pools, backend: str) -> None:
    assert bare_pools(4).run(on, backend, HOST_BY_HOST, left_by_groups) == [True] * 4


def lose_a_rank() -> tuple[str, str]:
    """Return how a call with a peer that is gone ends, and the next call of the group."""
    dist.set_hierarchical(0)
    group = dist.new_group(list(range(dist.get_world_size())), timeout=5)
    dist.all_reduce(torch.ones(1000), group=group)
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    found = []
    for _ in range(2):
        try:
            dist.all_reduce(torch.ones(1000), group=group)
        except CommError as error:
            found.append(type(error).__name__)
    return found[0], found[1]


def lose_a_rank_of_the_world() -> list[str]:
    """Return what a call with a peer that is gone says, and the next call."""
    dist.set_hierarchical(0)
    dist.all_reduce(torch.ones(1000))
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    found = []
    for _ in range(2):
        with pytest.raises(CommError) as caught:
            dist.all_reduce(torch.ones(1000))
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize("backend", ["gloo", "shared memory"])
def test_errors_of_steps_have_the_remedy_of_the_whole_group(backend: str) -> None:
    outcomes = run_ranks_outcomes(on, 4, backend, HOST_BY_HOST, lose_a_rank_of_the_world, timeout_s=120)
    for outcome in outcomes[:3]:
        first, second = outcome.value
        for text in (first, second):
            assert text.count("init_distributed() again") == 1, text
            assert "destroy_process_group(group)" not in text
        # The group of the call comes before that of the step.
        assert first.startswith(
            "all_reduce on the group of ranks [0, 1, 2, 3] failed in a step: all_reduce on the group"
        )
        assert second.startswith(
            "all_reduce: the group of ranks [0, 1, 2, 3] failed earlier (all_reduce: all_reduce on"
        )


def lose_a_rank_while_steps_are_measured() -> str:
    dist.set_hierarchical(0)
    dist.all_reduce(torch.ones(1000))
    dist.set_hierarchical("auto")
    if dist.get_rank() == 3:
        HierarchicalBackend._run = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    with pytest.raises(CommError) as caught:
        dist.all_reduce(torch.ones(1 << 20))
    return str(caught.value)


def test_an_error_of_the_measurement_names_the_group_of_the_call_once() -> None:
    outcomes = run_ranks_outcomes(on, 4, "gloo", HOST_BY_HOST, lose_a_rank_while_steps_are_measured, timeout_s=120)
    for outcome in outcomes[:3]:
        said = "all_reduce on the group of ranks [0, 1, 2, 3] failed in a step: "
        assert outcome.value.startswith(said)
        assert outcome.value.count(said) == 1, outcome.value


@pytest.mark.parametrize("backend", ["gloo", "shared memory"])
def test_a_rank_that_is_lost(backend: str) -> None:
    outcomes = run_ranks_outcomes(on, 4, backend, HOST_BY_HOST, lose_a_rank, timeout_s=120)
    for outcome in outcomes[:3]:
        first, second = outcome.value
        assert first in ("PeerLostError", "CommTimeoutError")
        assert second == "BrokenGroupError"


@contextmanager
def staying(folder: Path, ranks: int) -> Iterator[None]:
    """Wait at the end of the block until so many ranks are there; one that raises in it keeps nobody waiting."""
    folder.mkdir(exist_ok=True)
    try:
        yield
    finally:
        (folder / str(dist.get_rank())).touch()
    end = time.monotonic() + min(60 * patience(), 100)
    while len(os.listdir(folder)) < ranks and time.monotonic() < end:
        time.sleep(0.01)


def fail_on_one_rank(error: type[BaseException] | None, between_hosts: bool, folder: str) -> list[str]:
    """Fail in a step on rank 3, or get a signal there; return how the call ends on each rank, and the next one.

    No rank fails before the first call has ended everywhere, as steps of that may be under way on ranks that were
    late, which hear of the failure in them.
    """
    dist.set_hierarchical(0)
    group = dist.new_group([0, 1, 2, 3], timeout=600)
    compression: Any = dist.Compression("int8", between_hosts=True) if between_hosts else "none"
    with staying(Path(folder) / "begun", 4):
        dist.all_reduce(torch.ones(1000), group=group, compression=compression)

    def fail(*_: Any) -> None:
        if error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        elif error is KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.raise_signal(signal.SIGINT)
        else:
            raise error("out of luck")

    if dist.get_rank() == 3:
        Between.all_reduce = EncodedBetween.all_reduce = fail  # type: ignore[assignment, method-assign]
    return how_two_calls_end(group, compression, folder, 3 if error is None else 4)


def how_two_calls_end(
    group: Any, compression: Any, folder: str, survivors: int = 4, async_op: bool = False, elements: int = 1000
) -> list[str]:
    """Return how two calls end on this rank.

    It stays until so many ranks have got that far, so that nobody's end ends the wait of another.
    """
    found = []
    with staying(Path(folder) / "ended", survivors):
        for _ in range(2):
            try:
                tensor = torch.ones(elements)
                work = dist.all_reduce(tensor, group=group, compression=compression, async_op=async_op)
                if work is not None:
                    work.wait()
            except (CommError, KeyboardInterrupt) as raised:
                found.append(f"{type(raised).__name__}: {raised}")
    return found


@pytest.mark.parametrize("between_hosts", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt, None])
@pytest.mark.parametrize("backend", ["gloo", "shared memory"])
def test_a_step_that_fails_ends_the_call_on_every_rank(
    tmp_path: Path, backend: str, error: type[BaseException] | None, between_hosts: bool
) -> None:
    args = error, between_hosts, str(tmp_path)
    outcomes = run_ranks_outcomes(
        on, 4, backend, HOST_BY_HOST, fail_on_one_rank, *args, timeout_s=min(90 * patience(), 200)
    )
    for rank, outcome in enumerate(outcomes[: 3 if error is None else 4]):
        first, second = outcome.value
        if error is KeyboardInterrupt:
            assert first.startswith("KeyboardInterrupt: " if rank == 3 else ("BrokenGroupError: ", "PeerLostError: "))
            assert rank == 3 or ("rank 3 (pid " in first and "was interrupted (SIGINT) in all_reduce" in first)
        elif rank == 3:
            assert first.startswith("BrokenGroupError: all_reduce: ")
            assert f"raised {error.__name__}: out of luck" in first
        elif error is None:
            assert first.startswith("PeerLostError: ")
            assert "rank 3 (pid " in first
        else:
            assert first.startswith("CollectiveMismatchError: ")
            assert "rank 3 gave up in all_reduce" in first
            assert f"raised {error.__name__}: out of luck" in first
        assert second.startswith("BrokenGroupError: ")


def fail_to_make_groups(
    failing: str, async_op: bool, after: int, error: type[BaseException], between_hosts: bool, folder: str, late: int
) -> list[str]:
    """Fail on rank 3 while the first call makes its groups; return how it ends on each rank, and the next one.

    Args:
        after: so many groups with ``failing`` in their names, which rank 3 makes before.
        late: so many ranks begin their calls when all have heard of the failure.
    """
    dist.set_hierarchical(0)
    group = dist.new_group([0, 1, 2, 3], timeout=600)
    compression: Any = dist.Compression("int8", between_hosts=True) if between_hosts else "none"
    backend = bare_backend()
    create = type(backend).create_group
    made = 0

    def create_or_fail(self: Any, ranks: Any, name: str, *args: Any, **named: Any) -> Any:
        nonlocal made
        made += failing in name
        if failing in name and made > after:
            raise error("rank 3 is out of luck")
        return create(self, ranks, name, *args, **named)

    if dist.get_rank() == 3:
        type(backend).create_group = create_or_fail  # type: ignore[method-assign]
    elif dist.get_rank() < late:
        end = time.monotonic() + 60
        while not (Path(folder) / "ended" / "3").exists() and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(1)  # longer than the watch of a rank takes to look around
    return how_two_calls_end(group, compression, folder, async_op=async_op)


@pytest.mark.parametrize(
    ("failing", "async_op", "after", "error", "between_hosts"),
    [
        ("-host-", False, 0, RuntimeError, False),
        ("-local-rank-", False, 0, BackendUnavailableError, False),
        ("-local-rank-", False, 0, MemoryError, True),
        ("-host-", True, 0, RuntimeError, False),
        ("comm-compression-", True, 0, RuntimeError, False),
        ("comm-compression-", True, 0, BackendUnavailableError, True),
        ("-host-", True, 1, RuntimeError, False),
        ("-local-rank-", True, 1, BackendUnavailableError, False),
        ("-local-rank-", True, 0, MemoryError, True),
    ],
)
@pytest.mark.parametrize("backend", ["gloo", "shared memory"])
def test_a_rank_that_cannot_make_the_groups_of_steps_ends_the_call_on_every_rank(
    tmp_path: Path,
    backend: str,
    failing: str,
    async_op: bool,
    after: int,
    error: type[Exception],
    between_hosts: bool,
) -> None:
    args = fail_to_make_groups, failing, async_op, after, error, between_hosts, str(tmp_path), 0
    outcomes = run_ranks_outcomes(on, 4, backend, HOST_BY_HOST, *args, timeout_s=min(90 * patience(), 200))
    for rank, outcome in enumerate(outcomes):
        first, second = outcome.value
        assert "rank 3 is out of luck" in first
        making = "making the group for asynchronous calls" if "compression" in failing else MAKING
        # A rank may hear of it just before a step, in whichever of its groups.
        within = r"(all_reduce on the group of ranks [^:]+ failed in a step: )?"
        before = rf"BrokenGroupError: {within}the group of ranks \[\d, \d\] failed earlier \(rank 3 gave up in "
        if rank == 3:
            by = "BackendUnavailableError: " if error is BackendUnavailableError else f"BrokenGroupError: {making}: "
            assert first.startswith(by)
        elif error is BackendUnavailableError:  # which others hear of as of a lack
            assert first.startswith("CommTimeoutError: ") or re.match(before, first), first
        else:
            assert first.startswith("CollectiveMismatchError: ") or re.match(before, first), first
        assert rank == 3 or f"rank 3 gave up in {making}" in first
        assert second.startswith("BrokenGroupError: ")


@pytest.mark.parametrize(
    ("backend", "failing", "late", "error", "sees_others"),
    [
        ("gloo", "-host-", 3, RuntimeError, True),
        ("gloo", "-host-", 3, KeyboardInterrupt, False),
        ("gloo", "-local-rank-", 2, BackendUnavailableError, True),
        ("shared memory", "-host-", 3, KeyboardInterrupt, True),
    ],
)
def test_ranks_that_come_after_a_rank_could_not_make_the_groups_hear_of_it(
    tmp_path: Path, backend: str, failing: str, late: int, error: type[BaseException], sees_others: bool
) -> None:
    args = fail_to_make_groups, failing, False, 0, error, False, str(tmp_path), late
    rings = per_rank(str(tmp_path / ("rings" if sees_others else f"rings-{rank}")) for rank in range(4))
    env = {"COMM_FLIGHT_RECORDER__DIRECTORY": rings}
    outcomes = run_ranks_outcomes(on, 4, backend, HOST_BY_HOST, *args, timeout_s=min(90 * patience(), 200), env=env)
    for outcome in outcomes[:3]:
        first, second = outcome.value
        assert ("was interrupted (SIGINT) in making" if error is KeyboardInterrupt else "out of luck") in first
        assert second.startswith("BrokenGroupError: ")


def fail_to_measure(error: type[BaseException], folder: str) -> list[str]:
    """Fail on rank 3 while the first call measures; return how it ends on each rank, and the next one."""
    group = dist.new_group([0, 1, 2, 3], timeout=600)

    def fail(*_: Any) -> None:
        if error is KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.raise_signal(signal.SIGINT)
        raise error("out of luck")

    if dist.get_rank() == 3:
        choice.prepared_call = fail  # type: ignore[assignment]
    return how_two_calls_end(group, "none", folder, elements=10_000)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_rank_that_fails_while_a_group_measures_ends_the_call_on_every_rank(
    tmp_path: Path, error: type[BaseException]
) -> None:
    args = fail_to_measure, error, str(tmp_path)
    outcomes = run_ranks_outcomes(on, 4, "gloo", HOST_BY_HOST, *args, timeout_s=min(90 * patience(), 200))
    for rank, outcome in enumerate(outcomes):
        first, second = outcome.value
        if error is MemoryError:
            assert "the measurement of its steps raised MemoryError: out of luck" in first
        else:
            assert first == "KeyboardInterrupt: " if rank == 3 else "rank 3 (pid " in first
        assert second.startswith("BrokenGroupError: ")


def first_calls_of_two_threads(folder: str) -> tuple[str, float]:
    """Ranks 0 and 1 make the groups of one group's steps in two threads; return the error of one, and a sum."""
    dist.set_hierarchical(0)
    patient, short = dist.new_group([0, 1, 2, 3], timeout=600), dist.new_group([0, 1, 2, 3], timeout=3)
    tensor, error, rank = torch.ones(1000), "", dist.get_rank()
    thread = threading.Thread(target=dist.all_reduce, args=(tensor,), kwargs={"group": patient})
    if rank < 2:
        thread.start()
        time.sleep(0.5)
        try:
            dist.all_reduce(torch.ones(1000), group=short)
        except CommError as raised:
            error = type(raised).__name__
        (Path(folder) / str(rank)).touch()
    else:
        while len(list(Path(folder).iterdir())) < 2:
            time.sleep(0.01)
        thread.start()
    thread.join()
    return error, tensor[0].item()


def test_a_thread_waits_for_the_groups_of_another_no_longer_than_its_own_timeout(tmp_path: Path) -> None:
    found = run_ranks(
        on, 4, "gloo", HOST_BY_HOST, first_calls_of_two_threads, str(tmp_path), timeout_s=min(90 * patience(), 200)
    )
    assert found == [("CommTimeoutError", 4.0)] * 2 + [("", 4.0)] * 2


def asking_for_different_sizes() -> tuple[str, bool]:
    tensor = torch.ones(1000)
    with pytest.raises(CollectiveMismatchError) as caught:
        dist.set_hierarchical(1 if dist.get_rank() else False)
    dist.all_reduce(tensor)
    return str(caught.value), bool((tensor == dist.get_world_size()).all())


@pytest.mark.parametrize("backend", ["gloo", "shared memory"])
def test_ranks_that_ask_for_different_sizes(bare_pools: Pools, backend: str) -> None:
    for text, works in bare_pools(4).run(on, backend, HOST_BY_HOST, asking_for_different_sizes):
        assert "hierarchical collectives, which stay as they were: rank 0: set_hierarchical(None); rank 1:" in text
        assert "rank 3: set_hierarchical(1)" in text
        assert works


def refusals() -> list[str]:
    found = []
    for wrong in (-1, "often", True, 1.5, object):
        try:
            dist.set_hierarchical(wrong)  # type: ignore[arg-type]
        except ArgumentError as error:
            found.append(str(error).split(";")[1])
    return found


def test_wrong_settings(bare_pools: Pools) -> None:
    expected = " expected 0 or more bytes, 'auto', or False"
    assert bare_pools(1).run(on, "gloo", (0,), refusals) == [[expected] * 5]


def test_layouts() -> None:
    set_hosts((0, 1, 2, 0, 1, 2))
    try:
        whole = layout_of(range(6), 4)
        assert whole is not None
        assert (whole.hosts, whole.host, whole.local) == (((0, 3), (1, 4), (2, 5)), 1, 1)
        assert whole.position(5) == (2, 1)
        assert layout_of([0, 1, 3], 0) is None
        assert layout_of([0, 3], 0) is None
        assert layout_of([0, 1, 2], 0) is None
        part = layout_of([5, 1, 4, 2], 1)
        assert part is not None
        assert (part.hosts, part.host, part.local) == (((0, 3), (1, 2)), 1, 0)
    finally:
        set_hosts(None)


def encoded_between_hosts(loses_something: bool) -> dict[str, list[int]]:
    """Compare calls whose elements travel encoded between hosts with exact ones; return methods and bytes sent."""
    rank, W = dist.get_rank(), dist.get_world_size()
    int8 = dist.Compression("int8", between_hosts=True)
    sent: dict[str, list[int]] = {}

    def both(call: Callable[[Any], torch.Tensor], least: float = 0.0) -> None:
        exact = call("none")
        dist.configure(enabled=True)
        dist.reset_log()
        found = call(int8)
        for row in dist.log_rows():
            if row.operation != "broadcast":
                sent.setdefault(row.method, []).append(row.wire_bytes)
        dist.configure(enabled=False)
        dist.reset_log()
        assert found.dtype == exact.dtype
        off = (found.float() - exact.float()).abs().max()
        # Of each host's sum and of the sum: 1/254 of the largest of a block, and the rounding of bfloat16.
        assert least <= off <= 0.06 * exact.abs().max()

    for dtype in (torch.float32, torch.bfloat16):
        for count in (1, 1001, 100_000):
            own = torch.randn(count * W, generator=torch.Generator().manual_seed(rank)).to(dtype)
            least = 1e-4 if loses_something and count > 1 and dtype is torch.float32 else 0.0

            def reduced(given: Any, op: str, own: torch.Tensor = own, asynchronous: bool = False) -> torch.Tensor:
                tensor = own.clone()
                work = dist.all_reduce(tensor, op, compression=given, async_op=asynchronous)
                if work is not None:
                    work.wait()
                of_rank_0 = tensor.clone()
                dist.broadcast(of_rank_0, 0)
                assert torch.equal(of_rank_0, tensor)
                return tensor

            def scattered(given: Any, op: str, own: torch.Tensor = own, count: int = count) -> torch.Tensor:
                output, again = (torch.empty(count, dtype=own.dtype) for _ in range(2))
                dist.reduce_scatter_tensor(output, own, op, compression=given)
                dist.reduce_scatter(again, list(own.view(W, count)), op, compression=given)
                assert torch.equal(again, output)
                return output

            def gathered(given: Any, own: torch.Tensor = own) -> torch.Tensor:
                output = torch.empty(W * own.numel(), dtype=own.dtype)
                dist.all_gather_into_tensor(output, own, compression=given)
                listed = [torch.empty_like(own) for _ in range(W)]
                dist.all_gather(listed, own, compression=given)
                assert torch.equal(torch.cat(listed), output)
                return output

            for op in ("sum", "avg"):
                both(lambda given, op=op: reduced(given, op), least)
                both(lambda given, op=op: scattered(given, op), least / 10)
                both(lambda given, op=op: reduced(given, op, asynchronous=True), least)
            both(gathered, least)
    return sent


@pytest.mark.parametrize(
    ("backend", "host_of"),
    [
        ("gloo", HOST_BY_HOST),
        ("gloo", ROUND_ROBIN),
        ("gloo", (0, 0, 0, 1)),
        ("shared memory", ROUND_ROBIN),
        pytest.param("oneCCL", HOST_BY_HOST, marks=pytest.mark.slow),
    ],
)
def test_what_travels_between_hosts_is_encoded(bare_pools: Pools, backend: str, host_of: tuple[int, ...]) -> None:
    # Where hosts have different numbers of ranks, everything is encoded, in one step.
    method = f"int8(block_size=256){' between hosts' * (sum(host_of) == 2)}"
    for sent in bare_pools(4).run(on, backend, host_of, encoded_between_hosts, True):
        assert list(sent) == [method]
        if sum(host_of) == 2:
            # Of a tensor of 1.6 MB, half is a rank's share, of which half goes to the other host, twice.
            assert sorted(sent[method])[-1] == pytest.approx(400_000 * 130 / 128, rel=0.01)


@pytest.mark.parametrize("host_of", [(0, 0, 0, 0)])
def test_on_one_host_nothing_is_encoded_between_hosts(bare_pools: Pools, host_of: tuple[int, ...]) -> None:
    for sent in bare_pools(4).run(on, "gloo", host_of, encoded_between_hosts, False):
        assert list(sent) == [""]


def of_16_bits_between_hosts() -> None:
    """Average what overflows float16 in a sum, and sum what bfloat16 rounds away one by one."""
    fp16 = dist.Compression("fp16", between_hosts=True)
    large, part = torch.full((4001,), 40000.0, dtype=torch.float16), torch.empty(1000, dtype=torch.float16)
    dist.reduce_scatter_tensor(part, large[:4000], "avg", compression=fp16)
    dist.all_reduce(large, "avg", compression=fp16)
    assert (large == 40000).all()
    assert (part == 40000).all()
    # 256 + 1 is 256 in bfloat16.
    summed = torch.full((4000,), [256.0, 1.0, -256.0, 1.0][dist.get_rank()], dtype=torch.bfloat16)
    part = torch.empty(1000, dtype=torch.bfloat16)
    dist.reduce_scatter_tensor(part, summed, compression=fp16)
    dist.all_reduce(summed, compression=fp16)
    assert (summed == 2).all()
    assert (part == 2).all()


@pytest.mark.parametrize("backend", ["gloo", "shared memory"])
def test_sums_of_16_bits_are_made_in_float32_between_hosts(bare_pools: Pools, backend: str) -> None:
    bare_pools(4).run(on, backend, HOST_BY_HOST, of_16_bits_between_hosts)


def between_hosts_by_default() -> dict[tuple[str, int], str]:
    """Return the methods of calls by operation and bytes."""
    W = dist.get_world_size()
    codec = dist.Compression("fp16", min_size_bytes=1024, between_hosts=True)
    dist.set_compression(codec)
    dist.configure(enabled=True)
    dist.reset_log()
    dist.all_reduce(torch.ones(1000))
    dist.all_reduce(torch.ones(100))
    dist.all_to_all_single(torch.empty(1000 * W), torch.ones(1000 * W))
    dist.all_reduce(torch.ones(2000), group=dist.new_group([0, 1]))
    refusal = "fp16 between hosts compresses all_reduce, reduce_scatter and all_gather alone"
    with pytest.raises(ArgumentError, match=refusal):
        dist.all_to_all_single(torch.empty(W), torch.ones(W), compression=codec)
    return {(row.operation, row.size_bytes): row.method for row in dist.log_rows()}


def test_calls_are_encoded_between_hosts_by_default(bare_pools: Pools) -> None:
    of_world = {("all_reduce", 4000): "fp16 between hosts", ("all_reduce", 400): "", ("all_to_all_single", 16000): ""}
    found = bare_pools(4).run(on, "gloo", HOST_BY_HOST, between_hosts_by_default)
    assert found == [of_world | {("all_reduce", 8000): ""}] * 2 + [of_world] * 2


def disagreeing_between_hosts() -> list[tuple[str, bool]]:
    """Return the errors of calls in which ranks of one host differ, or of several, and that the groups work after."""
    rank, found = dist.get_rank(), []
    odd, is_last = rank % 2 == 1, rank == 3

    def between(codec: str, between_hosts: bool = True) -> dist.Compression:
        return dist.Compression(codec, between_hosts=between_hosts)

    def scattered(op: str) -> None:
        dist.reduce_scatter_tensor(torch.zeros(500), torch.ones(2000), op, group=group, compression=between("int8"))

    def reduced(tensor: torch.Tensor, op: str, compression: Any, async_op: bool = False) -> None:
        work = dist.all_reduce(tensor, op, group, async_op, compression=compression)
        if work is not None:
            work.wait()

    def gathered(codec: str) -> None:
        dist.all_gather_into_tensor(torch.zeros(4000), torch.ones(1000), group=group, compression=between(codec))

    calls: list[Callable[[], None]] = [
        lambda: reduced(torch.ones(1000), "avg" if odd else "sum", between("int8")),
        lambda: reduced(torch.ones(1000), "sum", between("int4" if odd else "int8")),
        lambda: reduced(torch.ones(1000), "sum", between("int4" if rank > 1 else "int8")),
        lambda: reduced(torch.ones(1000 + is_last), "sum", between("int8")),
        lambda: reduced(torch.ones(1000, dtype=torch.bfloat16 if odd else torch.float32), "sum", between("int8")),
        lambda: reduced(torch.ones(1000), "sum", between("int8", not is_last)),
        lambda: reduced(torch.ones(1000), "sum", between("int8", not is_last), True),
        lambda: reduced(torch.ones(1000), "avg" if odd else "sum", between("int8"), True),
        lambda: scattered("avg" if odd else "sum"),
        lambda: gathered("int4" if odd else "int8"),
    ]
    for is_first in (True, False):  # a group without steps of its own so far, and one that has them
        group = dist.new_group([0, 1, 2, 3])
        for call in calls:
            if is_first:
                group = dist.new_group([0, 1, 2, 3])
            with pytest.raises(CollectiveMismatchError) as caught:
                call()
            tensor = torch.ones(1000)
            for async_op in (False, True):
                reduced(tensor, "sum", between("int8"), async_op)
            found.append((str(caught.value), bool((tensor == 16).all())))
    return found


@pytest.mark.parametrize("backend", ["gloo", "shared memory"])
def test_nothing_is_sent_where_ranks_disagree_between_hosts(bare_pools: Pools, backend: str) -> None:
    for found in bare_pools(4).run(on, backend, HOST_BY_HOST, disagreeing_between_hosts):
        assert len(found) == 20
        for text, works in found:
            assert text.startswith(
                "the ranks disagree about a compressed collective, of which nothing was sent: rank 0: "
            )
            assert "; rank 3: " in text
            assert works
