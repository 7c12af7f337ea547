"""Message sizes and bandwidths are those of nccl-tests (doc/PERFORMANCE.md), restated here by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_utils.sizes import bandwidth, busbw_factor, encoded_size_bytes, format_size, message_size_bytes

W = st.integers(1, 4096)
BYTES = st.integers(0, 2**44)
SECONDS = st.floats(1e-9, 1e4)

TWICE = ("all_reduce", "all_reduce_coalesced", "inference_all_reduce")
WHOLE = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_coalesced",
    "gather",
    "scatter",
)
OTHERS_PART = (*WHOLE, "all_to_all", "all_to_all_single")
PLAIN = ("reduce", "broadcast", "send", "recv", "isend", "irecv", "barrier")
ALL = (*TWICE, *OTHERS_PART, *PLAIN)


@given(st.sampled_from(WHOLE), BYTES, W)
def test_size_is_the_whole_array_where_ranks_hold_parts(operation: str, part: int, world_size: int) -> None:
    assert message_size_bytes(operation, part, world_size) == part * world_size


@given(st.sampled_from([name for name in ALL if name not in WHOLE]), BYTES, W)
def test_size_is_the_tensor_elsewhere(operation: str, size: int, world_size: int) -> None:
    assert message_size_bytes(operation, size, world_size) == size


@given(W)
def test_bus_bandwidth_factors(n: int) -> None:
    for operation in TWICE:
        assert busbw_factor(operation, n) == pytest.approx(2 * (n - 1) / n)
    for operation in OTHERS_PART:
        assert busbw_factor(operation, n) == pytest.approx((n - 1) / n)
    for operation in PLAIN:
        assert busbw_factor(operation, n) == 1


@given(st.sampled_from(ALL), BYTES, SECONDS, W)
def test_bandwidth_is_size_over_time(operation: str, size: int, duration_s: float, world_size: int) -> None:
    found = bandwidth(operation, size, duration_s, world_size)
    assert found.algbw_gb_per_s == pytest.approx(size / duration_s / 1e9)
    assert found.busbw_gb_per_s == pytest.approx(found.algbw_gb_per_s * busbw_factor(operation, world_size))


def test_worked_example() -> None:
    """128 MiB reduced by 8 ranks in 2 ms; gathered from parts of 16 MiB in the same time."""
    rate = bandwidth("all_reduce", 2**27, 2e-3, 8)
    assert rate.algbw_gb_per_s == pytest.approx(67.108864)
    assert rate.busbw_gb_per_s == pytest.approx(117.440512)
    gathered = message_size_bytes("all_gather", 2**24, 8)
    assert gathered == 2**27
    assert bandwidth("all_gather", gathered, 2e-3, 8).busbw_gb_per_s == pytest.approx(58.720256)


def test_no_time_is_no_bandwidth() -> None:
    assert bandwidth("broadcast", 1000, 0.0, 2).algbw_gb_per_s == 0
    assert bandwidth("broadcast", 1000, 0.0, 2).busbw_gb_per_s == 0


def test_unknown_operations_are_named() -> None:
    with pytest.raises(KeyError, match=r"got the operation 'all_redcue'; .*did you mean 'all_reduce'"):
        message_size_bytes("all_redcue", 1, 2)
    with pytest.raises(KeyError, match="got the operation 'all_redcue'"):
        busbw_factor("all_redcue", 2)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1 MiB"),
        (2**20, "1 MiB"),
        (3 * 2**30, "3 GiB"),
        (2**40, "1 TiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_sizes_as_text(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(0, 2**50))
def test_text_gives_the_size_back(size: int) -> None:
    number, unit = format_size(size).split()
    factor = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    assert math.isclose(float(number) * factor, size, rel_tol=1e-3)


@given(st.sampled_from([*TWICE, *OTHERS_PART]), st.integers(0, 2**40), st.integers(2, 4096))
def test_an_uncompressed_call_sends_its_own_size(operation: str, size: int, world_size: int) -> None:
    sent = size * busbw_factor(operation, world_size)
    assert encoded_size_bytes(operation, round(sent), world_size) == pytest.approx(size, abs=2)


def test_one_rank_sends_nothing() -> None:
    assert encoded_size_bytes("all_reduce", 0, 1) == 0
