"""Programs of the ranks of :class:`comm_utils.testing.conformance.BackendConformance`. Needs torch."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as c10d

from comm_utils.backend import Backend
from comm_utils.errors import BrokenGroupError, CollectiveMismatchError, CommTimeoutError, PeerLostError
from comm_utils.testing.conformance_provider import load_provider
from comm_utils.testing.conformance_ways import check_ended, some_ranks
from comm_utils.testing.conformance_world import TIMEOUT, World, bring_up

__all__ = ["asynchronous", "differing_calls", "groups", "lost_peer", "state"]


def asynchronous(provider: str, backend: str, device: str) -> None:
    """Check that handles complete after ``wait()`` and not before a peer calls, and that a timeout breaks nothing."""
    world = World(bring_up(provider, backend, device), device)
    up = world.backend
    tensor = torch.ones(10, device=device)
    if world.rank == 0:
        work = up.all_reduce(tensor, "sum", None, True)
        assert work is not None
        barrier = up.barrier(None, True)
        future = work.get_future()
        assert barrier is not None
        for under_way in (work, barrier):
            assert not under_way.is_completed()
            assert not under_way.is_success()
            assert under_way.exception() is None
        assert not future.done()
        for timeout_s in (0, 0.0005, 0.05):
            try:
                work.wait(timeout_s)
            except CommTimeoutError:
                continue
            raise AssertionError(f"wait({timeout_s}) returned although no peer had called")
        up.get_store(None).set("go", "1")
    else:
        up.get_store(None).wait(["go"], timedelta(seconds=30))
        work, barrier = up.all_reduce(tensor, "sum", None, True), up.barrier(None, True)
        assert work is not None
        future = work.get_future()
    [found] = future.wait()  # nobody has waited with the handle
    assert found.data_ptr() == tensor.data_ptr(), "get_future() gives another tensor"
    assert work.wait(timedelta(seconds=30))
    check_ended(work, tensor, device, "all_reduce")
    check_ended(barrier, None, device, "barrier")
    try:
        source = work.source_rank()
    except RuntimeError:
        pass
    else:
        raise AssertionError(f"source_rank() of an all_reduce returned {source}")
    assert torch.equal(tensor.cpu(), torch.full((10,), float(world.size)))
    first, second = torch.ones(3, device=device), torch.full((3,), 2.0, device=device)
    works = [up.all_reduce(one, "sum", None, True) for one in (first, second)]
    for work in reversed(works):  # out of order
        assert work is not None
        work.wait()
    assert first[0].item() == world.size
    assert second[0].item() == 2 * world.size
    up.destroy_process_group()


def groups(provider: str, backend: str, device: str) -> None:
    """Members alone create groups; ranks and sizes are those of the group; a group can be destroyed and made again."""
    world = World(bring_up(provider, backend, device), device)
    up, rank, size = world.backend, world.rank, world.size
    assert up.is_initialized()
    assert up.get_process_group_ranks(None) == list(range(size))
    assert up.get_process_group_ranks(up.get_world_group()) == list(range(size))
    assert device in up.device_types(None)
    members = some_ranks(size)
    for time_ in (1, 2):
        if rank in members:
            group = up.create_group(members, f"conformance-{time_}")
            assert up.get_process_group_ranks(group) == members
            assert up.get_rank(group) == members.index(rank)
            assert up.get_world_size(group) == len(members)
            assert up.get_backend(group) == up.get_backend(None)
            tensor = torch.ones(1, device=device)
            up.all_reduce(tensor, "sum", group)
            assert tensor.item() == len(members)
            up.broadcast(tensor.fill_(rank), members[-1], group)
            assert tensor.item() == members[-1]
            up.check_group(group)
            up.destroy_process_group(group)
    up.barrier()
    up.destroy_process_group()
    assert not up.is_initialized()


def state(provider: str, backend: str, device: str) -> None:
    """Check what the backend says of itself and its groups, and that it serves a world that it did not initialise."""
    world = World(bring_up(provider, backend, device), device)
    up, members = world.backend, list(range(world.size))
    assert up.get_timeout() == TIMEOUT, f"get_timeout: got {up.get_timeout()}; expected {TIMEOUT}, as at the start"
    _check_empty_shared(world)
    group = up.create_group(members, "conformance-broken")
    up.all_reduce(torch.ones(2, device=device), "sum", group)
    fast = up.fast_path("all_reduce", "sum", group)
    if fast is not None:
        up.fast_paths.synchronous["all_reduce", "sum", group] = fast
    up.barrier()
    up.mark_broken(group, "a step of conformance failed")
    assert not up.fast_paths.synchronous, "the fast paths of a group outlive mark_broken"
    try:
        up.check_group(group)
    except BrokenGroupError as error:
        text = str(error)
    else:
        raise AssertionError("check_group raises nothing after mark_broken")
    assert "a step of conformance failed" in text, f"the error does not give the reason: {text}"
    up.check_group(None)
    up.destroy_process_group(group)
    up.barrier()
    adopted = _adopted(provider)
    if adopted is not None:
        assert adopted.is_initialized()
        assert adopted.get_process_group_ranks() == members
        assert adopted.get_timeout() in (TIMEOUT, None), f"get_timeout of the adopted world: {adopted.get_timeout()}"
        tensor = torch.ones(2, device=device)
        adopted.all_reduce(tensor)
        assert tensor.tolist() == [float(world.size)] * 2, "all_reduce of the adopted world"
        up = adopted
    up.barrier()
    up.destroy_process_group()
    assert not up.is_initialized()


def _check_empty_shared(world: World) -> None:
    up = world.backend
    for shape, dtype in (((), None), ((0,), torch.int64), ((2, 3), None), ((5,), torch.float64)):
        tensor = up.empty_shared(shape, dtype)
        assert tensor.shape == shape, f"empty_shared of {shape}: got {tensor.shape}"
        assert tensor.dtype == (dtype or torch.get_default_dtype()), f"empty_shared of {dtype}: got {tensor.dtype}"
        assert tensor.is_cpu, "empty_shared: the tensor is not on the CPU"
        assert tensor.is_contiguous(), "empty_shared: the tensor is not dense"
        if "cpu" in up.device_types() and tensor.numel():
            up.all_reduce(tensor.fill_(1))
            assert bool((tensor == world.size).all()), f"all_reduce of a tensor of empty_shared: got {tensor}"


def _adopted(provider: str) -> Backend | None:
    """Return the backend by which the provider adopts the world that exists; None where it serves none of others."""
    loaded, library = load_provider(provider), c10d.get_backend()
    serves = loaded.adopts(library)
    assert isinstance(serves, bool), f"adopts({library!r}) returned {serves!r:.80}"
    return loaded.adopt() if serves else None


def differing_calls(provider: str, backend: str, device: str) -> None:
    """Check that every rank gets a ``CollectiveMismatchError`` in time where one calls with another op."""
    world = World(bring_up(provider, backend, device), device)
    up, others = world.backend, [rank for rank in range(world.size) if rank != world.rank]
    store = up.get_store(None)
    up.barrier()
    deadline = time.monotonic() + 30
    try:
        up.all_reduce(torch.ones(4, device=device), "max" if world.rank == 0 else "sum")
        while time.monotonic() < deadline:  # the call itself may end before the ranks have compared it
            up.all_reduce(torch.ones(4, device=device))
            time.sleep(0.05)
    except CollectiveMismatchError:
        pass
    else:
        raise AssertionError("one rank's op was another, and no call raised")
    # A rank that ends before the others have found the mismatch is a lost peer to them, and rank 0 has the store.
    for word in ("has raised", "has seen that all have"):
        store.set(f"{word}: {world.rank}", "")
        if word == "has raised" or world.rank == 0:
            store.wait([f"{word}: {rank}" for rank in others], timedelta(seconds=30))
    os._exit(0)  # as after a lost peer


def lost_peer(provider: str, backend: str, device: str) -> None:
    """Check that the others get a ``CommError`` in time when the last rank ends, and that the group stays broken."""
    world = World(bring_up(provider, backend, device, timedelta(seconds=5)), device)
    up = world.backend
    up.barrier()
    if world.rank == world.size - 1:
        os._exit(0)
    try:
        # The first may still succeed in filling buffers, and those on a device in filling its queue.
        for _ in range(3 if device == "cpu" else 1000):
            up.all_reduce(torch.ones(1000, device=device))
            if device != "cpu":
                torch.get_device_module(device).synchronize()
                time.sleep(0.01)
    except (PeerLostError, CommTimeoutError) as error:
        if f"rank {world.rank}" not in str(error):
            raise AssertionError("the message does not name this rank") from error
    else:
        raise AssertionError("a collective succeeded without one of its ranks")
    try:
        up.check_group(None)
    except BrokenGroupError:
        pass
    else:
        raise AssertionError("the group is not marked as broken")
    os._exit(0)  # the world cannot be taken down in good order any more
