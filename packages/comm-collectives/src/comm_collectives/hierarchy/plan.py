"""The groups within hosts and between them, made once for each group."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

from comm_collectives.failed_steps import breaking
from comm_collectives.hierarchy.layout import Layout, host_count_of, layout_of, spans_hosts
from comm_utils.backend import Backend, Capabilities
from comm_utils.group_names import digest_of, name_of
from comm_utils.process_locks import ProcessLock
from comm_utils.torch_support.initialization import timeout_of
from comm_utils.torch_support.store_waits import making_of
from comm_utils.watch.watch import WATCH

__all__ = ["Plan", "find_host_count", "find_layout", "find_plan", "forget_plans"]


@dataclass
class Plan:
    """The groups of one group that spans hosts.

    Attributes:
        within: of the ranks of this rank's host.
        between: of the ranks with this rank's position on every host, in the order of hosts.
        capabilities: of both, by kind of device.
        min_size_bytes: from how many bytes on hierarchical calls are faster, by operation; None for at no size.
    """

    layout: Layout
    within: ProcessGroup
    between: ProcessGroup
    capabilities: dict[str, Capabilities] = field(default_factory=dict)
    min_size_bytes: dict[str, int | None] = field(default_factory=dict)

    @property
    def groups(self) -> tuple[ProcessGroup, ProcessGroup]:
        return self.within, self.between


# Groups can also be destroyed through torch.distributed; a reference to them would keep their sockets open.
_layouts: WeakKeyDictionary[ProcessGroup, Layout | None] = WeakKeyDictionary()
_host_counts: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
_plans: WeakKeyDictionary[ProcessGroup, Plan] = WeakKeyDictionary()
# Of the threads that make the plan of a group: the first one does.
_making: WeakKeyDictionary[ProcessGroup, threading.Lock] = WeakKeyDictionary()
_turn = ProcessLock(threading.Lock)
_MAKING = "making groups within hosts and between them"


def _key(backend: Backend, group: ProcessGroup | None) -> ProcessGroup:
    return backend.get_world_group() if group is None else group


def find_host_count(backend: Backend, group: ProcessGroup | None) -> int:
    """Return on how many hosts the ranks of ``group`` are; 1 where nobody knows."""
    if not spans_hosts():
        return 1
    key = _key(backend, group)
    if key not in _host_counts:
        _host_counts[key] = host_count_of(backend.get_process_group_ranks(group))
    return _host_counts[key]


def find_layout(backend: Backend, group: ProcessGroup | None) -> Layout | None:
    """Return the layout of ``group``; None where hierarchical collectives have nothing to offer."""
    if not spans_hosts():
        return None
    key = _key(backend, group)
    if key not in _layouts:
        _layouts[key] = layout_of(backend.get_process_group_ranks(group), backend.get_rank(group))
    return _layouts[key]


def find_plan(backend: Backend, group: ProcessGroup | None) -> Plan:
    """Return the plan of ``group``, which has a layout; all of its ranks call this alike, as it may make groups.

    A rank that cannot make them breaks ``group``, and all ranks of it learn the cause: most wait for other ranks.

    Raises:
        BackendUnavailableError: the library cannot make these groups.
        CommTimeoutError, PeerLostError: not every rank came.
        CollectiveMismatchError: another rank gave up.
        BrokenGroupError: something else failed, or ``group`` was broken before.
    """
    key = _key(backend, group)
    plan = _plans.get(key)
    if plan is not None:  # without the lock, as a call in the background may be what other ranks wait for
        return plan
    with _turn.lock:
        making = _making.setdefault(key, threading.Lock())
    with making:
        plan = _plans.get(key)
        if plan is None:
            backend.check_group(group)
            layout = find_layout(backend, group)
            assert layout is not None
            plan = _plans[key] = _make(backend, group, layout)
    return plan


def _make(backend: Backend, group: ProcessGroup | None, layout: Layout) -> Plan:
    ranks = backend.get_process_group_ranks(group)
    limit = None if group is None else timeout_of(group)
    parent = _key(backend, group)
    of_host, of_position = (
        f"comm-hierarchy-{digest_of(parent, ranks)}-{one}"
        for one in (f"host-{layout.host}", f"local-rank-{layout.local}")
    )
    # Another rank may be done, and fail in a step, before this one, and may also fail to make its groups.
    making = tuple(making_of(one) for one in (of_host, of_position))
    WATCH.has_steps(name_of(parent), (of_host, of_position, *making))
    made: list[ProcessGroup] = []

    def create(members: list[int], name: str) -> None:
        made.append(backend.create_group([ranks[one] for one in members], name, limit, backend.get_backend(group)))
        trouble = WATCH.trouble(name)
        if trouble is not None:
            backend.mark_broken(made[-1], trouble.short)

    with breaking(_MAKING, backend, group, made, making):
        create(list(layout.hosts[layout.host]), of_host)
        create([members[layout.local] for members in layout.hosts], of_position)
    within, between = made
    return Plan(layout, within, between)


def forget_plans(group: ProcessGroup | None = None) -> list[ProcessGroup]:
    """Forget the plan of ``group``, which is destroyed; those of all groups where that is the world group.

    Returns:
        The groups made for it, to be destroyed as well; none where the world is destroyed.
    """
    if group is None:
        _host_counts.clear()
        _layouts.clear()
        _plans.clear()
        return []
    _host_counts.pop(group, None)
    _layouts.pop(group, None)
    WATCH.has_steps(name_of(group), ())
    plan = _plans.pop(group, None)
    return [] if plan is None else [plan.between, plan.within]
