"""Ports for the rendezvous of ranks."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from comm_utils.testing import environment
from comm_utils.testing.environment import PortReservation


def test_reserved_ports_differ_and_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    first = PortReservation()
    monkeypatch.setattr(environment, "_candidates", lambda: range(first.port, first.port + 1))
    with pytest.raises(RuntimeError, match=f"no free TCP port found between {first.port} and {first.port}"):
        PortReservation()
    first.close()
    again = PortReservation()
    assert again.port == first.port
    again.close()


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_ports_in_use_are_not_reserved(
    monkeypatch: pytest.MonkeyPatch, family: socket.AddressFamily, address: str
) -> None:
    with socket.socket(family) as user:
        try:
            user.bind((address, 0))
        except OSError:
            pytest.skip(f"{address} does not exist on this host")
        port = user.getsockname()[1]
        monkeypatch.setattr(environment, "_candidates", lambda: range(port, port + 1))
        with pytest.raises(RuntimeError, match="no free TCP port"):
            PortReservation()


def test_ports_are_not_those_of_outgoing_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel_says, candidates in {
        "32768\t60999\n": range(10000, 32768),
        "1024 40000": range(40001, 65536),
        "1024 65535": range(10000, 65536),  # no other is left
        "unreadable": range(10000, 32768),
    }.items():
        monkeypatch.setattr(Path, "read_text", lambda self, text=kernel_says: text)
        assert environment._candidates() == candidates
