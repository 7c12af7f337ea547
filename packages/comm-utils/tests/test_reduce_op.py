"""Every spelling of a reduction leads to its member, and nothing else does.

torch's own spellings are in the tests of comm-backend-torch.
"""

from __future__ import annotations

import copy
import pickle
from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_utils import ArgumentError, ArgumentTypeError, ReduceOp, parse_reduce_op

NAMES = ("sum", "product", "min", "max", "band", "bor", "bxor", "avg")
USABLE = [ReduceOp[name.upper()] for name in NAMES]


class RedOpType(Enum):
    """Stands in for torch's enumerators, which are told by the name and the module of their class."""

    SUM = 10
    PREMUL_SUM = 11


RedOpType.__module__ = "torch._C._distributed_c10d"


def test_values_are_those_of_deepspeed() -> None:
    assert {op.name: op.value for op in ReduceOp} == {
        "SUM": 0,
        "PRODUCT": 1,
        "MIN": 2,
        "MAX": 3,
        "BAND": 4,
        "BOR": 5,
        "BXOR": 6,
        "AVG": 7,
        "UNUSED": 8,
    }


@pytest.mark.parametrize("op", USABLE)
def test_members_are_themselves(op: ReduceOp) -> None:
    assert parse_reduce_op(op) is op
    for again in (pickle.loads(pickle.dumps(op)), copy.deepcopy(op), ReduceOp(op.value)):
        assert again is op
        assert {op: "found"}[again] == "found"


@given(st.sampled_from(NAMES), st.lists(st.booleans(), min_size=7, max_size=7))
def test_names_in_any_case(name: str, upper: list[bool]) -> None:
    mixed = "".join(letter.upper() if up else letter for letter, up in zip(name, upper, strict=False))
    assert parse_reduce_op(mixed) is ReduceOp[name.upper()]


def test_enumerators_of_torch_by_their_names() -> None:
    assert parse_reduce_op(RedOpType.SUM) is ReduceOp.SUM


@given(st.text(max_size=12).filter(lambda text: text.lower() not in NAMES))
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        parse_reduce_op(name, "all_reduce")
    message = str(refused.value)
    assert message.startswith("all_reduce: op: got ")
    assert all(repr(known) in message for known in NAMES)


@pytest.mark.parametrize(
    ("typed", "meant"), [("summ", "sum"), ("prod", "product"), ("avrg", "avg"), ("MAXX", "max"), ("bxorr", "bxor")]
)
def test_a_near_miss_gets_a_suggestion(typed: str, meant: str) -> None:
    with pytest.raises(ArgumentError, match=f"did you mean '{meant}'"):
        parse_reduce_op(typed)


def test_a_scaled_sum_names_what_to_do_instead() -> None:
    with pytest.raises(ArgumentError, match=r"multiply the tensor by the factor before the call, with op='sum'$"):
        parse_reduce_op(RedOpType.PREMUL_SUM)
    with pytest.raises(ArgumentError) as caught:
        parse_reduce_op("nonsense")
    assert "multiply" not in str(caught.value)


@pytest.mark.parametrize("op", [ReduceOp.UNUSED, RedOpType.PREMUL_SUM], ids=str)
def test_operations_that_are_not_served(op: object) -> None:
    with pytest.raises(ArgumentError, match="expected one of 'sum'") as refused:
        parse_reduce_op(op)
    assert not isinstance(refused.value, TypeError)
    assert str(refused.value).startswith(f"op: got ReduceOp.{op.name}; ")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "op",
    [None, 0, 1.5, b"sum", ["sum"], object(), ReduceOp, RedOpType],
    ids=lambda op: str(op) if type(op) is not object else "object",
)
def test_other_kinds_are_refused_by_type(op: object) -> None:
    with pytest.raises(ArgumentTypeError, match=r"reduce: op: got .* of type \w+; expected a ReduceOp"):
        parse_reduce_op(op, "reduce")
