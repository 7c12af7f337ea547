"""The bytes that compressed calls send, as they are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from comm_collectives import BackendWrapper, instrument, instrumented
from comm_collectives.composed import ComposedCall, Method
from comm_utils.backend import Backend, Work

__all__ = ["Counted", "counted_bytes"]


class Counted:
    """The sum over all compressed calls of this rank."""

    wire_bytes = 0


@contextmanager
def counted_bytes() -> Iterator[Counted]:
    """Count what compressed calls within the block send."""
    counted, usual = Counted(), instrumented()

    class Counting(BackendWrapper):
        def observe_composed(
            self, call: ComposedCall, method: Method, started: Callable[[Backend], Work | None]
        ) -> Work | None:
            outcome = started(self.inner)
            if method.was_plain is None or call.async_op or not method.was_plain():
                counted.wire_bytes += method.wire_bytes
            return outcome

    instrument(*usual, lambda inner: cast(Backend, Counting(inner)))
    try:
        yield counted
    finally:
        instrument(*usual)
