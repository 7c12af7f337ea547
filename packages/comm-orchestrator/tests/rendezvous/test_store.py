"""Rank 0's store and the port that the one before it leaves: real sockets on the loopback interface."""

from __future__ import annotations

import gc
import socket
import threading
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from comm_orchestrator.rendezvous import store
from comm_orchestrator.rendezvous.server import PortInUseError
from comm_utils.launch import LaunchInfo

LIMIT = timedelta(seconds=10)


def serve(port: int) -> tuple[TCPStore, str | None]:
    """Return rank 0's store, and the address to which it is bound."""
    launch = LaunchInfo(rank=0, world_size=2, local_rank=0, local_world_size=2, node_rank=0, launcher="torchrun")
    return store._served(store._Address("127.0.0.1", port, "here"), launch, LIMIT)


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


def test_a_store_that_only_a_cycle_of_references_holds_is_not_joined() -> None:
    first, _ = serve(0)
    first.set("key", "of the first world")
    port = first.port
    cycle: list[object] = [first]
    cycle.append(cycle)
    gc.disable()
    try:
        del first, cycle
        second, bound = serve(port)
    finally:
        gc.enable()
    assert bound == "127.0.0.1"
    assert not second.check(["key"])


def test_a_store_that_the_program_holds_serves_the_next_world_too() -> None:
    first, _ = serve(0)
    first.set("key", "of the first world")
    second, bound = serve(first.port)
    assert bound is None
    assert second.get("key") == b"of the first world"
