"""The row of the operation; imports no torch, as tools list all operations."""

from comm_utils.operations import Argument, Direction, Form, Operation, Role, patterns

REDUCE_SCATTER_IN_PLACE = Operation(
    "reduce_scatter_in_place",
    patterns.REDUCE_SCATTER,
    (
        Argument("tensor", Role.TENSOR, Direction.IN_OUT, Form.FLAT),
        Argument("op", Role.OP),
        Argument("group", Role.GROUP),
        Argument("async_op", Role.ASYNC_OP),
        Argument("timeout", Role.TIMEOUT),
    ),
    primitive=True,
    benchmarked=True,
    function="more_collectives.backend:reduce_scatter_in_place",
)
