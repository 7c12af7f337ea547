"""A misspelt argument is named, with the one that was meant; errors from within a function are left alone."""

from __future__ import annotations

from typing import Any

import pytest

import comm_collectives
from comm_collectives import broadcast
from comm_collectives.keyword_errors import explain_call, with_keyword_errors
from comm_utils.errors import ArgumentError, ArgumentTypeError


def reduce_some(tensor: object, op: str = "sum", group: object = None, *, timeout: float | None = None) -> str:
    if tensor == "within":
        return len(3)  # type: ignore[arg-type, return-value]
    return f"{tensor} {op} {group} {timeout}"


checked: Any = with_keyword_errors(reduce_some)


def test_right_calls_are_passed_on() -> None:
    assert checked(1, "max", timeout=2.0) == "1 max None 2.0"
    assert checked.__name__ == "reduce_some"
    assert explain_call(reduce_some, (1,), {"op": "max"}) is None


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((1,), {"gruop": 2}, "reduce_some: gruop: got an argument of this name, which does not exist; did you mean"),
        ((1,), {"time_out": 2}, "did you mean 'timeout'?"),
        ((1,), {"Op": "max"}, "did you mean 'op'?"),
        ((1,), {"colour": 2}, "expected one of: tensor, op, group, timeout"),
        ((1, "max"), {"op_": 2}, "expected one of: tensor, op, group, timeout"),  # op is given already
        ((), {}, "missing a required argument: 'tensor'; expected reduce_some(tensor, op='sum', group=None, *, "),
        ((1, 2, 3, 4), {}, "too many positional arguments; expected reduce_some(tensor"),
        ((1,), {"tensor": 2}, "multiple values for argument 'tensor'"),
    ],
)  # fmt: skip
def test_wrong_calls_are_explained(args: tuple[object, ...], kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        checked(*args, **kwargs)
    assert message in str(caught.value)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ArgumentError)


def test_type_errors_from_within_are_left_alone() -> None:
    with pytest.raises(TypeError, match="has no len") as caught:
        checked("within")
    assert not isinstance(caught.value, ArgumentTypeError)


def test_the_real_signature_counts() -> None:
    found = explain_call(broadcast, (), {"tensor": 1, "scr": 0})
    assert found is not None
    assert str(found) == "broadcast: scr: got an argument of this name, which does not exist; did you mean 'src'?"


@pytest.mark.parametrize(
    ("function", "wrong", "meant"),
    [
        (comm_collectives.new_group, "rank", "ranks"),
        (comm_collectives.split_group, "split_rank", "split_ranks"),
        (comm_collectives.new_subgroups, "groupsize", "group_size"),
        (comm_collectives.empty_shared, "dtyp", "dtype"),
    ],
)
def test_misspelt_arguments_of_what_makes_groups_and_memory(function: Any, wrong: str, meant: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"{function.__name__}: {wrong}: .*did you mean '{meant}'"):
        function(**{wrong: None})
