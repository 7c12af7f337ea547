"""torch's own spellings of a reduction, and what c10d gets for every spelling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as c10d

from comm_backend_torch.capabilities import capabilities_of
from comm_utils import ArgumentError, ArgumentTypeError, ReduceOp, parse_reduce_op
from comm_utils.torch_support.c10d_ops import C10D_OPS

USABLE = [op for op in ReduceOp if op is not ReduceOp.UNUSED]
by_op = pytest.mark.parametrize("op", USABLE, ids=lambda op: op.name)


def spellings(op: ReduceOp) -> list[Any]:
    enumerator = getattr(c10d.ReduceOp, op.name)
    return [op, op.name, op.name.lower(), op.name.title(), enumerator, c10d.ReduceOp(enumerator)]


@by_op
def test_torchs_enumerators_and_wrapped_ones(op: ReduceOp) -> None:
    for spelling in spellings(op):
        assert parse_reduce_op(spelling) is op


def test_every_operation_of_ours_is_one_of_torchs() -> None:
    assert set(C10D_OPS) == set(USABLE)
    assert all(parse_reduce_op(torch_op) is op for op, torch_op in C10D_OPS.items())


def test_scaled_sums_are_refused() -> None:
    for op in (c10d.ReduceOp.PREMUL_SUM, torch.distributed._make_nccl_premul_sum(2.0)):
        got = r"all_reduce: op: got ReduceOp\.PREMUL_SUM; expected one of 'sum'"
        with pytest.raises(ArgumentError, match=got) as refused:
            parse_reduce_op(op, "all_reduce")
        assert not isinstance(refused.value, TypeError)


@pytest.mark.parametrize(
    "op",
    [torch.float32, torch.device("cpu"), c10d.ReduceOp, torch.ones(2), torch.nn.Identity(), torch],
    ids=lambda op: type(op).__name__,
)
def test_other_things_of_torch_are_refused_by_type(op: object) -> None:
    with pytest.raises(ArgumentTypeError, match=r"(?s)all_reduce: op: got .* of type \w+; expected a ReduceOp"):
        parse_reduce_op(op, "all_reduce")


@pytest.mark.parametrize("library", ["gloo", "nccl", "xccl", "fake", "something else"])
def test_capabilities_promise_nothing_that_has_no_meaning(library: str) -> None:
    found = capabilities_of(library)
    for op, dtype in found.reductions:
        assert op in C10D_OPS
        assert dtype in found.dtypes
        assert not (op is ReduceOp.AVG and not dtype.is_floating_point)
        assert not (op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR) and dtype.is_floating_point)
        assert dtype != torch.bool
    assert torch.uint8 in found.dtypes, "all other dtypes travel as bytes"
