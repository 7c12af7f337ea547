"""Calls that are made of several exchanges, done and recorded as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup

from comm_collectives.compression import background
from comm_collectives.work import Completed
from comm_utils.backend import Backend, Work

__all__ = ["run_composed"]


def run_composed(
    operation: str,
    backend: Backend,
    group: ProcessGroup | None,
    counted: torch.Tensor,
    op: object,
    async_op: bool,
    method: str,
    wire_bytes: int,
    body: Callable[[Backend, ProcessGroup | None], None],
    result: Any,
    root: tuple[int | None, int | None] = (None, None),
    prepare: Callable[[ProcessGroup], object] | None = None,
) -> Work | None:
    """Do ``body``, now or in the group's thread, and have it recorded as one ``operation``.

    Args:
        counted: whose size is that of the call.
        method: how it is done, for the record.
        wire_bytes: what this rank sends, for the record.
        body: gets the backend without the recording of its parts, and the group to communicate in: ``group``, or
            another one of the same ranks.
        root: a global rank or a group rank, for the record.
        prepare: makes what ``body`` needs in another group of the same ranks.
    """

    def started(inner: Backend) -> Work | None:
        if not async_op:
            with torch.inference_mode():  # outside of it, tensors made inside of it cannot be written
                body(inner, group)
            return None
        if counted.device.type != "cpu":  # what the current stream orders, another thread's would not
            with torch.inference_mode():
                body(inner, group)
            return Completed(result)

        def in_thread(own: ProcessGroup) -> None:
            with torch.inference_mode():
                body(inner, own)

        return background.start(operation, backend, group, in_thread, result, prepare)

    observe = getattr(type(backend), "observe_composed", None)
    if observe is None:
        return started(backend)
    outcome: Work | None = observe(backend, operation, group, counted, op, async_op, method, wire_bytes, root, started)
    return outcome
