"""Ports derived from a job."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from comm_utils.launch.ports import derived_port


def test_the_same_everywhere() -> None:
    assert derived_port("1234.0") == 18262
    assert derived_port("") == 15000


@given(st.text())
def test_below_the_ephemeral_range(text: str) -> None:
    assert 15000 <= derived_port(text) < 29000


def test_jobs_that_follow_each_other_rarely_meet() -> None:
    jobs = [f"{job}.{step}" for job in range(100_000, 100_100) for step in range(2)]
    assert len({derived_port(job) for job in jobs}) > 190
