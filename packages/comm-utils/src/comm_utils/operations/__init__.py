"""The table of operations: what every layer knows about each, in one row.

The logger, message sizes, traces, their alignment and replay, benchmarks, the cost model and the façade's keywords are
derived from these rows; nothing else lists operations. A new operation is a row here, or one that another package
registers, and an implementation in each backend.
"""

from comm_utils.operations import patterns as patterns
from comm_utils.operations.calls import DEFAULTS, positional, tensor_for
from comm_utils.operations.registry import (
    ENTRY_POINT_GROUP,
    UnknownOperationError,
    benchmarked,
    find,
    function_of,
    get,
    is_benchmarked,
    record_name,
    recorded,
    register,
    rows,
    unregister,
)
from comm_utils.operations.table import PRIMITIVES
from comm_utils.operations.types import (
    Algorithm,
    Argument,
    Content,
    Direction,
    Form,
    Move,
    Operation,
    Pattern,
    Role,
    Side,
)

__all__ = [
    "DEFAULTS",
    "ENTRY_POINT_GROUP",
    "PRIMITIVES",
    "Algorithm",
    "Argument",
    "Content",
    "Direction",
    "Form",
    "Move",
    "Operation",
    "Pattern",
    "Role",
    "Side",
    "UnknownOperationError",
    "benchmarked",
    "find",
    "function_of",
    "get",
    "is_benchmarked",
    "positional",
    "record_name",
    "recorded",
    "register",
    "rows",
    "tensor_for",
    "unregister",
]
