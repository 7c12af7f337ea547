"""Programs of the ranks of :class:`comm_utils.testing.conformance.BackendConformance`. Needs torch."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch

from comm_utils.errors import BrokenGroupError, CollectiveMismatchError, CommTimeoutError, PeerLostError
from comm_utils.testing.conformance_world import World, bring_up, close, reference, same, sample

__all__ = ["asynchronous", "differing_calls", "groups", "lost_peer", "messages", "movements", "reductions"]


def reductions(provider: str, backend: str, device: str) -> None:
    """Every reducing operation is right for every pair of operation and dtype that the backend calls native."""
    world = World(bring_up(provider, backend, device), device)
    up = world.backend
    for op, dtype in sorted(world.capabilities.reductions, key=str):
        for n in (0, 1, 5, 1000):
            parts = world.everyones(dtype, n * world.size)
            expected = reference(op, parts)
            what = f"{op.name} of {n} {dtype}"
            tensor = world.mine(dtype, n * world.size)
            assert up.all_reduce(tensor, op) is None
            close(tensor, expected, f"all_reduce {what}")
            tensor, fast = world.mine(dtype, n * world.size), up.fast_path("all_reduce", op)
            assert fast is not None
            if fast(tensor):
                close(tensor, expected, f"fast all_reduce {what}")
            else:
                assert n == 0, f"there is no fast all_reduce {what}"
            dst = world.size - 1
            tensor = world.mine(dtype, n * world.size)
            up.reduce(tensor, dst, op)
            if world.rank == dst:
                close(tensor, expected, f"reduce {what}")
            elif world.capabilities.preserving_reduce:
                assert torch.equal(tensor, world.mine(dtype, n * world.size)), (
                    f"reduce {what} changed another rank's tensor"
                )
            if "reduce_scatter_tensor" in world.capabilities.operations:
                source = world.mine(dtype, n * world.size)
                output = torch.empty(n, dtype=dtype, device=device)
                up.reduce_scatter_tensor(output, source, op)
                close(output, expected[world.rank * n : (world.rank + 1) * n], f"reduce_scatter_tensor {what}")
                same(source, world.mine(dtype, n * world.size).cpu(), "input of reduce_scatter_tensor")
    up.destroy_process_group()


def movements(provider: str, backend: str, device: str) -> None:
    """Every dtype that the backend calls native arrives bit by bit through every moving operation."""
    world = World(bring_up(provider, backend, device), device)
    up, size, rank = world.backend, world.size, world.rank
    for dtype in sorted(world.capabilities.dtypes, key=str):
        for n in (0, 1, 7):
            parts = world.everyones(dtype, n)
            together = torch.cat(parts)
            src = size - 1
            tensor = world.mine(dtype, n)
            up.broadcast(tensor, src)
            same(tensor, parts[src], "broadcast")
            flat = torch.empty(n * size, dtype=dtype, device=device)
            up.all_gather_into_tensor(flat, world.mine(dtype, n))
            same(flat, together, "all_gather_into_tensor")
            outputs = [torch.empty(n, dtype=dtype, device=device) for _ in range(size)]
            up.all_gather(outputs, world.mine(dtype, n))
            same(torch.cat(outputs), together, "all_gather")
            up.gather(world.mine(dtype, n), outputs if rank == src else None, src)
            if rank == src:
                same(torch.cat(outputs), together, "gather")
            piece = torch.empty(n, dtype=dtype, device=device)
            up.scatter(piece, [part.to(device) for part in parts] if rank == 0 else None, 0)
            same(piece, parts[rank], "scatter")
            sizes = [n + (sender + rank) % 2 for sender in range(size)]  # what rank r sends to rank s: n + (r + s) % 2
            source = torch.cat([sample(dtype, (length,), 10 * rank + peer) for peer, length in enumerate(sizes)])
            target = torch.empty(sum(sizes), dtype=dtype, device=device)
            up.all_to_all_single(target, source.to(device), sizes, sizes)
            expected = torch.cat([sample(dtype, (length,), 10 * peer + rank) for peer, length in enumerate(sizes)])
            same(target, expected, "all_to_all_single")
    up.barrier()
    up.destroy_process_group()


def asynchronous(provider: str, backend: str, device: str) -> None:
    """Check that handles complete after ``wait()`` and not before a peer calls, and that a timeout breaks nothing."""
    world = World(bring_up(provider, backend, device), device)
    up = world.backend
    tensor = torch.ones(10, device=device)
    if world.rank == 0:
        work = up.all_reduce(tensor, "sum", None, True)
        assert work is not None
        assert not work.is_completed()
        assert work.exception() is None
        for timeout_s in (0, 0.0005, 0.05):
            try:
                work.wait(timeout_s)
            except CommTimeoutError:
                continue
            raise AssertionError(f"wait({timeout_s}) returned although no peer had called")
        up.get_store(None).set("go", "1")
    else:
        up.get_store(None).wait(["go"], timedelta(seconds=30))
        work = up.all_reduce(tensor, "sum", None, True)
        assert work is not None
    assert work.wait(timedelta(seconds=30))
    assert work.is_completed()
    assert work.exception() is None
    assert work.result() is tensor
    assert torch.equal(tensor.cpu(), torch.full((10,), float(world.size)))
    first, second = torch.ones(3, device=device), torch.full((3,), 2.0, device=device)
    works = [up.all_reduce(one, "sum", None, True) for one in (first, second)]
    for work in reversed(works):  # out of order
        assert work is not None
        work.wait()
    assert first[0].item() == world.size
    assert second[0].item() == 2 * world.size
    up.destroy_process_group()


def messages(provider: str, backend: str, device: str) -> None:
    """send, recv and their asynchronous forms; a handle tells by itself when a message has arrived."""
    world = World(bring_up(provider, backend, device), device)
    up, rank, size = world.backend, world.rank, world.size
    after, before = (rank + 1) % size, (rank - 1) % size
    for n in (0, 1, 1000):
        received = torch.zeros(n, device=device)
        send = up.isend(torch.full((n,), float(rank), device=device), after)
        assert up.recv(received, before) == before
        send.wait()
        assert torch.equal(received.cpu(), torch.full((n,), float(before)))
    if world.capabilities.messages_of_any_dtype:
        for dtype in (torch.int16, torch.complex64, torch.float8_e5m2):
            send = up.isend(torch.full((2, 3), float(rank), device=device).to(dtype), after)
            moved = torch.zeros(2, 3, device=device).to(dtype)
            up.recv(moved, before)
            send.wait()
            assert torch.equal(moved.view(torch.uint8), torch.full((2, 3), float(before)).to(dtype).view(torch.uint8))
    received = torch.zeros(2, device=device)
    receive = up.irecv(received, before)
    assert not receive.is_completed()
    try:
        receive.wait(0.05)
    except CommTimeoutError:
        pass
    else:
        raise AssertionError("wait(0.05) returned although nothing was sent")
    up.barrier()
    send = up.isend(torch.full((2,), 7.0, device=device), after)
    deadline = time.monotonic() + 30
    while not receive.is_completed():  # nobody waits, and yet it becomes complete
        assert time.monotonic() < deadline, "is_completed() never became true"
    receive.wait()
    send.wait()
    assert received.tolist() == [7.0, 7.0]
    if world.capabilities.any_source and rank == 0:
        senders = {up.recv(received, None) for _ in range(size - 1)}
        assert senders == set(range(1, size))
    elif world.capabilities.any_source:
        up.send(torch.ones(2, device=device), 0)
    if world.capabilities.tags:
        first, second = torch.zeros(1, device=device), torch.zeros(1, device=device)
        works = [up.isend(torch.full((1,), float(tag), device=device), after, None, tag) for tag in (1, 2)]
        up.recv(second, before, None, 2)
        up.recv(first, before, None, 1)
        for work in works:
            work.wait()
        assert (first.item(), second.item()) == (1.0, 2.0)
    up.barrier()
    up.destroy_process_group()


def groups(provider: str, backend: str, device: str) -> None:
    """Members alone create groups; ranks and sizes are those of the group; a group can be destroyed and made again."""
    world = World(bring_up(provider, backend, device), device)
    up, rank, size = world.backend, world.rank, world.size
    assert up.get_process_group_ranks(None) == list(range(size))
    assert device in up.device_types(None)
    members = [other for other in range(size) if other != 1] if size > 2 else list(range(size))
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
    world = World(bring_up(provider, backend, device, timeout_s=5.0), device)
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
