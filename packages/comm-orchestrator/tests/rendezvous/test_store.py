"""Rank 0's store and the port that the one before it leaves: real sockets on the loopback interface."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

import pytest

from comm_orchestrator.rendezvous import store
from comm_orchestrator.rendezvous.server import PortInUseError
from comm_utils.launch import LaunchInfo

LIMIT = timedelta(seconds=10)


def serve(port: int) -> None:
    launch = LaunchInfo(rank=0, world_size=2, local_rank=0, local_world_size=2, node_rank=0, launcher="torchrun")
    store._served(store._Address("127.0.0.1", port, "here"), launch, LIMIT)


@pytest.fixture
def bound() -> socket.socket:
    """A socket that has a port and does not listen, as a server's just before its end."""
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    return taken


def test_a_slow_attempt_is_not_the_last(bound: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_CLOSING_S", 0.0)
    release = threading.Timer(0.2, bound.close)
    release.start()
    serve(bound.getsockname()[1])
    release.join()


def test_a_port_that_nobody_leaves_is_refused(bound: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_CLOSING_S", 0.0)
    with bound, pytest.raises(PortInUseError, match=r"is in use$"):
        serve(bound.getsockname()[1])
