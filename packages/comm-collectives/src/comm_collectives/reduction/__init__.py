"""Low-Level Reduction Operations: operations that a backend does not provide, built once from those that it does.

avg from sum, sums of scaled elements, a reduce that leaves the other ranks' tensors alone, small integers in wider
ones, list forms from flat ones, reductions on each rank where the backend has none, and those that add in an order
that depends on nothing else.
"""

from comm_collectives.reduction.order import forget_orders, needed_order, ordered_dtypes
from comm_collectives.reduction.reducing import (
    all_reduce,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
)
from comm_collectives.reduction.scaling import Scaling
from comm_utils.torch_support.folding import fold
from comm_utils.torch_support.reduction_encoding import Encoding, encoding_for

__all__ = [
    "Encoding",
    "Scaling",
    "all_reduce",
    "encoding_for",
    "fold",
    "forget_orders",
    "needed_order",
    "ordered_dtypes",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
]
