"""Programs of the conformance suite for the fast path, and for single calls. Needs torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup

from comm_utils.backend import Backend, Work
from comm_utils.errors import BrokenGroupError, CommTimeoutError
from comm_utils.reduce_op import ReduceOp
from comm_utils.testing.conformance_world import World, bring_up, close, reference, same, sample

__all__ = ["during", "prepared"]


def prepared(provider: str, backend: str, device: str) -> None:
    """Check that fast paths equal the checked calls, repeatedly, with other tensors, and on a sub-group."""
    world = World(bring_up(provider, backend, device), device)
    up = world.backend
    members = [rank for rank in range(world.size) if rank != 1] if world.size > 2 else list(range(world.size))
    _check_prepared(world, None, list(range(world.size)))
    if world.rank in members:
        group = up.create_group(members, "conformance-prepared")
        _check_prepared(world, group, members)
        up.destroy_process_group(group)
    up.barrier()
    up.destroy_process_group()


def _check_prepared(world: World, group: ProcessGroup | None, members: list[int]) -> None:
    up, device, size, position = world.backend, world.device, len(members), members.index(world.rank)
    root = size - 1
    sum_all, largest = up.prepare("all_reduce", group, "sum"), up.prepare("all_reduce", group, "max")
    broadcast = up.prepare("broadcast", group, None, root)
    all_gather = up.prepare("all_gather_into_tensor", group)
    reduce_scatter = up.prepare("reduce_scatter_tensor", group, "sum")
    all_to_all, uneven = up.prepare("all_to_all_single", group), up.prepare("all_to_all_v", group)
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
        rows = [[(of + to) % 3 for to in range(size)] for of in range(size)]  # that each sends to each
        sources = [sample(torch.float32, (sum(rows[of]), *shape), rank, seed) for of, rank in enumerate(members)]
        received = torch.empty((sum(sent[position] for sent in rows), *shape), device=device)
        uneven(received, sources[position].to(device), [sent[position] for sent in rows], rows[position])
        pieces = [torch.split(source, rows[of])[position] for of, source in enumerate(sources)]
        same(received, torch.cat(pieces), f"prepared all_to_all_v of {shape}")
        barrier()


_GROUPS_TIME_S = 6


def during(provider: str, backend: str, device: str) -> None:
    """Failures name the call in whose course they happened, and its time is the limit, not the group's."""
    world = World(bring_up(provider, backend, device), device)
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
