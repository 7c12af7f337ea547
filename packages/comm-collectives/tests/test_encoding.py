"""Whatever a backend lacks, what travels and what is read back make up the reduction that was asked for.

W ranks are simulated in this process: each encodes its elements, a library that reduces exactly what its capabilities
say does so (or the ranks fold what they exchanged), each decodes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_collectives.reduction import encoding_for, fold
from comm_utils import ArgumentError, Capabilities, ReduceOp

# torch says it once in a process, in whichever test that is.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

OPS = [op for op in ReduceOp if op is not ReduceOp.UNUSED]
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
ARITHMETIC = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32, torch.float64)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
REDUCIBLE = (*FLOATS, *SIGNED, *UNSIGNED, *COMPLEX, torch.bool)
MOVED_ONLY = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)


def capabilities(*blocks: tuple[Iterable[ReduceOp], Iterable[torch.dtype]]) -> Capabilities:
    pairs = frozenset(pair for ops, dtypes in blocks for pair in product(ops, dtypes))
    return Capabilities(pairs, frozenset({torch.uint8}), frozenset())


LIKE_GLOO = capabilities(
    (ARITHMETIC, (*FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64)),
    (BITWISE, (torch.int8, torch.uint8, torch.int32, torch.int64)),
)
LIKE_NCCL = capabilities(
    (ARITHMETIC, (*FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64)),
    ((ReduceOp.AVG,), (torch.float32, torch.float64)),
)
NOTHING = capabilities()
WIDE_ONLY = capabilities((ARITHMETIC, (torch.float32, torch.float64, torch.int32, torch.int64)))
SUMS_OF_FLOAT32 = capabilities(((ReduceOp.SUM,), (torch.float32,)))
# What the simulated library below can do: torch has no arithmetic for the wide unsigned integers.
NATIVE_SUM = (*FLOATS, *SIGNED, torch.uint8, torch.bool, torch.complex64, torch.complex128)
NATIVE_PAIRS = sorted(
    {
        *product(ARITHMETIC, (*FLOATS, *SIGNED, torch.uint8)),
        *product(BITWISE, (*SIGNED, torch.uint8, torch.bool)),
        *product((ReduceOp.SUM,), NATIVE_SUM),
        *product((ReduceOp.AVG,), FLOATS),
    },
    key=str,
)
some_capabilities = st.sets(st.sampled_from(NATIVE_PAIRS)).map(
    lambda pairs: Capabilities(frozenset(pairs), frozenset({torch.uint8}), frozenset())
)
any_capabilities = st.one_of(
    st.sampled_from([LIKE_GLOO, LIKE_NCCL, NOTHING, WIDE_ONLY, SUMS_OF_FLOAT32]), some_capabilities
)


def test_an_op_that_no_table_has_is_refused() -> None:
    for dtype in (*REDUCIBLE, *MOVED_ONLY):
        with pytest.raises(ArgumentError):
            encoding_for("all_reduce", ReduceOp.UNUSED, dtype, NOTHING)


def is_defined(op: ReduceOp, dtype: torch.dtype) -> bool:
    if dtype in COMPLEX:
        return op in (ReduceOp.SUM, ReduceOp.AVG)
    if dtype in FLOATS:
        return op not in BITWISE
    return op is not ReduceOp.AVG and dtype not in MOVED_ONLY


# --- values and the reference


def elements(dtype: torch.dtype, op: ReduceOp, n: int, seed: int) -> torch.Tensor:
    """Any integers; floats whose sums and products of up to 5 are exact in their dtype, halves' averages in float32."""
    random = torch.Generator().manual_seed(seed)
    if dtype in COMPLEX:
        real = torch.view_as_real(torch.empty(0, dtype=dtype)).dtype
        return torch.view_as_complex(elements(real, op, 2 * n, seed).view(n, 2))
    if dtype == torch.bool:
        return torch.randint(2, (n,), generator=random) == 1
    if dtype not in FLOATS:
        return torch.randint(256, (n * dtype.itemsize,), dtype=torch.uint8, generator=random).view(dtype)
    if op is ReduceOp.PRODUCT:
        return torch.randint(-2, 3, (n,), generator=random).to(dtype)
    if op is ReduceOp.AVG and dtype in HALF:
        largest = 2048 if dtype == torch.float16 else 256
        return torch.randint(1 - largest, largest, (n,), generator=random).to(dtype)
    return (torch.randint(-40, 41, (n,), generator=random).double() / 4).to(dtype)


