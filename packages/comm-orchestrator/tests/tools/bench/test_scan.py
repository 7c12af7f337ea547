"""Sizes as nccl-tests writes them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_orchestrator.tools.bench import scan
from comm_utils.errors import ArgumentError


@pytest.mark.parametrize(
    ("text", "size"),
    [("8", 8), ("4K", 4096), ("4k", 4096), ("1M", 2**20), ("1.5G", 3 * 2**29), ("64MiB", 2**26), ("2kb", 2048)],
)
def test_sizes(text: str, size: int) -> None:
    assert scan.parse_size("--minbytes", text) == size


@pytest.mark.parametrize("text", ["", "K", "-1", "1.3", "4KK", "1e3", "nan", "inf", "9999999999T", "0x10", "٣K٣"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ArgumentError, match="--minbytes: got"):
        scan.parse_size("--minbytes", text)


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(2, 10))
def test_a_series_of_factors(minimum: int, more: int, factor: int) -> None:
    found = scan.series(minimum, minimum + more, factor, 0)
    assert found[0] == minimum
    assert found[-1] <= minimum + more < found[-1] * factor
    assert all(later == size * factor for size, later in pairwise(found))


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1000, 10**5))
def test_a_series_of_steps(minimum: int, more: int, step: int) -> None:
    assert scan.series(minimum, minimum + more, 2, step) == list(range(minimum, minimum + more + 1, step))


def test_too_many_sizes() -> None:
    with pytest.raises(ArgumentError, match="more than 10000 sizes"):
        scan.series(8, 2**30, 2, 1)


@pytest.mark.parametrize(("text", "share"), [("10%", 0.1), ("0.1", 0.1), ("0", 0.0), ("250 %", 2.5), (".5", 0.5)])
def test_shares(text: str, share: float) -> None:
    assert scan.percentage("--tolerance", text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "-1", "ten", "nan"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(ArgumentError, match="--tolerance: got"):
        scan.percentage("--tolerance", text)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_what_is_no_duration(value: float) -> None:
    with pytest.raises(ArgumentError, match="--timeout: got"):
        scan.duration_s("--timeout", value)
