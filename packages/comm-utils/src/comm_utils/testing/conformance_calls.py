"""The conformance suite's checks of what happens in the course of a call, run on every rank. Needs torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup

from comm_utils.backend import Backend, Work
from comm_utils.errors import BrokenGroupError, CommTimeoutError
from comm_utils.testing.conformance_world import World, bring_up

__all__ = ["during"]


_GROUPS_TIME_S = 6


def during(provider: str, backend: str, device: str) -> None:
    """Failures name the call in whose course they happened, and its time is the limit, not the group's."""
    world = World(bring_up(provider, backend, device), device)
    up, limit = world.backend, timedelta(seconds=0.3)

    def collective(one: Backend, group: ProcessGroup) -> object:
        return one.all_reduce(torch.ones(2, device=device), "sum", group)

    def synchronization(one: Backend, group: ProcessGroup) -> object:
        return one.barrier(group)

    def message(one: Backend, group: ProcessGroup) -> object:
        return one.recv(torch.ones(2, device=device), None, group, 0, 1)

    def handle(one: Backend, group: ProcessGroup) -> None:
        _waited(one.all_reduce(torch.ones(2, device=device), "sum", group, True))

    calls: tuple[Callable[[Backend, ProcessGroup], object], ...] = (collective, synchronization, message, handle)
    for call in calls:
        name = call.__name__
        # A library may go on with an operation until the group's own time is over, and its end waits for that.
        group = up.create_group(
            list(range(world.size)), f"conformance-during-{name}", timedelta(seconds=_GROUPS_TIME_S)
        )
        # A fast path that is made in the course of a call with a time of its own has the group's time.
        lasting = up.during("my_call", timedelta(milliseconds=50)).fast_path("all_reduce", "sum", group)
        assert (
            up.during("my_call", timedelta(seconds=20)).all_reduce(torch.ones(2, device=device), "sum", group) is None
        )
        if world.rank == 1:
            time.sleep(0.2)
        if lasting is None:
            up.all_reduce(torch.ones(2, device=device), "sum", group)
        else:
            assert lasting(torch.ones(2, device=device)) is True
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