_PYTHON: dict[ReduceOp, Callable[[Any, Any], Any]] = {
    ReduceOp.SUM: operator.add,
    ReduceOp.AVG: operator.add,
    ReduceOp.PRODUCT: operator.mul,
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
}


def reference(op: ReduceOp, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """The reduction in Python's own numbers: integers modulo their size, floats without rounding but the last."""
    dtype, W = inputs[0].dtype, len(inputs)
    if dtype in COMPLEX:
        return reference(op, [torch.view_as_real(tensor).view(-1) for tensor in inputs])
    columns = [reduce(_PYTHON[op], column) for column in zip(*(plain(tensor) for tensor in inputs), strict=True)]
    if dtype == torch.bool:
        return [bool(value) for value in columns]
    if dtype not in FLOATS:
        return [value % 2 ** (8 * dtype.itemsize) for value in columns]
    if op is ReduceOp.AVG:
        # In float32 for halves, in the dtype for the others; then rounded to the dtype.
        return plain((torch.tensor(columns, dtype=torch.float32 if dtype in HALF else dtype) / W).to(dtype))
    return plain(torch.tensor(columns, dtype=torch.float64).to(dtype))


def plain(tensor: torch.Tensor) -> list[Any]:
    """Elements as Python's numbers, which have no size of their own; two for a complex one."""
    if tensor.dtype in COMPLEX:
        return plain(torch.view_as_real(tensor).view(-1))
    return tensor.double().tolist() if tensor.dtype in FLOATS else tensor.tolist()


def unsigned(tensor: torch.Tensor) -> list[Any]:
    if tensor.dtype in SIGNED or tensor.dtype in UNSIGNED:
        return [value % 2 ** (8 * tensor.dtype.itemsize) for value in tensor.tolist()]
    return plain(tensor)


# --- the simulation


_LIBRARY: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def reduce_by_library(wires: list[torch.Tensor], op: ReduceOp, able: Capabilities) -> None:
    """In place, from the last rank downwards: no result may depend on the order."""
    dtype = wires[0].dtype
    assert (op, dtype) in able.reductions, f"the library cannot do {op} of {dtype}"
    wide = [wire.float() if op is ReduceOp.AVG and dtype in HALF else wire for wire in reversed(wires)]
    total = reduce(_LIBRARY[op], wide)
    if op is ReduceOp.AVG:
        total = total / len(wires)
    for wire in wires:
        wire.copy_(total)


def simulate(
    op: ReduceOp, dtype: torch.dtype, able: Capabilities, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    W = len(inputs)
    encoding = encoding_for("all_reduce", op, dtype, able)
    results = [tensor.clone() for tensor in inputs]
    wires = [encoding.encode(tensor) for tensor in results]
    for wire, result, tensor in zip(wires, results, inputs, strict=True):
        assert wire.dim() == 1
        assert same(result, tensor), "encoding wrote"
        shared = wire.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
        assert shared == encoding.shares or not wire.numel()
    if encoding.native:
        reduce_by_library(wires, encoding.op, able)
    else:
        parts = torch.stack(wires)
        for wire in wires:
            fold(parts, encoding.op, wire)
    if encoding.decode is not None:
        for wire, result in zip(wires, results, strict=True):
            encoding.decode(wire, result, W)
    return results


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def check(op: ReduceOp, dtype: torch.dtype, able: Capabilities, W: int, n: int, seed: int) -> None:
    inputs = [elements(dtype, op, n, 1000 * seed + rank) for rank in range(W)]
    results = simulate(op, dtype, able, inputs)
    for result in results:
        assert result.dtype == dtype
        assert unsigned(result) == reference(op, inputs), f"{op} of {dtype} over {able.reductions}"
        if dtype == torch.bool:
            assert set(result.view(torch.uint8).tolist()) <= {0, 1}


DEFINED = [(op, dtype) for op, dtype in product(OPS, REDUCIBLE) if is_defined(op, dtype)]
REFUSED = [(op, dtype) for op, dtype in product(OPS, (*REDUCIBLE, *MOVED_ONLY)) if not is_defined(op, dtype)]


@pytest.mark.parametrize(
    "able",
    [LIKE_GLOO, LIKE_NCCL, NOTHING, WIDE_ONLY, SUMS_OF_FLOAT32],
    ids=["gloo", "nccl", "nothing", "wide", "float32"],
)
@pytest.mark.parametrize(("op", "dtype"), DEFINED, ids=str)
def test_on_libraries_like_those_there_are(op: ReduceOp, dtype: torch.dtype, able: Capabilities) -> None:
    for W in (1, 2, 3, 5):
        check(op, dtype, able, W, n=33, seed=W)
    check(op, dtype, able, W=2, n=0, seed=0)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(DEFINED), any_capabilities, st.integers(1, 5), st.integers(0, 9), st.integers(0, 1000))
def test_on_any_library(pair: tuple[ReduceOp, torch.dtype], able: Capabilities, W: int, n: int, seed: int) -> None:
    check(*pair, able, W, n, seed)


@pytest.mark.parametrize(("op", "dtype"), DEFINED, ids=str)
def test_what_a_library_does_itself_travels_as_it_is(op: ReduceOp, dtype: torch.dtype) -> None:
    encoding = encoding_for("reduce", op, dtype, capabilities(([op], [dtype])))
    assert (encoding.op, encoding.native, encoding.shares, encoding.decode) == (op, True, True, None)
    tensor = torch.zeros(3, dtype=dtype)
    assert encoding.encode(tensor) is tensor


@pytest.mark.parametrize(("op", "dtype"), DEFINED, ids=str)
def test_every_rank_chooses_the_same(op: ReduceOp, dtype: torch.dtype) -> None:
    first = encoding_for("all_reduce", op, dtype, LIKE_GLOO)
    assert encoding_for("reduce_scatter", op, dtype, LIKE_GLOO) is first
    assert encoding_for("all_reduce", op, dtype, LIKE_NCCL).op in OPS


@pytest.mark.parametrize(("op", "dtype"), REFUSED, ids=str)
@pytest.mark.parametrize("able", [LIKE_GLOO, NOTHING], ids=["gloo", "nothing"])
def test_refusals_name_the_call_the_dtype_and_the_remedy(op: ReduceOp, dtype: torch.dtype, able: Capabilities) -> None:
    with pytest.raises(ArgumentError) as refused:
        encoding_for("all_reduce", op, dtype, able)
    message = str(refused.value)
    assert message.startswith("all_reduce: ")
    assert str(dtype) in message
    if dtype in MOVED_ONLY:
        assert "convert to torch.bfloat16 or torch.float32" in message
    else:
        assert f"op {op.name.lower()!r} is not defined for" in message
        assert any(remedy in message for remedy in ("'sum'", "needs an integer or bool tensor"))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("able", [LIKE_GLOO, LIKE_NCCL, NOTHING], ids=["gloo", "nccl", "nothing"])
def test_halves_are_averaged_in_float32(dtype: torch.dtype, able: Capabilities) -> None:
    """Added in 16 bits, the small ones would be lost beside the large one, and 65504 + 65504 would be infinite."""
    W = 4
    largest = torch.finfo(torch.float16).max if dtype == torch.float16 else 2.0**127
    for values in ([256.0, 1.0, 1.0, 1.0], [2048.0, 1.5, 1.5, 1.5]):
        (result, *_) = simulate(ReduceOp.AVG, dtype, able, [torch.tensor([value]).to(dtype) for value in values])
        assert result.item() == torch.tensor(sum(values) / W).to(dtype).item()
    if dtype == torch.float16:
        (result, *_) = simulate(ReduceOp.AVG, dtype, able, [torch.full((2,), largest, dtype=dtype)] * W)
        assert result.tolist() == [largest] * 2


def test_large_unsigned_integers_are_compared_as_unsigned() -> None:
    inputs = [
        torch.tensor([2**64 - 1, 0, 2**63], dtype=torch.uint64),
        torch.tensor([1, 2**63 - 1, 5], dtype=torch.uint64),
    ]
    for able in (LIKE_GLOO, NOTHING):
        (smallest, *_) = simulate(ReduceOp.MIN, torch.uint64, able, inputs)
        (largest, *_) = simulate(ReduceOp.MAX, torch.uint64, able, inputs)
        assert smallest.tolist() == [1, 0, 5]
        assert largest.tolist() == [2**64 - 1, 2**63 - 1, 2**63]
