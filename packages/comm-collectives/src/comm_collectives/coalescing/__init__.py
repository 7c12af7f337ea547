"""Many small calls in few messages; see :mod:`.block`."""

from comm_collectives.coalescing.block import Coalescing, coalescing

__all__ = ["Coalescing", "coalescing"]
