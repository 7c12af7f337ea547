"""Choose hierarchical calls, by a setting or by a measurement of the group."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup

from comm_collectives.hierarchy.backend import HierarchicalBackend
from comm_collectives.hierarchy.plan import Plan, find_layout, find_plan
from comm_collectives.reduction.order import order_of
from comm_collectives.wrapping import bare_backend
from comm_utils import operations
from comm_utils.active import slot
from comm_utils.backend import Backend
from comm_utils.errors import NotInitializedError
from comm_utils.log import logger
from comm_utils.operations import Direction, Role
from comm_utils.reduce_op import ReduceOp
from comm_utils.sizes import format_size

__all__ = ["AUTO", "Setting", "forget_settings", "limit_of", "set_setting", "with_hierarchy"]

#: Of calls from the size on at which they were measured to be faster.
AUTO = "auto"
#: ``"auto"``, or the size in bytes from which on calls are hierarchical; None for never.
Setting: TypeAlias = str | int | None

# Where hierarchical calls were slower in every measurement; what is smaller is not measured.
_LEAST_BYTES = 32 << 10
_MEASURED_BYTES = (32 << 10, 128 << 10, 512 << 10, 2 << 20)
_ROUNDS = 3
# Of one call, after which larger ones are not measured.
_LONG_S = 0.1


class _Settings:
    world: ClassVar[Setting] = AUTO
    groups: ClassVar[WeakKeyDictionary[ProcessGroup, Setting]] = WeakKeyDictionary()


def set_setting(setting: Setting, group: ProcessGroup | None) -> None:
    """Decide which calls on ``group`` are hierarchical; None as the group is for all without a setting of their own."""
    if group is None:
        _Settings.world = setting
    else:
        _Settings.groups[group] = setting
    slot.fast_paths.clear()


def forget_settings() -> None:
    """Have the world to come measure."""
    _Settings.world = AUTO
    _Settings.groups.clear()


def _setting_of(group: ProcessGroup | None) -> Setting:
    return _Settings.world if group is None else _Settings.groups.get(group, _Settings.world)


def limit_of(backend: Backend, operation: str, group: ProcessGroup | None) -> int | None:
    """Return from how many bytes on calls may be hierarchical, so that no fast path serves them; None for never."""
    setting = _setting_of(group)
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
    setting = _setting_of(group)
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
    """Return from how many bytes on the hierarchical ``operation`` is faster; None for at none that was measured.

    All ranks take turns with both, and agree on the times of the slowest rank.
    """
    flat = bare_backend().during(operation)
    hierarchical: Any = HierarchicalBackend(flat, plan, group)
    least: int | None = None
    for size_bytes in _MEASURED_BYTES:
        calls = [_prepared(backend, operation, group, size_bytes) for backend in (flat, hierarchical)]
        taken = torch.zeros(2, _ROUNDS, dtype=torch.float64)
        for round_ in range(-1, _ROUNDS):  # one before, which opens connections and touches memory
            for place, call in enumerate(calls):
                begin = time.perf_counter()
                call()
                if round_ >= 0:
                    taken[place, round_] = time.perf_counter() - begin
        flat.all_reduce(taken, ReduceOp.MAX, group)
        in_one_step, in_steps = (statistics.median(row) for row in taken.tolist())
        if in_steps >= in_one_step:
            least = None
        elif least is None:
            least = size_bytes
        if max(in_one_step, in_steps) > _LONG_S:
            break
    if flat.get_rank(group) == 0:
        found = "no size" if least is None else f"{format_size(least)} and more"
        logger.info("%s of %s is hierarchical for %s", operation, plan.layout, found)
    return least


def _prepared(backend: Backend, operation: str, group: ProcessGroup | None, size_bytes: int) -> Callable[[], object]:
    """Return a call of ``operation`` on new tensors, of which the larger one has about ``size_bytes``."""
    row, size = operations.get(operation), backend.get_world_size(group)
    part = torch.zeros(size_bytes // 4 // size, dtype=torch.float32)
    whole = torch.zeros(size * part.numel(), dtype=torch.float32)
    arguments: dict[str, Any] = {}
    for one in row.arguments:
        if one.role is Role.TENSOR:
            is_input, pattern = one.direction is Direction.INPUT, row.pattern
            arguments[one.name] = part if (pattern.input_is_part if is_input else pattern.output_is_part) else whole
        elif one.role is Role.GROUP:
            arguments[one.name] = group
        elif one.role is Role.GROUP_ROOT:
            arguments[one.name] = 0
    return partial(getattr(backend, operation), **arguments)
