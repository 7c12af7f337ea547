"""Each error is one of ours and the built-in that a caller would catch."""

from __future__ import annotations

import pickle

import pytest

import comm_utils
from comm_utils import errors

BUILT_IN = {
    "NotInitializedError": RuntimeError,
    "ArgumentError": ValueError,
    "ArgumentTypeError": TypeError,
    "BackendUnavailableError": RuntimeError,
    "LaunchError": RuntimeError,
    "CollectiveMismatchError": RuntimeError,
    "PeerLostError": RuntimeError,
    "CommTimeoutError": TimeoutError,
    "BrokenGroupError": RuntimeError,
    "ConfigurationError": ValueError,
}


def test_the_tree_is_complete() -> None:
    assert set(errors.__all__) == {"CommError", *BUILT_IN}
    assert issubclass(errors.CommError, Exception)
    for name in errors.__all__:
        assert getattr(comm_utils, name) is getattr(errors, name)
        assert getattr(errors, name).__doc__


@pytest.mark.parametrize(("name", "built_in"), BUILT_IN.items())
def test_both_ways_to_catch(name: str, built_in: type[Exception]) -> None:
    kind = getattr(errors, name)
    for caught in (errors.CommError, built_in):
        with pytest.raises(caught, match=r"^what was got$"):
            raise kind("what was got")


@pytest.mark.parametrize("name", BUILT_IN)
def test_errors_travel_between_processes(name: str) -> None:
    again = pickle.loads(pickle.dumps(getattr(errors, name)("got, expected, remedy")))
    assert type(again) is getattr(errors, name)
    assert str(again) == "got, expected, remedy"


def test_a_wrong_type_is_also_a_wrong_argument() -> None:
    assert issubclass(errors.ArgumentTypeError, errors.ArgumentError)
    assert issubclass(errors.ArgumentTypeError, ValueError)
    assert not issubclass(errors.ArgumentError, TypeError)
