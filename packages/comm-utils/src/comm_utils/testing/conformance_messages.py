"""The conformance suite's checks of messages between two ranks, run on every rank. Needs torch."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as c10d

from comm_utils.backend import Work
from comm_utils.errors import CommTimeoutError
from comm_utils.testing.conformance_ways import Way, check_ended, ways
from comm_utils.testing.conformance_world import World, bring_up

__all__ = ["messages"]


def messages(provider: str, backend: str, device: str) -> None:
    """send, recv and their asynchronous forms; a handle tells by itself when a message has arrived."""
    world = World(bring_up(provider, backend, device), device)
    for way in ways(world):
        for n in (0, 1, 1000):
            _pass_on(way, n)
        if not way.async_op and not way.by_group_rank:
            _pass_on_in_a_batch(way)
    _pass_on_dtypes(world)
    _receive_before_it_is_sent(world)
    _receive_of_any_and_by_tag(world)
    world.backend.barrier()
    world.backend.destroy_process_group()


def _pass_on(way: Way, n: int) -> None:
    """Send to the next member and receive from the one before."""
    up, device, size, position = way.world.backend, way.world.device, way.size, way.position
    to, of = (position + 1) % size, (position - 1) % size
    after, before = way.named("dst", to), way.named("src", of)
    received, sent = torch.full((n,), -1.0, device=device), torch.full((n,), float(way.world.rank), device=device)
    sends_first = position % 2 == 0  # a library may begin the messages of a pair in the same order on both
    if way.async_op:
        send = up.isend(sent, group=way.group, **after) if sends_first else None
        receive = up.irecv(received, group=way.group, **before)
        send = send or up.isend(sent, group=way.group, **after)
        check_ended(receive, received, device, f"irecv {way}")
        check_ended(send, None, device, f"isend {way}")
        assert receive.source_rank() == of, f"irecv {way}: got source_rank() {receive.source_rank()}; expected {of}"
        _check_no_source(send, f"isend {way}")
    else:
        call_send: Callable[..., object] = up.send
        for is_send in (sends_first, not sends_first):
            if is_send:
                found: object = call_send(sent, group=way.group, **after)
                assert found is None, f"send {way} returned {found!r:.80}"
            else:
                found = up.recv(received, group=way.group, **before)
                assert found == way.ranks[of], f"recv {way}: got {found!r:.80}; expected rank {way.ranks[of]}"
    _check_arrived(received, way.ranks[of], f"message {way}")
    _check_arrived(sent, way.world.rank, f"sent tensor {way}")


def _check_arrived(tensor: torch.Tensor, value: int, what: str) -> None:
    assert torch.equal(tensor.cpu(), torch.full(tensor.shape, float(value))), f"{what}: got {tensor}, expected {value}"


def _check_no_source(work: Work, what: str) -> None:
    try:
        found = work.source_rank()
    except RuntimeError:
        return
    raise AssertionError(f"source_rank() of {what}, which is no receive, returned {found}")


def _pass_on_in_a_batch(way: Way) -> None:
    after, before = (way.ranks[(way.position + step) % way.size] for step in (1, -1))
    received = [torch.full((n,), -1.0, device=way.world.device) for n in (3, 5)]
    batch = [c10d.P2POp(c10d.irecv, one, before, way.group) for one in received]
    batch += [c10d.P2POp(c10d.isend, torch.full_like(one, float(way.world.rank)), after, way.group) for one in received]
    works = way.world.backend.batch_isend_irecv(batch)
    assert works, f"batch_isend_irecv {way} returned no handle"
    for work in works:
        check_ended(work, None, way.world.device, f"batch_isend_irecv {way}")
    for one in received:
        _check_arrived(one, before, f"batch_isend_irecv {way}")


def _pass_on_dtypes(world: World) -> None:
    up, rank, size = world.backend, world.rank, world.size
    after, before = (rank + 1) % size, (rank - 1) % size
    if not world.capabilities.messages_of_any_dtype:
        return
    for dtype in (torch.int16, torch.complex64, torch.float8_e5m2):
        send = up.isend(torch.full((2, 3), float(rank), device=world.device).to(dtype), after)
        moved = torch.zeros(2, 3, device=world.device).to(dtype)
        up.recv(moved, before)
        send.wait()
        expected = torch.full((2, 3), float(before)).to(dtype).view(torch.uint8)
        assert torch.equal(moved.cpu().view(torch.uint8), expected), f"message of {dtype}"


def _receive_before_it_is_sent(world: World) -> None:
    up, device, size = world.backend, world.device, world.size
    after, before = (world.rank + 1) % size, (world.rank - 1) % size
    received = torch.zeros(2, device=device)
    receive = up.irecv(received, before)
    assert not receive.is_completed()
    assert not receive.is_success()
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


def _receive_of_any_and_by_tag(world: World) -> None:
    up, device, rank, size = world.backend, world.device, world.rank, world.size
    if world.capabilities.any_source and rank == 0:
        received = torch.zeros(2, device=device)
        senders = {up.recv(received, None) for _ in range(size - 1)}
        assert senders == set(range(1, size))
        receive = up.irecv(received, None)
        up.barrier()  # after which one sends
        receive.wait()
        assert receive.source_rank() == size - 1, f"got source_rank() {receive.source_rank()}; expected {size - 1}"
    elif world.capabilities.any_source:
        up.send(torch.ones(2, device=device), 0)
        up.barrier()
        if rank == size - 1:
            up.send(torch.ones(2, device=device), 0)
    if world.capabilities.tags:
        after, before = (rank + 1) % size, (rank - 1) % size
        first, second = torch.zeros(1, device=device), torch.zeros(1, device=device)
        works = [up.isend(torch.full((1,), float(tag), device=device), after, None, tag) for tag in (1, 2)]
        up.recv(second, before, None, 2)
        up.recv(first, before, None, 1)
        for work in works:
            work.wait()
        assert (first.item(), second.item()) == (1.0, 2.0)
