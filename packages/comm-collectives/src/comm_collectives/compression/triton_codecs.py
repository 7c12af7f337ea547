"""The kernels of :mod:`~comm_collectives.compression.device_kernels`, in triton.

A program works on ROWS blocks of BLOCK elements. ``FLAG`` says whether an encoding takes what earlier ones lost from
``extra`` and leaves there what it loses, or whether a decoding adds. Magnitudes are compared as integers, which orders
NaN after infinity.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decode_blocks", "decode_cast", "decode_signs", "encode_blocks", "encode_cast", "encode_signs"]

_INFINITE = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_LEAST_NORMAL = tl.constexpr(1.1754943508222875e-38)
# Added to a smaller number, it leaves the number's integer, rounded to nearest, ties to even, in the low bits.
_ROUNDER = tl.constexpr(12582912.0)
_LANES = tl.constexpr(16)
_LARGEST_BLOCK = tl.constexpr(4096.0)


@triton.jit
def _magnitude_bits(values):
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _places(ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of each row of this program, and of each of its elements."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return rows, rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def _loaded(source, extra, places, is_there, FLAG: tl.constexpr):
    values = tl.load(source + places, mask=is_there, other=0.0)
    if FLAG:
        values += tl.load(extra + places, mask=is_there, other=0.0)
    return values


@triton.jit
def _keep_lost(extra, values, decoded, places, is_there):
    lost = values - decoded
    tl.store(extra + places, tl.where(_magnitude_bits(lost) < _INFINITE, lost, 0.0), mask=is_there)


@triton.jit
def _store(target, decoded, places, is_there, FLAG: tl.constexpr):
    if FLAG:
        decoded = tl.load(target + places, mask=is_there, other=0.0) + decoded
    tl.store(target + places, decoded, mask=is_there)


@triton.jit
def encode_blocks(
    source,
    extra,
    scales,
    wire,
    count,
    FLAG: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LEVELS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Encode blocks whose elements are int8 (``KIND`` 0), int4 (1) or floats of 8 bits (2)."""
    rows, places = _places(ROWS, BLOCK)
    is_there = places < count
    values = _loaded(source, extra, places, is_there, FLAG)
    largest_bits = tl.max(_magnitude_bits(values), axis=1)
    scale = tl.div_rn(largest_bits.to(tl.float32, bitcast=True), tl.full((ROWS,), LEVELS, tl.float32))
    scale = tl.where(scale < _LEAST_NORMAL, 0.0, scale)
    scale_bits = scale.to(tl.int32, bitcast=True)
    is_too_large = (scale * LEVELS).to(tl.int32, bitcast=True) >= _INFINITE
    scale_bits = tl.where(is_too_large, scale_bits - 1, scale_bits)
    scale_bits = tl.where(largest_bits >= _INFINITE, _NAN, scale_bits)
    scale = scale_bits.to(tl.float32, bitcast=True)
    is_usable = (scale_bits > 0) & (scale_bits < _INFINITE)
    inverse = tl.where(is_usable, tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.where(is_usable, scale, 1.0)), 0.0)
    tl.store(scales + rows, scale, mask=rows * BLOCK < count)
    scaled = values * inverse[:, None]
    if KIND == 2:
        element = scaled.to(wire.dtype.element_ty)
        tl.store(wire + places, element, mask=is_there)
        rounded = element.to(tl.float32)
    else:
        integers = (scaled + _ROUNDER).to(tl.int32, bitcast=True)
        if KIND == 0:
            tl.store(wire + places, (integers & 0xFF).to(tl.uint8), mask=is_there)
            rounded = ((integers << 24) >> 24).to(tl.float32)
        else:
            low, high = tl.split(tl.reshape(integers & 0xF, (ROWS, BLOCK // 2, 2)))
            pairs = rows[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
            tl.store(wire + pairs, (low | (high << 4)).to(tl.uint8), mask=pairs * 2 < count)
            rounded = ((integers << 28) >> 28).to(tl.float32)
    if FLAG:
        _keep_lost(extra, values, rounded * scale[:, None], places, is_there)


@triton.jit
def decode_blocks(
    target,
    extra,
    scales,
    wire,
    count,
    FLAG: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LEVELS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Decode what :func:`encode_blocks` wrote."""
    rows, places = _places(ROWS, BLOCK)
    is_there = places < count
    scale = tl.load(scales + rows, mask=rows * BLOCK < count, other=0.0)
    if KIND == 2:
        element = tl.load(wire + places, mask=is_there, other=0.0).to(tl.float32)
    elif KIND == 0:
        element = ((tl.load(wire + places, mask=is_there, other=0).to(tl.int32) << 24) >> 24).to(tl.float32)
    else:
        byte = tl.load(wire + places // 2, mask=is_there, other=0).to(tl.int32)
        element = ((byte << tl.where(places % 2 == 0, 28, 24).to(tl.int32)) >> 28).to(tl.float32)
    _store(target, element * scale[:, None], places, is_there, FLAG)


@triton.jit
def encode_signs(source, extra, scales, wire, count, FLAG: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Encode signs and mean magnitudes, which are added up in 16 lanes, and these in halves."""
    rows, places = _places(ROWS, BLOCK)
    is_there = places < count
    lanes = rows[:, None] * BLOCK + tl.arange(0, _LANES)[None, :]
    sums = tl.zeros((ROWS, _LANES), tl.float32)
    for step in range(BLOCK // _LANES):
        at = lanes + step * _LANES
        sums += tl.abs(_loaded(source, extra, at, at < count, FLAG)) * (1.0 / _LARGEST_BLOCK)
    total = tl.sum(tl.reshape(sums, (ROWS, 2, 8)), axis=1)
    total = tl.sum(tl.reshape(total, (ROWS, 2, 4)), axis=1)
    total = tl.sum(tl.reshape(total, (ROWS, 2, 2)), axis=1)
    total = tl.sum(total, axis=1)
    counts = tl.minimum(tl.maximum(count - rows * BLOCK, 1), BLOCK).to(tl.float32)
    scale = total * tl.div_rn(tl.full((ROWS,), _LARGEST_BLOCK, tl.float32), counts)
    values = _loaded(source, extra, places, is_there, FLAG)
    is_nan = tl.max(_magnitude_bits(values), axis=1) >= _INFINITE
    scale = tl.minimum(scale, _LARGEST)  # the quotient may be rounded up
    scale = tl.where(is_nan, _NAN, scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    tl.store(scales + rows, scale, mask=rows * BLOCK < count)
    is_positive = (values >= 0) & is_there
    bits = tl.reshape(is_positive.to(tl.int32), (ROWS, BLOCK // 8, 8)) << tl.arange(0, 8)[None, None, :]
    octets = rows[:, None] * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
    tl.store(wire + octets, tl.sum(bits, axis=2).to(tl.uint8), mask=octets * 8 < count)
    if FLAG:
        decoded = tl.where(is_positive, 1.0, -1.0) * scale[:, None]
        _keep_lost(extra, values, decoded, places, is_there)


@triton.jit
def decode_signs(target, extra, scales, wire, count, FLAG: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Decode what :func:`encode_signs` wrote."""
    rows, places = _places(ROWS, BLOCK)
    is_there = places < count
    scale = tl.load(scales + rows, mask=rows * BLOCK < count, other=0.0)
    byte = tl.load(wire + places // 8, mask=is_there, other=0).to(tl.int32)
    decoded = (((byte >> (places % 8).to(tl.int32)) & 1).to(tl.float32) * 2 - 1) * scale[:, None]
    _store(target, decoded, places, is_there, FLAG)


@triton.jit
def encode_cast(source, extra, scales, wire, count, FLAG: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Round elements to 16 bits, and keep what that loses."""
    _, places = _places(ROWS, BLOCK)
    is_there = places < count
    values = _loaded(source, extra, places, is_there, FLAG)
    element = values.to(wire.dtype.element_ty)
    tl.store(wire + places, element, mask=is_there)
    if FLAG:
        _keep_lost(extra, values, element.to(tl.float32), places, is_there)


@triton.jit
def decode_cast(target, extra, scales, wire, count, FLAG: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Widen elements of 16 bits."""
    _, places = _places(ROWS, BLOCK)
    is_there = places < count
    decoded = tl.load(wire + places, mask=is_there, other=0.0).to(tl.float32)
    _store(target, decoded, places, is_there, FLAG)
