"""`ConfigError` and the guess at what was meant."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_config import ConfigError, load_config
from comm_config.errors import closest


def test_it_is_a_value_error_that_tells_source_and_key() -> None:
    with pytest.raises(ValueError, match="got 'x', expected a whole number") as caught:
        load_config(environ={"COMM_LAUNCH__MASTER_PORT": "x"})
    error = caught.value
    assert isinstance(error, ConfigError)
    assert (error.source, error.key) == ("environment variable COMM_LAUNCH__MASTER_PORT", "launch.master_port")


def test_it_can_be_sent_to_another_process() -> None:
    error = ConfigError.at("file x", "launch", "is wrong")
    other = pickle.loads(pickle.dumps(error))
    assert (str(other), other.source, other.key) == ("file x: launch: is wrong", "file x", "launch")


def test_parts_that_are_empty_are_left_out() -> None:
    assert str(ConfigError.at("", "key", "is wrong")) == "key: is wrong"
    assert str(ConfigError.at("file x", "", "is wrong")) == "file x: is wrong"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("enable", "enabled"), ("ENABLED", "enabled"), ("prof-ops", "prof_ops"), ("verbos", "verbose"), ("x", None)],
)
def test_closest(name: str, expected: str | None) -> None:
    assert closest(name, ["enabled", "verbose", "prof_all", "prof_ops"]) == expected


def test_dashes_and_case_do_not_count() -> None:
    assert closest("X-y", ["x_y"], cutoff=1.0) == "x_y"
    assert closest("x_y", ["X-y"], cutoff=1.0) == "X-y"


@given(st.text(max_size=10), st.lists(st.text(max_size=10)))
def test_a_guess_is_a_known_name(name: str, known: list[str]) -> None:
    assert closest(name, known) in [*known, None]
    assert closest(name, []) is None
