"""Facts about a process group, and its creation by the members alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as internals

from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.flight_recorder.recorder import RECORDER
from comm_utils.group_names import group_text
from comm_utils.torch_support.breakable_group import IN_FORKED_CHILD, BreakableGroup
from comm_utils.torch_support.device_calls import DeviceCalls, can_follow, host_waits
from comm_utils.torch_support.gloo_connections import opening_connections
from comm_utils.torch_support.initialization import device_libraries, timeout_of
from comm_utils.torch_support.members_in_rings import ranks_in_rings
from comm_utils.torch_support.remedies import remedy
from comm_utils.watch.watch import WATCH

__all__ = ["GroupState", "create_group"]


class GroupState(BreakableGroup):
    """Facts about one process group, looked up once.

    Attributes:
        libraries: the c10d backend of each device type.
        awaited_messages: the library's handles of messages that threads wait for.
        device_calls: by type of device, the calls that one has not completed, for :meth:`on_device`.
    """

    __slots__ = (
        "_index",
        "_opened",
        "awaited_messages",
        "by_global",
        "device_calls",
        "devices",
        "libraries",
        "pg",
        "rank",
        "ranks",
    )

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__()
        self.pg = pg
        self.ranks: list[int] = c10d.get_process_group_ranks(pg)
        # Not c10d.get_rank(), which is wrong for a group that other code has made across two worlds.
        self.rank: int = pg.rank()
        self.by_global = {rank: position for position, rank in enumerate(self.ranks)}
        self.libraries = device_libraries(c10d.get_backend_config(pg))
        self.devices = tuple(self.libraries)
        self.device_calls: dict[str, DeviceCalls] = {}
        self.awaited_messages: list[Any] = []
        self._index, self._opened = 0, -1

    @property
    def name(self) -> str:
        """Return the name of the group, the same on all members."""
        return str(self.pg.group_name)

    @property
    def is_destroyed(self) -> bool:
        """Return whether the group is no more, also where ``torch.distributed`` has destroyed it."""
        return self.pg not in internals._world.pg_map

    def recorded_as(self) -> int:
        """Return the index of the group in the flight recorder."""
        if self._opened != RECORDER.opened:
            description, library = str(getattr(self.pg, "group_desc", "")), ",".join(sorted({*self.libraries.values()}))
            self._opened = RECORDER.opened
            ranks = ranks_in_rings(self.name, self.ranks)
            self._index = RECORDER.group_index(self.name, ranks, description, library, self.timeout_s())
        return self._index

    def on_device(self, device: str) -> DeviceCalls | None:
        """Return the calls on a type of device; None where the host waits for them, or nobody looks at them."""
        if len(self.ranks) == 1 or not WATCH.is_running:
            return None
        if host_waits(device, self.libraries.get(device, "gloo")) or not can_follow(device):
            return None
        found = self.device_calls.get(device)
        if found is None:
            found = self.device_calls[device] = DeviceCalls(device)
        return found

    def close_device_calls(self) -> bool:
        """Record the ends of the calls that devices have not completed, as failures where the group is broken.

        Returns:
            whether there were any.
        """
        failed, found = self.broken is not None, False
        for calls in self.device_calls.values():
            found |= calls.close(failed)
        return found

    def for_diagnosis(self) -> RingGroup:
        """Return the group as rings describe it."""
        return RingGroup.of(self.pg, ranks_in_rings(self.name, self.ranks))

    def give_up(self, reason: str) -> None:
        # The call that fails last names itself, where the watch knew the cause alone.
        self.broken, self._trouble = reason, None

    def inherit(self) -> None:
        super().inherit()
        self.broken = IN_FORKED_CHILD

    def timeout_s(self) -> float | None:
        """Return the group's timeout in seconds; None where its library does not expose it."""
        timeout = timeout_of(self.pg)
        return None if timeout is None else timeout.total_seconds()

    def how_to_go_on(self) -> str:
        return remedy(self.name)

    def position(self, global_rank: int | None, group_rank: int | None) -> int:
        """Return the group rank of whichever rank is given; that of global rank 0 if neither is."""
        if group_rank is not None:
            return group_rank
        return self.by_global[0 if global_rank is None else global_rank]

    def __str__(self) -> str:
        return group_text(self.ranks, getattr(self.pg, "group_desc", ""))


def create_group(
    ranks: Sequence[int],
    name: str,
    timeout: timedelta | None,
    backend: str | None,
    pg_options: Any,
    group_desc: str | None,
    device_id: torch.device | None,
) -> ProcessGroup:
    """Create the group of ``ranks`` under ``name``; only its members call this.

    ``torch.distributed.new_group(use_local_synchronization=True)`` would do, but it derives the name from how many
    groups this process has. That differs between ranks, and comes back after a group was destroyed: stale keys.
    """
    world: Any = internals._get_default_group()
    world_backend, world_store = internals._world.pg_map[world]
    chosen = internals.Backend(backend or world_backend)
    # With a device bound to the world, torch would split the world's communicator, for which non-members have to help.
    bound = world.bound_device_id
    if bound is not None:
        world.bound_device_id = None
    try:
        made: Any = internals._new_process_group_helper  # its annotations differ between releases
        with opening_connections() as opened:
            pg: ProcessGroup = made(
                len(ranks),
                list(ranks).index(world.rank()),
                list(ranks),
                chosen,
                world_store,
                name,
                pg_options,
                internals._get_default_timeout(chosen) if timeout is None else timeout,
                None,
                device_id,
                group_desc,
            )[0]
        opened.belong_to(pg)
    finally:
        if bound is not None:
            world.bound_device_id = bound
    internals._world.pg_group_ranks[pg] = {rank: position for position, rank in enumerate(ranks)}
    return pg
