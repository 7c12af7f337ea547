"""Choose hierarchical calls, by a setting or by a measurement of the group."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch.distributed import ProcessGroup

from comm_collectives.by_group import GroupSettings
from comm_collectives.failed_steps import breaking
from comm_collectives.hierarchy.backend import HierarchicalBackend
from comm_collectives.hierarchy.plan import Plan, find_layout, find_plan
from comm_collectives.measured_choice import AUTO, Call, least_faster_size, prepared_call
from comm_collectives.reduction.order import order_of
from comm_collectives.wrapping import bare_backend
from comm_utils import operations
from comm_utils.backend import Backend
from comm_utils.errors import NotInitializedError
from comm_utils.log import logger
from comm_utils.sizes import format_size

__all__ = ["AUTO", "Setting", "forget_settings", "limit_of", "set_setting", "with_hierarchy"]

#: ``"auto"``, or the size in bytes from which on calls are hierarchical; None for never.
Setting: TypeAlias = str | int | None

# Where hierarchical calls were slower in every measurement; what is smaller is not measured.
_LEAST_BYTES = 32 << 10
_MEASURED_BYTES = (32 << 10, 128 << 10, 512 << 10, 2 << 20, 8 << 20)


_settings: GroupSettings[Setting] = GroupSettings(AUTO)


def set_setting(setting: Setting, group: ProcessGroup | None) -> None:
    """Decide which calls on ``group`` are hierarchical; None as the group is for all without a setting of their own."""
    _settings.set(setting, group)


def forget_settings() -> None:
    """Have the world to come measure."""
    _settings.forget()


def limit_of(backend: Backend, operation: str, group: ProcessGroup | None) -> int | None:
    """Return from how many bytes on calls may be hierarchical, so that no fast path serves them; None for never."""
    setting = _settings.of(group)
    if setting is None or not any(
        one in vars(HierarchicalBackend) for one in (operation, *operations.get(operation).travels_as)
    ):
        return None
    try:
        layout = find_layout(backend, group)
    except NotInitializedError:
        return None
    if layout is None:
        return None
    return _LEAST_BYTES if isinstance(setting, str) else setting


def with_hierarchy(
    operation: str, backend: Backend, group: ProcessGroup | None, size_bytes: int, device: torch.device
) -> Backend:
    """Return ``backend``, or a view of it with hierarchical collectives where this call is to be one.

    The first such call of a group makes groups, and measures. Where the order of additions is settled, reductions go in
    one step.

    Args:
        operation: that travels.
        size_bytes: of the larger one of input and output, the same on every rank.
    """
    setting = _settings.of(group)
    if setting is None or size_bytes < (_LEAST_BYTES if isinstance(setting, str) else setting):
        return backend
    if device.type != "cpu" or find_layout(backend, group) is None:
        return backend
    if operations.get(operation).pattern.reduces and order_of(group) is not None:
        return backend
    plan = find_plan(backend, group)
    if isinstance(setting, str):
        measured = operations.get(operation).measured_as
        if measured not in plan.min_size_bytes:
            plan.min_size_bytes[measured] = _measured(measured, plan, group)
        limit = plan.min_size_bytes[measured]
        if limit is None or size_bytes < limit:
            return backend
    found: Any = HierarchicalBackend(backend, plan, group)
    return found  # type: ignore[no-any-return]


def _measured(operation: str, plan: Plan, group: ProcessGroup | None) -> int | None:
    """Return from how many bytes on the hierarchical ``operation`` is faster; None for at none that was measured."""
    flat = bare_backend().during(operation)
    hierarchical: Any = HierarchicalBackend(flat, plan, group)

    def make(size_bytes: int) -> tuple[Call, Call]:
        in_one_step, in_steps = (prepared_call(one, operation, group, size_bytes) for one in (flat, hierarchical))
        return in_one_step, in_steps

    with breaking(operation, flat, group, plan.groups, what="the measurement of its steps"):
        least = least_faster_size(flat, group, _MEASURED_BYTES, make, stays_faster=True)
    if flat.get_rank(group) == 0:
        found = "no size" if least is None else f"{format_size(least)} and more"
        logger.info("%s of %s is hierarchical for %s", operation, plan.layout, found)
    return least
