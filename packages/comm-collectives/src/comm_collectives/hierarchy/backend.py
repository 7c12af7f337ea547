"""A view of a backend whose collectives on one group are hierarchical."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup

from comm_collectives.composed import NO_ROOT, ComposedCall, Method, Root
from comm_collectives.failed_steps import breaking
from comm_collectives.hierarchy import algorithms
from comm_collectives.hierarchy.between import Between
from comm_collectives.hierarchy.plan import Plan, find_plan
from comm_collectives.memory import memory_view
from comm_collectives.wrapping import BackendWrapper
from comm_utils.backend import Backend, Capabilities, Work
from comm_utils.observability.traces.events import HIERARCHICAL
from comm_utils.reduce_op import ReduceOp, parse_reduce_op

__all__ = ["HierarchicalBackend"]


class HierarchicalBackend(BackendWrapper):
    """Does collectives of a group that spans hosts in steps; everything else is the wrapped backend's.

    Each call is recorded as one, with the steps as its method.

    Args:
        inner: in the course of a call.
        plan: of ``group``.
    """

    def __init__(self, inner: Backend, plan: Plan, group: ProcessGroup | None) -> None:
        super().__init__(inner)
        self._plan, self._group = plan, group

    def capabilities(self, group: ProcessGroup | None = None, device_type: str = "cpu") -> Capabilities:
        """Return what the groups within hosts and between them both do, of one rounding at most a step."""
        found = self._plan.capabilities.get(device_type)
        if found is None:
            within, between = (
                self.inner.capabilities(one, device_type) for one in (self._plan.within, self._plan.between)
            )
            # An average of averages would be rounded twice.
            reductions = {pair for pair in within.reductions & between.reductions if pair[0] is not ReduceOp.AVG}
            found = self._plan.capabilities[device_type] = Capabilities(
                reductions=frozenset(reductions),
                dtypes=within.dtypes & between.dtypes,
                operations=frozenset((*within.operations, *_composed())),
            )
        return found

    def all_reduce(
        self, tensor: torch.Tensor, op: object = "sum", group: ProcessGroup | None = None, async_op: bool = False
    ) -> Work | None:
        elements, hosts = memory_view(tensor), len(self._plan.layout.hosts)
        sent = 2 * (hosts - 1) * tensor.nbytes // (hosts * self._plan.layout.ranks_per_host)

        def steps(backend: Backend, plan: Plan) -> None:
            algorithms.all_reduce(backend, plan, elements, parse_reduce_op(op), Between(backend, plan))

        return self._run("all_reduce", tensor, op, async_op, sent, steps, tensor)

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None:
        if group_src is None:
            assert src is not None
            group_src = self.inner.get_process_group_ranks(group).index(src)
        root, elements, layout = group_src, memory_view(tensor), self._plan.layout
        is_sender = layout.host == layout.position(root)[0]
        sent = (len(layout.hosts) - 1) * tensor.nbytes // layout.ranks_per_host if is_sender else 0

        def steps(backend: Backend, plan: Plan) -> None:
            algorithms.broadcast(backend, plan, elements, root)

        return self._run("broadcast", tensor, None, async_op, sent, steps, tensor, (None, root))

    def all_gather_into_tensor(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        sent = (len(self._plan.layout.hosts) - 1) * input_tensor.nbytes

        def steps(backend: Backend, plan: Plan) -> None:
            rows = torch.split(memory_view(output_tensor), max(1, input_tensor.numel()))
            algorithms.all_gather(backend, plan, rows, memory_view(input_tensor), Between(backend, plan))

        return self._run("all_gather_into_tensor", input_tensor, None, async_op, sent, steps, output_tensor)

    def all_gather(
        self,
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        sent = (len(self._plan.layout.hosts) - 1) * tensor.nbytes

        def steps(backend: Backend, plan: Plan) -> None:
            rows = [memory_view(target) for target in tensor_list]
            algorithms.all_gather(backend, plan, rows, memory_view(tensor), Between(backend, plan))

        return self._run("all_gather", tensor, None, async_op, sent, steps, tensor_list)

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: object = "sum",
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        sent = (len(self._plan.layout.hosts) - 1) * output.nbytes

        def steps(backend: Backend, plan: Plan) -> None:
            target, rows = memory_view(output), torch.split(memory_view(input), max(1, output.numel()))
            algorithms.reduce_scatter(backend, plan, target, rows, parse_reduce_op(op), Between(backend, plan))

        return self._run("reduce_scatter_tensor", output, op, async_op, sent, steps, output)

    def _run(
        self,
        operation: str,
        counted: torch.Tensor,
        op: object,
        async_op: bool,
        wire_bytes: int,
        steps: Callable[[Backend, Plan], None],
        result: Any,
        root: Root = NO_ROOT,
    ) -> Work | None:
        def body(inner: Backend, used: ProcessGroup | None) -> None:
            plan = self._plan if used is self._group else find_plan(inner, used)
            with breaking(operation, inner, used, plan.groups):
                steps(inner, plan)

        reduce_op = None if op is None else parse_reduce_op(op)
        call = ComposedCall(operation, self.inner, self._group, counted, reduce_op, async_op, result, root=root)
        return call.run(body, Method(f"{HIERARCHICAL}({self._plan.layout})", wire_bytes), find_plan)


def _composed() -> tuple[str, ...]:
    return tuple(name for name in vars(HierarchicalBackend) if hasattr(Backend, name) and name != "capabilities")
