"""A call of the program that is compressed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import ProcessGroup

from comm_collectives.composed import ComposedCall, Method
from comm_collectives.compression.codec import Codec
from comm_collectives.compression.link import Link
from comm_collectives.compression.settings import Compression
from comm_utils.backend import Backend, Work
from comm_utils.reduce_op import ReduceOp

__all__ = ["CompressedCall"]


def _nothing() -> None:
    """Leave the result where it is."""


@dataclass(frozen=True, slots=True, eq=False)
class CompressedCall(ComposedCall):
    """A call whose elements travel encoded, or as factors of low rank."""

    compression: Compression
    #: Puts the result where it belongs, once it is complete.
    finish: Callable[[], None] = _nothing

    @property
    def averages(self) -> bool:
        return self.op is ReduceOp.AVG

    @property
    def codec(self) -> Codec:
        """The codec of a compression that has one, unlike ``"powersgd"``."""
        assert self.compression.codec is not None
        return self.compression.codec

    def link(self, inner: Backend, used: ProcessGroup | None, refusal: str = "") -> Link:
        """Return the exchange of encoded pieces through a backend, in the group of the call or one of its ranks."""
        return Link(inner, used, self.codec, self.compression.describe_call(), refusal)

    def sizing(self) -> Link:
        """Return the link that says how much the call sends."""
        return self.link(self.backend, self.group)

    def run_compressed(
        self,
        body: Callable[[Backend, ProcessGroup | None], None],
        wire_bytes: int,
        was_plain: Callable[[], bool] | None = None,
    ) -> Work | None:
        """Do ``body`` and :attr:`finish`, now or in the group's thread, and have that recorded as one call.

        Args:
            wire_bytes, was_plain: see :class:`comm_collectives.composed.Method`.
        """

        def finished(inner: Backend, used: ProcessGroup | None) -> None:
            body(inner, used)
            self.finish()

        method = Method(self.compression.describe_one_step(), wire_bytes, was_plain)
        return self.run(finished, method, what=f"the compression {self.compression!r}")
