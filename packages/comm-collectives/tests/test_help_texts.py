"""``help()`` of a collective shows every error that it may raise."""

import inspect

import pytest

from comm_collectives import groups, objects, subgroups
from comm_collectives.help_texts import with_full_help
from comm_utils import errors, operations

#: Of a call: the others are about the start of a world, or the configuration.
OF_CALLS = {
    "ArgumentError",
    "ArgumentTypeError",
    "BackendUnavailableError",
    "BrokenGroupError",
    "CollectiveMismatchError",
    "CommTimeoutError",
    "NotInitializedError",
    "PeerLostError",
}


def raises(function: object) -> set[str]:
    """Return the classes below ``Raises``."""
    _, _, section = (inspect.getdoc(function) or "").partition("\nRaises:\n")
    return {
        name.strip()
        for line in section.splitlines()
        if line.startswith("    ") and not line.startswith("     ")
        for name in line.partition(":")[0].split(",")
    }


def test_classes_are_those_of_the_package() -> None:
    assert set(errors.__all__) >= OF_CALLS


@pytest.mark.parametrize("row", list(operations.rows()), ids=lambda row: row.name)
def test_every_error_is_shown(row: operations.OperationSpec) -> None:
    assert raises(operations.function_of(row)) >= OF_CALLS


def test_errors_of_new_groups_are_shown() -> None:
    assert raises(groups.new_group) >= OF_CALLS - {"BrokenGroupError"}
    for one in (subgroups.new_subgroups, subgroups.new_subgroups_by_enumeration, subgroups.split_group):
        assert "CommError" in raises(one)


@pytest.mark.parametrize("name", objects.__all__)
def test_errors_of_objects_are_shown(name: str) -> None:
    function = getattr(objects, name)
    assert raises(function) >= {*OF_CALLS, "ObjectDecodeError", "ObjectExchangeError"}
    lines = (inspect.getdoc(function) or "").splitlines()
    assert max(map(len, lines)) <= 120
    # Where neither form is given, these take global rank 0 for the root, and others raise.
    has_default = name in ("broadcast_object_list", "gather_object", "scatter_object_list")
    assert has_default == any("by default global rank 0" in line for line in lines)


def test_what_a_function_says_itself_stays() -> None:
    def call() -> None:
        """Call.

        Raises:
            PeerLostError: my own reason.
        """

    with_full_help(call, {"PeerLostError": "usual", "CommTimeoutError": "usual"})
    assert "PeerLostError: my own reason.\n    CommTimeoutError: usual\n" in str(call.__doc__)
