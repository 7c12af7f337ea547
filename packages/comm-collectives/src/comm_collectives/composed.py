"""Calls that take several exchanges: recorded as one, and in the background where they are asynchronous."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup

from comm_collectives import background
from comm_collectives.failed_steps import breaking
from comm_collectives.work import Completed
from comm_utils.backend import Backend, Work
from comm_utils.reduce_op import ReduceOp
from comm_utils.torch_support.passed_tensors import passed, passing

__all__ = ["observed", "run"]

NO_ROOT: tuple[int | None, int | None] = (None, None)


def observed(
    call: str,
    backend: Backend,
    group: ProcessGroup | None,
    counted: torch.Tensor,
    op: ReduceOp | None,
    async_op: bool,
    started: Callable[[Backend], Work | None],
    method: str = "",
    wire_bytes: int = 0,
    root: tuple[int | None, int | None] = NO_ROOT,
    was_plain: Callable[[], bool] | None = None,
) -> Work | None:
    """Do ``started`` with ``backend``, or with the one that it records, and have it recorded as one ``call``.

    Args:
        counted: whose size is that of the call.
        method, wire_bytes: how it is done, and what this rank sends, for the record.
        root: its global rank, or its rank in the group.
        was_plain: asked at the end of the call: it was done without ``method`` after all, and is recorded so.
    """
    observe = getattr(type(backend), "observe_composed", None)
    if observe is None:
        return started(backend)
    outcome: Work | None = observe(
        backend, call, group, counted, op, async_op, method, wire_bytes, started, root, was_plain
    )
    return outcome


def run(
    call: str,
    backend: Backend,
    group: ProcessGroup | None,
    counted: torch.Tensor,
    op: ReduceOp | None,
    async_op: bool,
    body: Callable[[Backend, ProcessGroup | None], None],
    result: Any,
    method: str = "",
    wire_bytes: int = 0,
    root: tuple[int | None, int | None] = NO_ROOT,
    prepare: Callable[[Backend, ProcessGroup], object] | None = None,
    was_plain: Callable[[], bool] | None = None,
    what: str = "a step",
) -> Work | None:
    """Do ``body``, which gets the group to communicate in, now or in the group's thread, recorded as one ``call``.

    An exception of ``body`` breaks the group, as other ranks wait for what this one does not send.

    Args:
        counted, method, wire_bytes, root, was_plain: as for :func:`observed`.
        result: of the handle.
        prepare: makes what ``body`` needs in another group of the same ranks.
        what: computes between the exchanges, and may fail.
    """

    def done(inner: Backend, used: ProcessGroup | None) -> None:
        # Outside of the mode, tensors made inside of it cannot be written.
        with torch.inference_mode(), breaking(call, inner, used, what=what):
            body(inner, used)

    def started(inner: Backend) -> Work | None:
        # What the current stream of a device orders, another thread's would not.
        if not async_op or counted.device.type != "cpu":
            done(inner, group)
            return Completed(result) if async_op else None

        tensors = passed()

        def in_thread(own: ProcessGroup) -> None:
            inner.check_group(own)
            with passing(tensors):
                done(inner, own)

        prepared = None if prepare is None else partial(prepare, inner)
        return background.start(call, backend, group, in_thread, result, prepared)

    return observed(call, backend, group, counted, op, async_op, started, method, wire_bytes, root, was_plain)
