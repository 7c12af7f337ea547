"""Native operations that each c10d backend computes correctly; measured on torch 2.6 to 2.15, one table a library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from comm_utils.backend import Capabilities
from comm_utils.operations import PRIMITIVES
from comm_utils.reduce_op import ReduceOp

__all__ = ["capabilities_of"]

_ARITHMETIC = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_WIDE_FLOATS = (torch.float32, torch.float64)
_FLOATS = (*_WIDE_FLOATS, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)


def _pairs(ops: Iterable[ReduceOp], dtypes: Iterable[torch.dtype]) -> frozenset[tuple[ReduceOp, torch.dtype]]:
    return frozenset((op, dtype) for op in ops for dtype in dtypes)


# Average is left out although recent gloo has it: on 16-bit floats it rounds after every addition, and on integers it
# truncates. bool is left out: gloo adds its bytes and stores a 2 where True belongs. reduce_scatter_tensor is left out:
# c10d does an all_reduce of the whole and copies the part in wait(), at every wait(), so that its handle never reports
# completion; exchanging the parts and adding them here takes half the time. In torch 2.6 it sums whatever the op.
_GLOO = Capabilities(
    reductions=_pairs(_ARITHMETIC, (*_FLOATS, *_INTEGERS)) | _pairs(_BITWISE, _INTEGERS),
    dtypes=frozenset((*_FLOATS, *_INTEGERS, torch.bool)),
    operations=PRIMITIVES - {"reduce_scatter_tensor"},
    messages_of_any_dtype=True,
    independent_messages=True,
    any_source=True,
    tags=True,
)

# It writes the memory of a message to a socket as it is, also where it is a device's, and then ends the process.
_GLOO_ON_DEVICE = replace(_GLOO, messages_from_host=True)

# NCCL averages 16-bit floats in 16 bits, so only the wide ones are native.
_NCCL = Capabilities(
    reductions=_pairs(_ARITHMETIC, (*_FLOATS, *_INTEGERS)) | _pairs((ReduceOp.AVG,), _WIDE_FLOATS),
    dtypes=frozenset((*_FLOATS, *_INTEGERS, torch.bool)),
    operations=PRIMITIVES,
    preserving_reduce=True,
)

# No bytes move on torch's fake process group, so everything "works".
_FAKE = Capabilities(
    reductions=_pairs((*_ARITHMETIC, ReduceOp.AVG), _FLOATS) | _pairs((*_ARITHMETIC, *_BITWISE), _INTEGERS),
    dtypes=_GLOO.dtypes,
    operations=PRIMITIVES,
    messages_of_any_dtype=True,
    any_source=True,
    tags=True,
    preserving_reduce=True,
)

# For libraries we cannot test: only what all of them are documented to do.
_UNKNOWN = Capabilities(
    reductions=_pairs(_ARITHMETIC, (*_WIDE_FLOATS, torch.int32, torch.int64)),
    dtypes=frozenset((*_WIDE_FLOATS, torch.int32, torch.int64, torch.uint8)),
    operations=PRIMITIVES,
)

_TABLE = {"gloo": _GLOO, "nccl": _NCCL, "xccl": _NCCL, "fake": _FAKE}


def capabilities_of(library: str, device: str = "cpu") -> Capabilities:
    """Return the table for a c10d backend such as ``"gloo"``; a cautious one for a library that is not in it."""
    if library == "gloo" and device != "cpu":
        return _GLOO_ON_DEVICE
    return _TABLE.get(library, _UNKNOWN)
