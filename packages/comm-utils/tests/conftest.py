"""Tests of the runner run twice: with ranks that are fresh interpreters, and with ranks that are forked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from comm_utils.testing import allow_interrupts, preload

allow_interrupts()
preload("json")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2].startswith("test_testing_"):
        metafunc.parametrize("start_of_ranks", ["fresh", "forked"], indirect=True, scope="module")


@pytest.fixture(autouse=True, scope="module")
def start_of_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Choose between fresh interpreters and forks for the ranks of a module's tests."""
    with pytest.MonkeyPatch.context() as patch:
        if getattr(request, "param", "forked") == "fresh":
            patch.setenv("COMM_TESTS_FORK", "0")
        yield
