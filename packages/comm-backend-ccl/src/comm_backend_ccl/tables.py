"""Codes of operations, dtypes and reductions in both engines, and the capabilities of each."""

from __future__ import annotations

from enum import IntEnum

import torch

from comm_utils import operations
from comm_utils.backend import Capabilities
from comm_utils.operations import PRIMITIVES
from comm_utils.reduce_op import ReduceOp

__all__ = [
    "CALL_CODES",
    "CODECS",
    "DTYPES",
    "IN_SHARED_MEMORY",
    "MESSAGE_DTYPES",
    "ONECCL_DTYPES",
    "ONECCL_OPS",
    "ON_ONECCL",
    "OPS",
    "OTHER_DTYPE",
    "RECORDED_CODES",
    "Operation",
]


class Operation(IntEnum):
    """The codes of ``native/``; oneCCL has the first nine."""

    ALL_REDUCE = 0
    REDUCE = 1
    BROADCAST = 2
    ALL_GATHER = 3
    REDUCE_SCATTER = 4
    ALL_TO_ALL = 5
    ALL_TO_ALL_V = 6
    SEND = 7
    RECEIVE = 8
    GATHER = 9
    SCATTER = 10
    BARRIER = 11


#: ``ccl::datatype``
ONECCL_DTYPES: dict[torch.dtype, int] = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int16: 2,
    torch.uint16: 3,
    torch.int32: 4,
    torch.uint32: 5,
    torch.int64: 6,
    torch.uint64: 7,
    torch.float16: 8,
    torch.float32: 9,
    torch.float64: 10,
    torch.bfloat16: 11,
}

#: ``ccl::reduction``
ONECCL_OPS: dict[ReduceOp, int] = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MIN: 2, ReduceOp.MAX: 3}

#: Codes of ``native/shared_memory/kernels/kernels.hpp``.
DTYPES: dict[torch.dtype, int] = {**ONECCL_DTYPES, torch.bool: 12}
_OF_MESSAGES_ALONE = (
    *("complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *("qint8", "qint32", "quint8", "quint4x2", "quint2x4"),
    *(f"{kind}{size}" for kind in ("int", "uint") for size in range(1, 8)),
    "bcomplex32",
)
#: Codes by which ranks compare the dtypes of messages, which may be any of torch's.
MESSAGE_DTYPES: dict[torch.dtype, int] = {
    **DTYPES,
    **{
        getattr(torch, name): code
        for code, name in enumerate(_OF_MESSAGES_ALONE, start=len(DTYPES))
        if hasattr(torch, name)
    },
}
#: The code of a dtype that torch has and this table has not.
OTHER_DTYPE = 255

OPS: dict[ReduceOp, int] = {**ONECCL_OPS, ReduceOp.AVG: 4, ReduceOp.BAND: 5, ReduceOp.BOR: 6, ReduceOp.BXOR: 7}

_NAMES = {row.native_code: row.name for row in operations.rows() if row.native_code >= 0}
#: The names of codes in records of native code, see ``comm_utils.flight_recorder.layout.EntryType.CODES``.
RECORDED_CODES = {
    "operations": [_NAMES[Operation.ALL_TO_ALL if one is Operation.ALL_TO_ALL_V else one] for one in Operation],
    "dtypes": [str(one).removeprefix("torch.") for one in DTYPES],
    "ops": [one.name.lower() for one in OPS],
    "calls": ["", *(row.name for row in operations.rows())],
}
#: The codes of users' calls there; what has none is recorded as the operation.
CALL_CODES = {name: code for code, name in enumerate(RECORDED_CODES["calls"])}

#: Codes of ``native/shared_memory/kernels/codecs.hpp``.
CODECS = {name: code for code, name in enumerate(("fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "onebit"))}

_BITS = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
# With these torch cannot compute, which parts of a collective may need.
_LEFT_OUT = (torch.uint16, torch.uint32, torch.uint64)

#: Averages of 16-bit floats are to be rounded once, and oneCCL has no bit operations: both are built above.
ON_ONECCL = Capabilities(
    any_source=True,
    tags=True,
    reductions=frozenset((op, dtype) for op in ONECCL_OPS for dtype in ONECCL_DTYPES if dtype not in _LEFT_OUT),
    dtypes=frozenset((*ONECCL_DTYPES, torch.bool)),
    operations=PRIMITIVES,
    messages_of_any_dtype=True,
    preserving_reduce=True,
)

IN_SHARED_MEMORY = Capabilities(
    compares_calls=True,
    any_source=True,
    tags=True,
    reductions=frozenset(
        (op, dtype)
        for op in OPS
        for dtype in DTYPES
        if dtype not in _LEFT_OUT and op not in (_BITS if dtype.is_floating_point else (ReduceOp.AVG,))
    ),
    dtypes=frozenset(DTYPES),
    operations=PRIMITIVES,
    messages_of_any_dtype=True,
    preserving_reduce=True,
    fixed_order=True,
)
