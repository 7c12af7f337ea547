"""Encodings: reductions that carry those that a backend does not provide, or computes wrongly.

An :class:`Encoding` says what travels in place of a tensor's elements and how the result is read back. It depends on
the operation, the dtype and the backend's capabilities alone, so every rank chooses the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from comm_utils.backend import Capabilities
from comm_utils.errors import ArgumentError
from comm_utils.reduce_op import ReduceOp
from comm_utils.torch_support.folding import FOLDED, fold

__all__ = ["Encoding", "encoding_for", "refusal"]

_BITWISE = frozenset((ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR))
_ON_FLOATS = frozenset((ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX))
# They give the bits of unsigned integers on signed ones, two of them after their order was mapped.
_ON_UINT64 = _BITWISE | {ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX}
_HALF = frozenset((torch.float16, torch.bfloat16))
_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_COMPLEX = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_SIGN_BIT = -(2**63)
# In bytes, of which all but 0 are true, what torch's bool arithmetic means: a sum is true where any is, a product where
# all are. Only an exclusive or needs bytes of 0 and 1.
_BOOL_OPS = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.BOR: ReduceOp.MAX,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.PRODUCT: ReduceOp.MIN,
    ReduceOp.BAND: ReduceOp.MIN,
    ReduceOp.MIN: ReduceOp.MIN,
    ReduceOp.BXOR: ReduceOp.BXOR,
}
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_INTEGERS = frozenset((torch.int8, torch.uint8, torch.int32, torch.int64, torch.uint64, *_WIDER))

View = Callable[[torch.Tensor], torch.Tensor]
Decode = Callable[[torch.Tensor, torch.Tensor, int], None]


@dataclass(frozen=True)
class Encoding:
    """The dtype, reduce op and conversions that carry a reduction.

    Attributes:
        op: the operation on what travels.
        encode: from the elements, (n,), to what travels, (m,); reads only.
        shares: ``encode`` gives another view of the same memory, so that the result is already in place.
        decode: ``decode(wire, elements, W)`` writes the result of W ranks; None where there is nothing to do.
        native: the backend reduces this; otherwise ranks exchange what travels and reduce it themselves.
    """

    op: ReduceOp
    encode: View
    shares: bool
    decode: Decode | None
    native: bool

    def decoder(self, wire: torch.Tensor, elements: torch.Tensor, W: int) -> Callable[[], None] | None:
        """Return the function that writes into ``elements`` what ``wire`` says once it has the result of W ranks."""
        decode = self.decode
        return None if decode is None else lambda: decode(wire, elements, W)

    def folder(self, parts: torch.Tensor, elements: torch.Tensor) -> Callable[[], None]:
        """Return the function that reduces ``parts``, (W, m), of what travelled, into ``elements``, (n,)."""

        def finish() -> None:
            total = self.encode(elements) if self.shares else parts.new_empty(parts.shape[1])
            fold(parts, self.op, total)
            if self.decode is not None:
                self.decode(total, elements, len(parts))

        return finish


def encoding_for(call: str, op: ReduceOp, dtype: torch.dtype, capabilities: Capabilities) -> Encoding:
    """Choose the encoding.

    Raises:
        ArgumentError: the dtype cannot be reduced with ``op``; names what can.
    """
    reason = refusal(op, dtype)
    if reason is not None:
        raise ArgumentError(f"{call}: {reason}")
    return _choose(op, dtype, capabilities)


def refusal(op: ReduceOp, dtype: torch.dtype) -> str | None:
    """Return why no backend can reduce ``dtype`` with ``op``, and what can be done; None where they can."""
    name = op.name.lower()
    if dtype in _COMPLEX:
        if op in (ReduceOp.SUM, ReduceOp.AVG):
            return None
        return f"op {name!r} is not defined for {dtype}; complex tensors can be reduced with 'sum' and 'avg'"
    if dtype not in _FLOATS and dtype not in _INTEGERS and dtype != torch.bool:
        if str(dtype).startswith("torch.float8_"):
            return f"{dtype} tensors can be moved but not reduced; convert to torch.bfloat16 or torch.float32 first"
        return (
            f"{dtype} tensors can be moved but not reduced, and torch converts them to no other dtype; unpack the "
            "numbers, whose bytes view(torch.uint8) gives, into a tensor of torch.int32 or torch.float32"
        )
    if op not in FOLDED:
        return f"op {name!r} has no function of two tensors; add it to comm_utils.torch_support.folding"
    if op not in _ON_FLOATS and dtype in _FLOATS:
        kinds = "an integer or bool tensor" if op in _BOOL_OPS else "a tensor of integers"
        return f"op {name!r} is not defined for {dtype}; it needs {kinds}"
    if op is ReduceOp.AVG and dtype not in _FLOATS:
        return f"op 'avg' is not defined for {dtype}: an average is no integer; use 'sum', or convert to a float dtype"
    if dtype == torch.bool and op not in _BOOL_OPS:
        return f"op {name!r} is not defined for {dtype}; convert to torch.uint8 first"
    if dtype == torch.uint64 and op not in _ON_UINT64:
        return f"op {name!r} is not defined for {dtype}; convert to torch.int64 first"
    return None


@lru_cache(maxsize=1024)
def _choose(op: ReduceOp, dtype: torch.dtype, capabilities: Capabilities) -> Encoding:
    native = capabilities.reductions
    if (op, dtype) in native:
        return Encoding(op, _same, True, None, True)
    if dtype in _COMPLEX:
        return _over(torch.view_as_real, _choose(op, _COMPLEX[dtype], capabilities))
    if op is ReduceOp.AVG:
        if dtype in _HALF:
            return _averaged(
                Encoding(ReduceOp.SUM, _to(torch.float32), False, _convert, True), capabilities, torch.float32
            )
        return _averaged(_choose(ReduceOp.SUM, dtype, capabilities), capabilities, dtype)
    if dtype == torch.bool:
        wire_op = _BOOL_OPS[op]
        carried = (wire_op, torch.uint8) in native
        if wire_op is ReduceOp.BXOR:
            return Encoding(wire_op, _as_bits, False, _convert, carried)
        return Encoding(wire_op, _as(torch.uint8), True, None, carried)
    if dtype in _WIDER:
        wider = _WIDER[dtype]
        return Encoding(op, _to(wider), False, _convert, (op, wider) in native)
    if dtype == torch.uint64:
        carried = (op, torch.int64) in native
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            return Encoding(op, _flip_sign, False, _unflip_sign, carried)
        return Encoding(op, _as(torch.int64), True, None, carried)
    if dtype in _HALF and (op, torch.float32) in native:
        return Encoding(op, _to(torch.float32), False, _convert, True)
    return Encoding(op, _same, True, None, False)


def _averaged(sum_: Encoding, capabilities: Capabilities, wire: torch.dtype) -> Encoding:
    def decode(travelled: torch.Tensor, elements: torch.Tensor, W: int) -> None:
        travelled.div_(W)
        if sum_.decode is not None:
            sum_.decode(travelled, elements, W)

    return Encoding(sum_.op, sum_.encode, sum_.shares, decode, (ReduceOp.SUM, wire) in capabilities.reductions)


def _over(view: View, inner: Encoding) -> Encoding:
    """``inner`` applied to another view of the same memory."""

    def encode(elements: torch.Tensor) -> torch.Tensor:
        return inner.encode(view(elements).view(-1))

    def decode(wire: torch.Tensor, elements: torch.Tensor, W: int) -> None:
        assert inner.decode is not None
        inner.decode(wire, view(elements).view(-1), W)

    return Encoding(inner.op, encode, inner.shares, decode if inner.decode else None, inner.native)


def _same(elements: torch.Tensor) -> torch.Tensor:
    return elements


def _to(dtype: torch.dtype) -> View:
    return lambda elements: elements.to(dtype)


def _as(dtype: torch.dtype) -> View:
    return lambda elements: elements.view(dtype)


def _as_bits(elements: torch.Tensor) -> torch.Tensor:
    return elements.view(torch.uint8).ne(0).view(torch.uint8)


def _convert(wire: torch.Tensor, elements: torch.Tensor, W: int) -> None:
    elements.copy_(wire)  # integers wrap around, floats round once


def _flip_sign(elements: torch.Tensor) -> torch.Tensor:
    # Order-preserving map from unsigned to signed.
    return elements.view(torch.int64) ^ _SIGN_BIT


def _unflip_sign(wire: torch.Tensor, elements: torch.Tensor, W: int) -> None:
    torch.bitwise_xor(wire, _SIGN_BIT, out=elements.view(torch.int64))
