"""Operations of oneCCL whose handles were dropped keep their tensors until they end, whatever interrupts a look."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from comm_backend_ccl import oneccl_library


class Library:
    """Stand in for the compiled library.

    Attributes:
        interrupts: the function in whose course a signal handler raises; it runs when the function has returned.
    """

    def __init__(self) -> None:
        self.interrupts, self.has_ended = "", False
        self.released: list[int | None] = []

    def comm_oneccl_wait(self, address: ctypes.c_void_p, *_: object) -> int:
        self._interrupt("wait")
        return int(self.has_ended)

    def comm_oneccl_release(self, address: ctypes.c_void_p) -> None:
        self.released.append(address.value)
        self._interrupt("release")

    def _interrupt(self, function: str) -> None:
        if self.interrupts == function:
            raise KeyboardInterrupt


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    monkeypatch.setattr(oneccl_library._Loaded, "library", made)
    yield made
    made.interrupts, made.has_ended = "", True
    oneccl_library._dropped.look()
    assert not oneccl_library._dropped


def _dropped() -> weakref.ref[torch.Tensor]:
    tensor = torch.ones(5)
    handle = oneccl_library.Handle((tensor,))
    handle.address = ctypes.c_void_p(1234)
    return weakref.ref(tensor)


@pytest.mark.parametrize("function", ["wait", "release"])
def test_an_interrupted_look_keeps_tensors_until_the_end(library: Library, function: str) -> None:
    tensor = _dropped()
    library.interrupts, library.has_ended = function, function == "release"
    with pytest.raises(KeyboardInterrupt):
        oneccl_library._dropped.look()
    gc.collect()
    assert (tensor() is not None) == (function == "wait")
    library.interrupts, library.has_ended = "", True
    oneccl_library._dropped.look()
    gc.collect()
    assert tensor() is None
    assert library.released == [1234]


def test_an_operation_that_an_interrupt_takes_out_is_kept(library: Library) -> None:
    tensor = _dropped()
    oneccl_library._dropped.popleft()  # as where a signal handler raises before a look has it
    gc.collect()
    assert tensor() is not None
