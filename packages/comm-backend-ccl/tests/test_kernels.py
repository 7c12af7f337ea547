"""The kernels for other layers give what the documented tree gives, in torch's own arithmetic, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from comm_backend_ccl import native_module
from comm_backend_ccl.tables import IN_SHARED_MEMORY
from comm_utils import ReduceOp, kernels

pytestmark = pytest.mark.skipif(not native_module.has_kernels(), reason="built without native code")

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
    with pytest.raises(RuntimeError, match=f"got {size_bytes} bytes for 1000 elements; expected 1016"):
        kernels.decode_reduce_encode("int8", [wire], source, 1, wire, 256, None)


@pytest.mark.parametrize(
    "other", [torch.zeros(1000, dtype=torch.bfloat16), torch.zeros(2000)[::2], torch.zeros(999), torch.zeros(0)]
)
def test_a_codec_leaves_what_is_not_float32_alone(other: torch.Tensor) -> None:
    source, wire = torch.ones(1000), torch.empty(1016, dtype=torch.uint8)
    assert not kernels.encode("int8", source, wire, 256, other)
    if other.numel() == 1000:
        assert not kernels.encode("int8", other, wire, 256, None)
        assert not kernels.decode("int8", wire, other, 256, False)
        assert not kernels.decode_reduce_encode("int8", [wire], other, 1, wire.clone(), 256, None)
    assert not kernels.decode_reduce_encode("int8", [wire], source, 1, wire.clone(), 256, other)
    assert not kernels.encode("int8", source, wire.view(torch.int8), 256, None)
    assert not kernels.decode_reduce_encode("int8", [wire.view(torch.int8)], source, 1, wire, 256, None)
    assert not kernels.decode_reduce_encode("int8", [wire[:-1]], source, 1, wire, 256, None)


@pytest.mark.parametrize("which", ["source", "error", "wire"])
def test_a_codec_leaves_what_a_flag_negates_alone(which: str) -> None:
    passed = {"source": torch.ones(1000), "error": torch.zeros(1000), "wire": torch.zeros(1016, dtype=torch.uint8)}
    before = passed[which].clone()
    passed[which] = torch._neg_view(passed[which])
    source, error, wire = passed["source"], passed["error"], passed["wire"]
    assert not kernels.encode("int8", source, wire, 256, error)
    assert not kernels.decode_reduce_encode("int8", [], source, 1, wire, 256, error)
    if which != "error":
        assert not kernels.decode("int8", wire, source, 256, False)
    assert torch.equal(torch._neg_view(passed[which]), before)


def test_nothing_is_reduced_and_encoded_as_well() -> None:
    assert kernels.reduce(torch.empty(0), [torch.empty(0)] * 3, ReduceOp.SUM)
    empty, wire = torch.empty(0), torch.empty(0, dtype=torch.uint8)
    assert kernels.encode("int8", empty, wire, 256, torch.empty(0))
    assert kernels.decode("int8", wire, empty, 256, True)
    assert not kernels.encode("int8", torch.empty(0, dtype=torch.float64), wire, 256, None)
