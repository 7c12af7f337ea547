"""Tests of the runner run twice: with ranks that are fresh interpreters, and with ranks that are forked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from comm_utils.testing import allow_interrupts, preload

allow_interrupts()
preload("json")

# A busy machine is no reason to fail; `--hypothesis-profile=thorough` tries ten times as many examples.
settings.register_profile("usual", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("usual"), max_examples=1000)
settings.load_profile("usual")


# What depends on how ranks start; of the others, fresh interpreters are slow.
OF_THE_START = ("test_testing_cleanup", "test_testing_run_ranks", "test_testing_targets")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.module.__name__.rpartition(".")[2]
    if name.startswith("test_testing_"):
        fresh = "fresh" if name in OF_THE_START else pytest.param("fresh", marks=pytest.mark.slow)
        metafunc.parametrize("start_of_ranks", [fresh, "forked"], indirect=True, scope="module")


@pytest.fixture(autouse=True, scope="module")
def start_of_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Choose between fresh interpreters and forks for the ranks of a module's tests."""
    with pytest.MonkeyPatch.context() as patch:
        if getattr(request, "param", "forked") == "fresh":
            patch.setenv("COMM_TESTS_FORK", "0")
        yield
