"""The kernels for other layers give what the documented tree gives, in torch's own arithmetic, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from comm_backend_ccl import shared_memory
from comm_backend_ccl.tables import IN_SHARED_MEMORY
from comm_utils import ReduceOp, kernels

pytestmark = pytest.mark.skipif(not shared_memory.has_kernels(), reason="built without native code")

STEPS: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
PAIRS = sorted(IN_SHARED_MEMORY.reductions, key=lambda pair: (pair[0].name, str(pair[1])))


def tree(step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    left = 2 ** ((len(parts) - 1).bit_length() - 1)
    return step(tree(step, parts[:left]), tree(step, parts[left:]))


def some(dtype: torch.dtype, n: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(n, generator=random, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, (n,), generator=random).to(dtype)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
@pytest.mark.parametrize(("op", "dtype"), PAIRS, ids=lambda value: getattr(value, "name", str(value)))
def test_to_the_bit(op: ReduceOp, dtype: torch.dtype, count: int) -> None:
    parts = [some(dtype, 1003, seed) for seed in range(count)]
    wide = [part.float() if dtype in (torch.float16, torch.bfloat16) else part for part in parts]
    expected = tree(STEPS[op], wide)
    expected = (expected / count if op is ReduceOp.AVG else expected).to(dtype)
    out = torch.empty(1003, dtype=dtype)
    assert kernels.reduce(out, parts, op)
    assert torch.equal(out, expected)


def test_into_an_input() -> None:
    parts = [torch.arange(5.0), torch.ones(5), torch.ones(5)]
    assert kernels.reduce(parts[0], parts, ReduceOp.SUM)
    assert parts[0].tolist() == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "inputs",
    [
        [],
        [torch.ones(3)] * 65,
        [torch.ones(3), torch.ones(4)],
        [torch.ones(3), torch.ones(3, dtype=torch.float64)],
        [torch.ones(3), torch.ones(6)[::2]],
        [torch.ones(3), torch.ones(3, device="meta")],
        [torch.ones(3), torch._neg_view(torch.ones(3))],
        [torch.ones(3), torch.nn.Parameter(torch.ones(3))],
    ],
    ids=["nothing", "too many", "sizes", "dtypes", "strided", "elsewhere", "negated", "a subclass"],
)
def test_what_it_does_not_do_is_left_alone(inputs: list[torch.Tensor]) -> None:
    out = torch.full((3,), 7.0)
    assert not kernels.reduce(out, inputs, ReduceOp.SUM)
    assert out.tolist() == [7, 7, 7]


def test_an_output_that_overlaps_an_input_is_left_alone() -> None:
    memory = torch.arange(10.0)
    assert not kernels.reduce(memory[1:5], [memory[0:4], torch.ones(4)], ReduceOp.SUM)
    assert memory.tolist() == list(range(10))


def test_an_average_of_integers_is_none() -> None:
    assert not kernels.reduce(torch.ones(2, dtype=torch.int32), [torch.ones(2, dtype=torch.int32)], ReduceOp.AVG)


@pytest.mark.parametrize("size_bytes", [0, 4, 1003, 1005, 4000])
def test_a_codec_refuses_a_wire_of_another_size(size_bytes: int) -> None:
    source, wire = torch.ones(1000), torch.empty(4100, dtype=torch.uint8)[:size_bytes]
    assert kernels.encode("int8", source, torch.empty(1016, dtype=torch.uint8), 256, None)
    with pytest.raises(RuntimeError, match=f"got {size_bytes} bytes for 1000 elements; expected 1016"):
        kernels.encode("int8", source, wire, 256, None)
    with pytest.raises(RuntimeError, match=f"got {size_bytes} bytes for 1000 elements; expected 1016"):
        kernels.decode("int8", wire, source, 256, False)


@pytest.mark.parametrize(
    "other", [torch.zeros(1000, dtype=torch.bfloat16), torch.zeros(2000)[::2], torch.zeros(999), torch.zeros(0)]
)
def test_a_codec_leaves_what_is_not_float32_alone(other: torch.Tensor) -> None:
    source, wire = torch.ones(1000), torch.empty(1016, dtype=torch.uint8)
    assert not kernels.encode("int8", source, wire, 256, other)
    if other.numel() == 1000:
        assert not kernels.encode("int8", other, wire, 256, None)
        assert not kernels.decode("int8", wire, other, 256, False)
    assert not kernels.encode("int8", source, wire.view(torch.int8), 256, None)


#: Of an older torch, native code can ask nothing without Python, and takes no tensor for plain.
needs_layout = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no DLPack exchange for native code"
)


@needs_layout
def test_plain_tensors_are_moved_to_one_of_each_dtype_and_back() -> None:
    floats, halves = [torch.arange(3.0), torch.ones(2, 2)], [torch.ones(5, dtype=torch.bfloat16)]
    tensors = [floats[0], *halves, floats[1]]
    assert kernels.plain_layout(tensors) == {torch.float32: (2, 28), torch.bfloat16: (1, 10)}
    buckets = [torch.zeros(7), torch.zeros(5, dtype=torch.bfloat16)]
    assert kernels.move_plain(tensors, buckets, True)
    assert [one.tolist() for one in buckets] == [[0, 1, 2, 1, 1, 1, 1], [1] * 5]
    for one in buckets:
        one *= 2
    assert kernels.move_plain(tensors, buckets[:1], False)
    assert floats[0].tolist() == [0, 2, 4]
    assert torch.equal(floats[1], torch.full((2, 2), 2.0))
    assert torch.equal(halves[0], torch.ones(5, dtype=torch.bfloat16))
    assert kernels.move_plain(tensors, buckets, False)
    assert torch.equal(halves[0], torch.full((5,), 2, dtype=torch.bfloat16))


def _freed() -> torch.Tensor:
    made = torch.ones(2)
    made.untyped_storage().resize_(0)
    return made


@pytest.mark.parametrize(
    "odd",
    [
        torch.ones(0),
        torch.ones(4)[::2],
        torch.ones(2, dtype=torch.complex64),
        torch.view_as_real(torch.ones(2, dtype=torch.complex64).conj().resolve_conj()).transpose(0, 1),
        torch.imag(torch.ones(2, dtype=torch.complex64).conj()),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, device="meta"),
        _freed(),
        "no tensor",
    ],
    ids=range(9),
)
def test_what_is_not_plain_has_no_layout_and_is_not_moved(odd: Any) -> None:
    joined = torch.full((4,), 7.0)
    assert kernels.plain_layout([torch.ones(2), odd]) is None
    assert not kernels.move_plain([torch.ones(2), torch.ones(2), odd], [joined], True)
    assert joined.tolist() == [7] * 4


@needs_layout
def test_tensors_that_share_memory_have_no_layout() -> None:
    whole = torch.ones(8)
    assert kernels.plain_layout([whole[:4], torch.ones(3), whole[3:]]) is None
    assert kernels.plain_layout([whole, whole]) is None
    assert kernels.plain_layout([whole[:4], whole[4:]]) == {torch.float32: (2, 32)}


def test_nothing_is_moved_that_does_not_fit() -> None:
    joined = torch.full((4,), 7.0)
    for sizes in ((2, 3), (2, 1), (3, 3, 3), ()):
        assert not kernels.move_plain([torch.ones(size) for size in sizes], [joined], True)
    assert joined.tolist() == [7] * 4
    assert not kernels.move_plain([torch.ones(2), torch.ones(2)], [torch.zeros(8)[::2]], True)
