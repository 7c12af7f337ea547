"""What the ranks of :class:`comm_utils.testing.conformance.BackendConformance` do. Needs torch."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import reduce

import torch
from torch.distributed import ProcessGroup, TCPStore

from comm_utils.backend import Backend, Capabilities, Setup, Work
from comm_utils.errors import BrokenGroupError, CommTimeoutError, PeerLostError
from comm_utils.reduce_op import ReduceOp

__all__ = ["TOLERANCES", "bring_up", "reference", "sample"]

TOLERANCES: dict[torch.dtype, float] = {
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
    torch.float32: 1e-5,
    torch.float64: 1e-12,
}
_STEPS: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def bring_up(provider: str, backend: str, device: str, timeout_s: float = 60.0) -> Backend:
    """Initialise ``backend`` among the ranks that the runner started."""
    module, _, attribute = provider.partition(":")
    source = getattr(importlib.import_module(module), attribute)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore(os.environ["MASTER_ADDR"], port, world_size, rank == 0, timedelta(seconds=30))
    place = torch.device(device, int(os.environ["LOCAL_RANK"])) if device != "cpu" else None
    up: Backend = source.initialize(Setup(backend, rank, world_size, store, timedelta(seconds=timeout_s), place))
    return up


def sample(dtype: torch.dtype, shape: tuple[int, ...], rank: int, seed: int = 0) -> torch.Tensor:
    """Values of rank ``rank`` that every rank can compute; small enough that no sum or product overflows."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return (torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5).to(dtype)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.complex128).to(dtype)
    high = 2 if dtype == torch.bool else 4
    return torch.randint(0, high, shape, generator=generator).to(dtype)


def reference(op: ReduceOp, parts: list[torch.Tensor]) -> torch.Tensor:
    """The reduction of ``parts``: floats in float64, integers as they are."""
    first = parts[0]
    if first.dtype.is_floating_point:
        parts = [part.double() for part in parts]
    elif first.dtype in _UNSIGNED:  # torch computes little with these
        return reference(op, [part.long() for part in parts]).to(first.dtype)
    if op is ReduceOp.AVG:
        return reduce(torch.add, parts) / len(parts)
    return reduce(_STEPS[op], parts).to(torch.float64 if first.dtype.is_floating_point else first.dtype)


def same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """``got`` is ``expected`` bit by bit."""
    assert torch.equal(got.cpu(), expected), f"{what}: got {got}, expected {expected}"


def close(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """``got`` is what :func:`reference` gave, floats to the tolerance of their dtype."""
    if not got.dtype.is_floating_point:
        same(got, expected, what)
        return
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(
        got.double().cpu(), expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}"
    )


class _World:
    def __init__(self, backend: Backend, device: str) -> None:
        self.backend = backend
        self.rank, self.size = backend.get_rank(None), backend.get_world_size(None)
        self.capabilities: Capabilities = backend.capabilities(None, device)
        self.device = device

    def mine(self, dtype: torch.dtype, n: int) -> torch.Tensor:
        return sample(dtype, (n,), self.rank).to(self.device)

    def everyones(self, dtype: torch.dtype, n: int) -> list[torch.Tensor]:
        return [sample(dtype, (n,), rank) for rank in range(self.size)]


def reductions(provider: str, backend: str, device: str) -> None:
    """Every reducing operation is right for every pair of operation and dtype that the backend calls native."""
    world = _World(bring_up(provider, backend, device), device)
    up = world.backend
    for op, dtype in sorted(world.capabilities.reductions, key=str):
        for n in (0, 1, 5, 1000):
            parts = world.everyones(dtype, n * world.size)
            expected = reference(op, parts)
            what = f"{op.name} of {n} {dtype}"
            tensor = world.mine(dtype, n * world.size)
            assert up.all_reduce(tensor, op) is None
            close(tensor, expected, f"all_reduce {what}")
            prepared = world.mine(dtype, n * world.size)
            up.prepare("all_reduce", None, op)(prepared)
            close(prepared, expected, f"prepared all_reduce {what}")
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
    world = _World(bring_up(provider, backend, device), device)
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


def prepared(provider: str, backend: str, device: str) -> None:
    """The short ways do what the ordinary calls do, every time, with other tensors, and on a group of some ranks."""
    world = _World(bring_up(provider, backend, device), device)
    up = world.backend
    members = [rank for rank in range(world.size) if rank != 1] if world.size > 2 else list(range(world.size))
    _check_prepared(world, None, list(range(world.size)))
    if world.rank in members:
        group = up.create_group(members, "conformance-prepared")
        _check_prepared(world, group, members)
        up.destroy_process_group(group)
    up.barrier()
    up.destroy_process_group()


