"""What one rank's own arguments show to be wrong is named: the call, the argument, what was given, what was expected.

The backend here is a stand-in with the few queries that these checks make; nothing is sent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import GroupMember, ProcessGroup

from comm_collectives import arguments
from comm_collectives.arguments import (
    as_timedelta,
    check_dtype,
    check_list,
    check_numel,
    check_tensor,
    enter,
    group_rank_of,
    integer,
    is_member,
    splits,
)
from comm_utils import (
    ArgumentError,
    ArgumentTypeError,
    BrokenGroupError,
    NotInitializedError,
    activate,
    deactivate,
)


class StandIn:
    """Rank 1 of a group of the global ranks 4, 2 and 7, for CPU tensors."""

    ranks = (4, 2, 7)

    def __init__(self, problem: Exception | None = None) -> None:
        self.problem = problem

    def check_group(self, group: Any = None) -> None:
        if self.problem is not None:
            raise self.problem

    def during(self, call: str, timeout: timedelta | None = None) -> Any:
        return self

    def get_rank(self, group: Any = None) -> int:
        return 1

    def get_world_size(self, group: Any = None) -> int:
        return len(self.ranks)

    def get_process_group_ranks(self, group: Any = None) -> list[int]:
        return list(self.ranks)

    def get_backend(self, group: Any = None) -> str:
        return "stand-in"

    def device_types(self, group: Any = None) -> tuple[str, ...]:
        return ("cpu",)


BACKEND: Any = StandIn()


@pytest.fixture(autouse=True)
def empty_slot(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(arguments, "_warned", set())
    deactivate()
    yield
    deactivate()


# --- groups


def test_entering_gives_the_backend() -> None:
    activate(BACKEND)
    assert enter("all_reduce", None) is BACKEND
    assert enter("all_reduce", ProcessGroup(0, 1)) is BACKEND


def test_entering_before_initialisation() -> None:
    for group in (None, ProcessGroup(0, 1)):
        with pytest.raises(NotInitializedError, match=r"all_reduce: .*(init_distributed\(\)|initialize\(setup\))"):
            enter("all_reduce", group)


@pytest.mark.parametrize("kind", [BrokenGroupError, NotInitializedError])
def test_entering_a_group_that_ended_or_failed(kind: type[Exception]) -> None:
    activate(StandIn(kind("it failed earlier")))  # type: ignore[arg-type]
    with pytest.raises(kind, match=r"^gather: it failed earlier$"):
        enter("gather", None)


def test_non_members_do_nothing_with_one_warning_for_each_call(caplog: pytest.LogCaptureFixture) -> None:
    activate(BACKEND)
    with caplog.at_level(logging.WARNING, logger="comm"):
        for _ in range(3):
            assert enter("all_reduce", GroupMember.NON_GROUP_MEMBER) is None  # type: ignore[arg-type]
        assert enter("gather", GroupMember.NON_GROUP_MEMBER) is None  # type: ignore[arg-type]
    assert [message.partition(":")[0] for message in caplog.messages] == ["all_reduce", "gather"]
    assert "not a member" in caplog.text


@pytest.mark.parametrize("group", [0, "world", [0, 1], True, torch.ones(1), object()], ids=lambda g: type(g).__name__)
def test_what_is_no_group(group: Any) -> None:
    activate(BACKEND)
    with pytest.raises(ArgumentTypeError, match=r"(?s)^send: group: got .*expected a process group"):
        enter("send", group)


def test_a_mesh_is_no_group_but_has_some() -> None:
    DeviceMesh = type("DeviceMesh", (), {})
    with pytest.raises(ArgumentTypeError, match=r"^send: group: got .*; pass mesh.get_group\(\)"):
        is_member("send", DeviceMesh())


def test_the_backend_knows_the_call_and_how_long_it_may_take() -> None:
    class Naming(StandIn):
        def during(self, call: str, timeout: timedelta | None = None) -> str:
            return f"backend for {call} of {timeout}"

    activate(Naming())  # type: ignore[arg-type]
    entered: Any = enter("gather", None)
    assert entered == "backend for gather of None"
    entered = enter("gather", None, 2.5)
    assert entered == "backend for gather of 0:00:02.500000"
    with pytest.raises(ArgumentError, match=r"^gather: timeout: got 0; expected"):
        enter("gather", None, 0)


def test_membership() -> None:
    assert is_member("send", None)
    assert is_member("send", ProcessGroup(0, 1))
    assert not is_member("send", GroupMember.NON_GROUP_MEMBER)


# --- tensors


NO_TENSORS = [None, 3, [torch.ones(1)], "tensor", torch.float32]


@pytest.mark.parametrize("value", NO_TENSORS, ids=lambda v: type(v).__name__)
def test_what_is_no_tensor(value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^send: tensor: got .*; expected a tensor$"):
        check_tensor("send", "tensor", value, BACKEND, None)


def unusual_tensors() -> dict[str, tuple[torch.Tensor, str]]:
    return {
        "sparse": (torch.eye(2).to_sparse(), r"sparse tensor \(torch.sparse_coo\).*pass tensor.to_dense\(\)"),
        "elsewhere": (torch.ones(2, device="meta"), "tensor on meta; backend 'stand-in' of this group serves cpu"),
        "nested": (torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), "nested tensor"),
    }


@pytest.mark.filterwarnings("ignore")  # torch's own, about prototypes
@pytest.mark.parametrize("kind", ["sparse", "elsewhere", "nested"])
def test_tensors_that_cannot_be_read(kind: str) -> None:
    tensor, message = unusual_tensors()[kind]
    with pytest.raises(ArgumentError, match=f"^send: tensor: got a {message}"):
        check_tensor("send", "tensor", tensor, BACKEND, None)


@pytest.mark.filterwarnings("ignore")  # torch's own, about their future
def test_quantized_tensors() -> None:
    tensor = torch.quantize_per_tensor(torch.ones(2), scale=1.0, zero_point=0, dtype=torch.quint8)
    with pytest.raises(ArgumentTypeError, match=r"quantized tensor \(torch.quint8\); pass its int_repr\(\)"):
        check_tensor("send", "tensor", tensor, BACKEND, None)


WITH_GAPS = {
    "strided": lambda: torch.zeros(3, 4)[:, ::2],
    "expanded": lambda: torch.zeros(1, 4).expand(3, 4),
    "column": lambda: torch.zeros(3, 4)[:, 1],
}


@pytest.mark.parametrize("kind", WITH_GAPS)
def test_tensors_that_cannot_be_written(kind: str) -> None:
    tensor = WITH_GAPS[kind]()
    check_tensor("recv", "tensor", tensor, BACKEND, None)
    with pytest.raises(ArgumentError, match=r"^recv: tensor: got .* with strides .*pass tensor.contiguous\(\)"):
        check_tensor("recv", "tensor", tensor, BACKEND, None, written=True)


def test_lazy_views_cannot_be_written() -> None:
    numbers = torch.ones(3, dtype=torch.complex64)
    for tensor, kind in ((numbers.conj(), "conjugated"), (torch._neg_view(torch.ones(3)), "negated")):
        check_tensor("recv", "tensor", tensor, BACKEND, None)
        with pytest.raises(ArgumentError, match=rf"lazily {kind} view.*pass tensor.resolve_conj\(\).resolve_neg\(\)"):
            check_tensor("recv", "tensor", tensor, BACKEND, None, written=True)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.zeros(3, 4).mT,
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(3, requires_grad=True),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3, dtype=torch.float8_e5m2),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_tensors_that_can_be_written(tensor: torch.Tensor) -> None:
    check_tensor("recv", "tensor", tensor, BACKEND, None, written=True)


def test_lists() -> None:
    ones = [torch.ones(2) for _ in range(3)]
    check_list("scatter", "scatter_list", ones, 3, BACKEND, None, like=ones[0], written=True)
    check_list("scatter", "scatter_list", tuple(ones), 3, BACKEND, None)
    for value in (None, torch.ones(3), {0: ones[0]}):
        with pytest.raises(ArgumentTypeError, match=r"^scatter: scatter_list: got .*; expected a list of 3 tensors$"):
            check_list("scatter", "scatter_list", value, 3, BACKEND, None)
    with pytest.raises(ArgumentError, match=r"^scatter: scatter_list: got a list of 2; expected 3 tensors"):
        check_list("scatter", "scatter_list", ones[:2], 3, BACKEND, None)
    with pytest.raises(ArgumentTypeError, match=r"^scatter: scatter_list\[1\]: got None; expected a tensor$"):
        check_list("scatter", "scatter_list", [ones[0], None, ones[1]], 3, BACKEND, None)
    with pytest.raises(
        ArgumentError, match=r"^scatter: scatter_list\[2\]: got dtype torch.int64; expected torch.float32"
    ):
        check_list("scatter", "scatter_list", [*ones[:2], torch.ones(2).long()], 3, BACKEND, None, like=ones[0])


def test_lists_that_are_written_share_no_memory() -> None:
    memory = torch.zeros(6)
    check_list("gather", "gather_list", list(memory.split(2)), 3, BACKEND, None, written=True)
    twice = [memory[:2], memory[2:4], memory[3:5]]
    check_list("gather", "gather_list", twice, 3, BACKEND, None)
    with pytest.raises(ArgumentError, match=r"^gather: gather_list: got tensors that share memory"):
        check_list("gather", "gather_list", twice, 3, BACKEND, None, written=True)


def test_dtypes_and_devices() -> None:
    check_dtype("scatter", "output", torch.ones(2), torch.ones(5))
    with pytest.raises(ArgumentError, match=r"^scatter: output: got dtype torch.float64; expected torch.float32"):
        check_dtype("scatter", "output", torch.ones(2).double(), torch.ones(2))
    with pytest.raises(ArgumentError, match=r"^scatter: output: got a tensor on meta; expected cpu"):
        check_dtype("scatter", "output", torch.ones(2, device="meta"), torch.ones(2))


def test_numbers_of_elements() -> None:
    check_numel("scatter", "output", torch.ones(2, 3), 6, "of input")
    with pytest.raises(ArgumentError, match=r"^scatter: output: got 6 elements \(shape \(2, 3\)\); expected 5: why$"):
        check_numel("scatter", "output", torch.ones(2, 3), 5, "why")


# --- ranks


@given(st.integers(0, 2))
def test_ranks_of_members(position: int) -> None:
    assert group_rank_of("reduce", "dst", BACKEND, None, StandIn.ranks[position], None) == position
    assert group_rank_of("reduce", "dst", BACKEND, None, None, position) == position


@given(st.integers(-3, 10).filter(lambda rank: rank not in StandIn.ranks))
def test_ranks_outside_the_group(rank: int) -> None:
    with pytest.raises(ArgumentError, match=rf"^reduce: dst: got rank {rank}, .*its global ranks are \[4, 2, 7\]$"):
        group_rank_of("reduce", "dst", BACKEND, None, rank, None)


@given(st.integers(-3, 10).filter(lambda rank: not 0 <= rank < 3))
def test_group_ranks_outside_the_group(rank: int) -> None:
    with pytest.raises(ArgumentError, match=f"^reduce: group_dst: got {rank}; expected 0 to 2 in a group of 3$"):
        group_rank_of("reduce", "dst", BACKEND, None, None, rank)


def test_one_of_the_two_ranks() -> None:
    with pytest.raises(ArgumentError, match=r"^gather: got both dst=4 and group_dst=0; expected one of them$"):
        group_rank_of("gather", "dst", BACKEND, None, 4, 0)
    with pytest.raises(ArgumentError, match=r"^broadcast: src: missing"):
        group_rank_of("broadcast", "src", BACKEND, None, None, None)
    assert group_rank_of("gather", "dst", BACKEND, None, None, None, default=2) == 2


@pytest.mark.parametrize("rank", [1.0, "0", [0], torch.ones(2)], ids=lambda r: type(r).__name__)
def test_ranks_are_integers(rank: Any) -> None:
    for arguments_ in ((rank, None), (None, rank)):
        with pytest.raises(ArgumentTypeError, match=r"(?s)^send: (group_)?dst: got .*; expected an integer$"):
            group_rank_of("send", "dst", BACKEND, None, *arguments_)


def test_integers_of_any_kind() -> None:
    assert integer("send", "tag", 3) == 3
    assert integer("send", "tag", torch.tensor(3)) == 3


# --- sizes of parts


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_splits_that_add_up(sizes: list[int]) -> None:
    tensor = torch.zeros(sum(sizes), 2)
    assert splits("all_to_all_single", "input_split_sizes", sizes, "input", tensor, len(sizes)) == sizes
    as_tensor = torch.tensor(sizes)
    assert splits("all_to_all_single", "input_split_sizes", as_tensor, "input", tensor, len(sizes)) == sizes  # type: ignore[arg-type]


@given(st.integers(0, 50), st.integers(1, 7), st.sampled_from([None, []]))
def test_equal_splits(rows: int, W: int, sizes: Any) -> None:
    tensor = torch.zeros(rows, 2)
    if rows % W == 0:
        assert splits("call", "sizes", sizes, "input", tensor, W) == [rows // W] * W
        return
    with pytest.raises(ArgumentError, match=rf"^call: input: got {rows} rows .* world size of {W}; pass sizes"):
        splits("call", "sizes", sizes, "input", tensor, W)


@given(st.lists(st.integers(-3, 9), min_size=1, max_size=6), st.integers(0, 30), st.integers(1, 6))
def test_splits_that_do_not_fit(sizes: list[int], rows: int, W: int) -> None:
    tensor = torch.zeros(rows)
    fits = len(sizes) == W and min(sizes) >= 0 and sum(sizes) == rows
    if fits:
        assert splits("call", "sizes", sizes, "input", tensor, W) == sizes
        return
    with pytest.raises(ArgumentError, match=r"^call: sizes: got ") as refused:
        splits("call", "sizes", sizes, "input", tensor, W)
    expected = f"expected {W}" if len(sizes) != W else f"add up to {rows}, the first dimension of input"
    assert expected in str(refused.value)


@pytest.mark.parametrize("sizes", [3, 1.5, {2, 1}, object()], ids=lambda s: type(s).__name__)
def test_splits_are_lists(sizes: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^call: sizes: got .*; expected a list of 2 integers, or None$"):
        splits("call", "sizes", sizes, "input", torch.zeros(3), 2)


@pytest.mark.parametrize("sizes", [[1.0, 2.0], ["1", "2"], [None, 3]], ids=str)
def test_splits_are_integers(sizes: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^call: sizes: got .*; expected an integer$"):
        splits("call", "sizes", sizes, "input", torch.zeros(3), 2)


def test_a_number_is_one_row() -> None:
    assert splits("call", "sizes", None, "input", torch.zeros(()), 1) == [1]


# --- timeouts


def test_timeouts() -> None:
    assert as_timedelta("call", None) is None
    assert as_timedelta("call", 1.5) == timedelta(seconds=1.5)
    assert as_timedelta("call", timedelta(minutes=1)) == timedelta(minutes=1)


@pytest.mark.parametrize("timeout", [0, -1, timedelta(0), timedelta(seconds=-1), float("-inf")], ids=str)
def test_timeouts_that_are_over(timeout: Any) -> None:
    with pytest.raises(
        ArgumentError, match=r"^call: timeout: got .*; expected seconds or a timedelta of more than 0, and finite$"
    ):
        as_timedelta("call", timeout)


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), 1e300], ids=str)
def test_timeouts_that_no_clock_can_count(timeout: float) -> None:
    with pytest.raises(ArgumentError, match=r"^call: timeout: got "):
        as_timedelta("call", timeout)


@pytest.mark.parametrize(("timeout", "expected"), [(1e-9, "at least a microsecond"), (1e300, "at most 36525 days")])
def test_timeouts_that_are_too_short_or_too_long(timeout: float, expected: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^call: timeout: got 1e.*; expected {expected}"):
        as_timedelta("call", timeout)


def test_timeouts_of_another_kind() -> None:
    with pytest.raises(ArgumentTypeError, match=r"^call: timeout: got '30'; expected seconds or a timedelta$"):
        as_timedelta("call", "30")  # type: ignore[arg-type]
