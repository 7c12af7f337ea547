"""The interface for oneCCL, whatever names this host and its interfaces have."""

from __future__ import annotations

import socket

import pytest

from comm_backend_ccl.interface import interface_between


def test_names_that_are_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FI_TCP_IFACE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    asked = []

    def interfaces() -> list[tuple[int, str]]:
        asked.append(True)
        return [(1, "caf\udce9"), (2, "lo")]  # the first is Latin-1, as Python shows it

    monkeypatch.setattr(socket, "if_nameindex", interfaces)
    assert interface_between(2) == ""
    assert asked
    monkeypatch.setenv("MASTER_ADDR", "node..1")
    assert interface_between(2) == ""