def _check_prepared(world: _World, group: ProcessGroup | None, members: list[int]) -> None:
    up, device, size, position = world.backend, world.device, len(members), members.index(world.rank)
    root = size - 1
    sum_all, largest = up.prepare("all_reduce", group, "sum"), up.prepare("all_reduce", group, "max")
    broadcast = up.prepare("broadcast", group, None, root)
    all_gather = up.prepare("all_gather_into_tensor", group)
    reduce_scatter = up.prepare("reduce_scatter_tensor", group, "sum")
    all_to_all = up.prepare("all_to_all_single", group)
    into_list, barrier = up.prepare("all_gather", group), up.prepare("barrier", group)
    partner = position ^ 1
    native = "reduce_scatter_tensor" in world.capabilities.operations
    for seed, shape in enumerate([(1,), (4,), (2, 3), (0,), (5, 1, 2)]):
        parts = [sample(torch.float32, shape, rank, seed) for rank in members]
        mine = parts[position]
        for call, op in ((sum_all, ReduceOp.SUM), (largest, ReduceOp.MAX)):
            tensor = mine.clone().to(device)
            assert call(tensor) is None
            close(tensor, reference(op, parts), f"prepared all_reduce {op.name} of {shape}")
        tensor = mine.clone().to(device)
        broadcast(tensor)
        same(tensor, parts[root], f"prepared broadcast of {shape}")
        together = torch.empty((size, *shape), device=device)
        all_gather(together.view(-1), mine.to(device).view(-1))
        same(together, torch.stack(parts), f"prepared all_gather_into_tensor of {shape}")
        outputs = [torch.empty(shape, device=device) for _ in range(size)]
        into_list(outputs, mine.to(device))
        same(torch.stack(outputs), torch.stack(parts), f"prepared all_gather of {shape}")
        if partner < size:
            send, receive = up.prepare("send", group, None, partner), up.prepare("recv", group, None, partner)
            arrived = torch.empty(shape, device=device)
            first, second = (send, receive) if position < partner else (receive, send)
            for message in (first, second):
                message(arrived if message is receive else mine.to(device))
            same(arrived, parts[partner], f"prepared recv of {shape}")
        sources = [sample(torch.float32, (size, *shape), rank, 100 + seed) for rank in members]
        received = torch.empty((size, *shape), device=device)
        all_to_all(received.view(-1), sources[position].to(device).view(-1))
        same(received, torch.stack([source[position] for source in sources]), f"prepared all_to_all_single of {shape}")
        if native:
            piece = torch.empty(shape, device=device)
            reduce_scatter(piece.view(-1), sources[position].to(device).view(-1))
            expected = reference(ReduceOp.SUM, [source[position] for source in sources])
            close(piece, expected, f"prepared reduce_scatter_tensor of {shape}")
        barrier()


_GROUPS_TIME_S = 6


def during(provider: str, backend: str, device: str) -> None:
    """Failures name the call in whose course they happened, and its time is the limit, not the group's."""
    world = _World(bring_up(provider, backend, device), device)
    up, limit = world.backend, timedelta(seconds=0.3)
    calls: dict[str, Callable[[Backend, ProcessGroup], object]] = {
        "all_reduce": lambda one, group: one.all_reduce(torch.ones(2, device=device), "sum", group),
        "barrier": lambda one, group: one.barrier(group),
        "recv": lambda one, group: one.recv(torch.ones(2, device=device), None, group, 0, 1),
        "wait": lambda one, group: _waited(one.all_reduce(torch.ones(2, device=device), "sum", group, True)),
    }
    for name, call in calls.items():
        # A library may go on with an operation until the group's own time is over, and its end waits for that.
        group = up.create_group(
            list(range(world.size)), f"conformance-during-{name}", timedelta(seconds=_GROUPS_TIME_S)
        )
        # What is prepared in the course of a call with a time of its own has the group's time.
        lasting = up.during("my_call", timedelta(milliseconds=50)).prepare("all_reduce", group, "sum")
        assert (
            up.during("my_call", timedelta(seconds=20)).all_reduce(torch.ones(2, device=device), "sum", group) is None
        )
        if world.rank == 1:
            time.sleep(0.2)
        lasting(torch.ones(2, device=device))
        del lasting  # which holds the group
        up.barrier()
        if world.rank == 0:
            start = time.monotonic()
            try:
                call(up.during("my_call", limit), group)
            except CommTimeoutError as error:
                text = str(error)
            else:
                raise AssertionError(f"{name} returned although no peer had called")
            assert 0.25 < time.monotonic() - start < _GROUPS_TIME_S - 1, f"{name} did not end in its time"
            assert text.startswith("my_call on the group of ranks "), text
            assert " after 0.3 s" in text, text
            try:
                up.check_group(group)
            except BrokenGroupError as error:
                text = str(error)
            else:
                raise AssertionError("the group is not marked as broken")
            assert "my_call" in text, text
        up.barrier()
        up.destroy_process_group(group)
    up.barrier()
    up.destroy_process_group()


def _waited(work: Work | None) -> None:
    assert work is not None
    work.wait()


def asynchronous(provider: str, backend: str, device: str) -> None:
    """Handles are incomplete while a peer is missing, complete after ``wait()``; a caller's timeout breaks nothing."""
    world = _World(bring_up(provider, backend, device), device)
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
    world = _World(bring_up(provider, backend, device), device)
    up, rank, size = world.backend, world.rank, world.size
    after, before = (rank + 1) % size, (rank - 1) % size
    for n in (0, 1, 1000):
        received = torch.zeros(n, device=device)
        send = up.isend(torch.full((n,), float(rank), device=device), after)
        assert up.recv(received, before) == before
        send.wait()
        assert torch.equal(received.cpu(), torch.full((n,), float(before)))
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
    world = _World(bring_up(provider, backend, device), device)
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


def lost_peer(provider: str, backend: str, device: str) -> None:
    """The last rank goes away; the others get an error of ours in time, and the group is broken for good."""
    world = _World(bring_up(provider, backend, device, timeout_s=5.0), device)
    up = world.backend
    up.barrier()
    if world.rank == world.size - 1:
        os._exit(0)
    try:
        for _ in range(3):  # the first may still succeed in filling buffers
            up.all_reduce(torch.ones(1000, device=device))
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
