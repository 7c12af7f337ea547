"""Folding is a balanced tree on every rank, leaves the parts alone, and rounds 16-bit floats once."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_collectives.reduction import fold
from comm_utils import ReduceOp
from comm_utils.torch_support.folding import fold_compensated

IN_PYTHON = {
    ReduceOp.SUM: lambda a, b: a + b,
    ReduceOp.PRODUCT: lambda a, b: a * b,
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
    ReduceOp.BAND: lambda a, b: a & b,
    ReduceOp.BOR: lambda a, b: a | b,
    ReduceOp.BXOR: lambda a, b: a ^ b,
}
ON_FLOATS = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]


def as_a_tree(op: ReduceOp, rows: list[list[float]]) -> list[float]:
    if len(rows) == 1:
        return rows[0]
    left = 2 ** ((len(rows) - 1).bit_length() - 1)
    pairs = zip(as_a_tree(op, rows[:left]), as_a_tree(op, rows[left:]), strict=True)
    return [IN_PYTHON[op](a, b) for a, b in pairs]


@settings(deadline=None)
@given(
    st.sampled_from(ON_FLOATS),
    st.integers(0, 5).flatmap(
        lambda n: st.lists(st.lists(st.floats(-1e30, 1e30), min_size=n, max_size=n), min_size=1, max_size=6)
    ),
)
def test_float64_as_a_tree_bit_for_bit(op: ReduceOp, rows: list[list[float]]) -> None:
    parts = torch.tensor(rows, dtype=torch.float64)
    before = parts.clone()
    out = torch.full((parts.shape[1],), 7.0, dtype=torch.float64)
    fold(parts, op, out)
    # Python's floats are float64, and a sum of them in another order would differ in the last bits.
    assert out.tolist() == as_a_tree(op, rows)
    assert torch.equal(parts, before)


@settings(deadline=None)
@given(
    st.sampled_from(sorted(IN_PYTHON, key=lambda op: op.value)),
    st.sampled_from([torch.int8, torch.uint8, torch.int32, torch.int64]),
    st.integers(1, 6),
    st.integers(0, 9),
    st.integers(0, 1000),
)
def test_integers_wrap_around(op: ReduceOp, dtype: torch.dtype, W: int, n: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    memory = torch.randint(256, (W * n * dtype.itemsize,), dtype=torch.uint8, generator=random)
    parts = memory.view(dtype).view(W, n)
    before = parts.clone()
    out = torch.empty(n, dtype=dtype)
    fold(parts, op, out)
    modulus = 2 ** (8 * dtype.itemsize)
    assert [value % modulus for value in out.tolist()] == [value % modulus for value in as_a_tree(op, parts.tolist())]
    assert torch.equal(parts, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_rounded_once(dtype: torch.dtype) -> None:
    # 1 + eps/2 rounds back to 1 at every step; the sum of four such halves of an eps does not.
    eps = torch.finfo(dtype).eps
    parts = torch.tensor([[1.0], [eps / 2], [eps / 2], [eps / 2], [eps / 2]]).to(dtype)
    out = torch.empty(1, dtype=dtype)
    fold(parts, ReduceOp.SUM, out)
    assert out.item() == 1 + 2 * eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("op", ON_FLOATS)
def test_one_part_is_the_result(op: ReduceOp, dtype: torch.dtype) -> None:
    parts = torch.tensor([[1.5, -2.0, 0.0]]).to(dtype)
    out = torch.empty(3, dtype=dtype)
    fold(parts, op, out)
    assert torch.equal(out, parts[0])
    out.add_(1)
    assert parts.tolist() == [[1.5, -2.0, 0.0]]


def test_the_result_may_have_another_dtype_than_the_parts() -> None:
    out = torch.empty(2, dtype=torch.uint8)
    fold(torch.tensor([[200, 1], [100, 2]], dtype=torch.int32), ReduceOp.SUM, out)
    assert out.tolist() == [300 % 256, 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_averages_are_divided_before_they_are_rounded(dtype: torch.dtype) -> None:
    # In 16 bits, the sum of these would already have lost the 1s, or be out of range.
    most = torch.finfo(torch.float16).max
    parts = torch.tensor([[most, 1.0], [most, 2048.0], [most, 1.0]]).to(dtype)
    out = torch.empty(2, dtype=dtype)
    fold(parts, ReduceOp.AVG, out)
    assert torch.equal(out, parts.double().mean(0).to(dtype))


@settings(deadline=None)
@given(
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 60),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_compensated_sums_keep_the_bound_of_their_source(
    W: int, dtype: torch.dtype, spread: int, seed: int, average: bool
) -> None:
    random = torch.Generator().manual_seed(seed)
    parts = torch.randn(W, 20, generator=random, dtype=torch.float64)
    parts *= 2.0 ** torch.randint(-spread, spread + 1, parts.shape, generator=random)
    parts[-1] -= parts[:-1].sum(0) * (seed % 2)  # of which nearly nothing is left
    parts = parts.to(dtype)
    before, out = parts.clone(), torch.empty(20, dtype=dtype)
    fold_compensated(parts, ReduceOp.AVG if average else ReduceOp.SUM, out)
    assert torch.equal(parts, before)
    unit = Fraction(torch.finfo(dtype).eps) / 2
    gamma = (W - 1) * unit / (1 - (W - 1) * unit)
    for column, found in zip(parts.T.tolist(), out.tolist(), strict=True):
        exact = sum(map(Fraction, column))
        bound = unit * abs(exact) + gamma**2 * sum(abs(Fraction(one)) for one in column)
        if average:  # which is rounded once more
            exact, bound = exact / W, bound / W * (1 + unit) + unit * abs(exact) / W
        assert abs(Fraction(found) - exact) <= bound


def test_compensation_finds_what_additions_lose() -> None:
    parts = torch.tensor([[1e8], [0.3], [-1e8]])
    plain, compensated = torch.empty(1), torch.empty(1)
    fold(parts, ReduceOp.SUM, plain)
    fold_compensated(parts, ReduceOp.SUM, compensated)
    assert (plain.item(), compensated.item()) == (0.0, pytest.approx(0.3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_compensation_leaves_what_is_not_finite(dtype: torch.dtype) -> None:
    inf, nan, most = float("inf"), float("nan"), torch.finfo(torch.float32).max
    columns = [[inf, 1, 2], [1, -inf, 2], [inf, -inf, 1], [nan, 1, 2], [most, most, -most], [1, 2, inf]]
    parts = torch.tensor(columns, dtype=torch.float32).T.contiguous().to(dtype)
    out = torch.empty(len(columns), dtype=dtype)
    fold_compensated(parts, ReduceOp.SUM, out)
    expected = parts[0].float() + parts[1].float() + parts[2].float()
    torch.testing.assert_close(out, expected.to(dtype), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("op", [ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX])
def test_other_ops_need_no_compensation(op: ReduceOp) -> None:
    parts = torch.randn(5, 100, generator=torch.Generator().manual_seed(1))
    plain, compensated = torch.empty(100), torch.empty(100)
    fold(parts, op, plain)
    fold_compensated(parts, op, compensated)
    assert torch.equal(plain, compensated)
