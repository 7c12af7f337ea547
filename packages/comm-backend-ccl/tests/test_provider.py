from importlib.metadata import entry_points

import pytest
from torch.distributed import HashStore

from comm_backend_ccl import provider
from comm_utils import BackendUnavailableError, Setup
from comm_utils.backend import ENTRY_POINT_GROUP


def test_it_registers_itself() -> None:
    (entry,) = entry_points(group=ENTRY_POINT_GROUP, name="ccl")
    assert entry.load() is provider


def test_it_says_that_it_is_unavailable_and_why() -> None:
    found = provider.availability()["ccl"]
    assert not found.usable
    assert "oneCCL" in found.reason
    assert "gloo" in found.remedy


def test_asking_for_it_by_name_is_an_error_with_the_reason() -> None:
    with pytest.raises(BackendUnavailableError, match="contains no oneCCL engine; use dist_backend='gloo'"):
        provider.initialize(Setup("ccl", 0, 1, HashStore()))


def test_it_adopts_nothing() -> None:
    assert not provider.adopts("ccl")
    with pytest.raises(BackendUnavailableError, match="cannot be adopted"):
        provider.adopt()
