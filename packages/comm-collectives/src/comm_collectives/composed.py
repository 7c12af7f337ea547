"""Calls that take several exchanges: recorded as one, and in the background where they are asynchronous."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.distributed import ProcessGroup

from comm_collectives import background
from comm_collectives.failed_steps import breaking
from comm_collectives.work import Completed
from comm_utils.backend import Backend, Work
from comm_utils.reduce_op import ReduceOp
from comm_utils.torch_support.passed_tensors import passed, passing

__all__ = ["NO_ROOT", "ONE_STEP", "ComposedCall", "Method", "Root"]

#: The global rank of a root or of the other side of a message, or its rank in the group.
Root: TypeAlias = tuple[int | None, int | None]
NO_ROOT: Root = (None, None)


@dataclass(frozen=True, slots=True)
class Method:
    """Describe how a call is done, for the record."""

    name: str = ""
    #: What this rank sends.
    wire_bytes: int = 0
    #: Asked at the end of the call: it was done without this method after all, and is recorded so.
    was_plain: Callable[[], bool] | None = None


#: Without anything of which there is a record.
ONE_STEP = Method()


@dataclass(frozen=True, slots=True, eq=False)
class ComposedCall:
    """A call of the program that may take several exchanges, with checked arguments."""

    name: str
    backend: Backend
    group: ProcessGroup | None
    #: Whose size is that of the call.
    counted: torch.Tensor
    op: ReduceOp | None
    async_op: bool
    #: Of the handle.
    result: Any
    root: Root = field(default=NO_ROOT, kw_only=True)

    def observed(self, started: Callable[[Backend], Work | None], method: Method = ONE_STEP) -> Work | None:
        """Do ``started`` with the backend, or with the one that it records, and have it recorded as one call."""
        observe = getattr(type(self.backend), "observe_composed", None)
        if observe is None:
            return started(self.backend)
        outcome: Work | None = observe(self.backend, self, method, started)
        return outcome

    def run(
        self,
        body: Callable[[Backend, ProcessGroup | None], None],
        method: Method = ONE_STEP,
        prepare: Callable[[Backend, ProcessGroup], object] | None = None,
        what: str = "a step",
    ) -> Work | None:
        """Do ``body``, which gets the group to communicate in, now or in the group's thread, recorded as one call.

        An exception of ``body`` breaks the group, as other ranks wait for what this one does not send.

        Args:
            prepare: makes what ``body`` needs in another group of the same ranks.
            what: computes between the exchanges, and may fail.
        """

        def done(inner: Backend, used: ProcessGroup | None) -> None:
            # Outside of the mode, tensors made inside of it cannot be written.
            with torch.inference_mode(), breaking(self.name, inner, used, what=what):
                body(inner, used)

        def started(inner: Backend) -> Work | None:
            # What the current stream of a device orders, another thread's would not.
            if not self.async_op or self.counted.device.type != "cpu":
                done(inner, self.group)
                return Completed(self.result) if self.async_op else None

            tensors = passed()

            def in_thread(own: ProcessGroup) -> None:
                inner.check_group(own)
                with passing(tensors):
                    done(inner, own)

            prepared = None if prepare is None else partial(prepare, inner)
            return background.start(self.name, self.backend, self.group, in_thread, self.result, prepared)

        return self.observed(started, method)
