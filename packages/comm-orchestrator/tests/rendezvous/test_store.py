"""Rank 0's store and the port that the one before it leaves: real sockets on the loopback interface."""

from __future__ import annotations

import gc
import socket
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore

from comm_config import resolve
from comm_orchestrator.rendezvous import greeting, store
from comm_orchestrator.rendezvous.protocol import Deadline
from comm_orchestrator.rendezvous.server import PortInUseError
from comm_utils.errors import CommTimeoutError, LaunchError
from comm_utils.launch import LaunchInfo

LIMIT = timedelta(seconds=10)
LAUNCH = LaunchInfo(rank=0, world_size=2, local_rank=0, local_world_size=2, node_rank=0, launcher="torchrun")


def serve(port: int) -> tuple[TCPStore, str | None]:
    """Return rank 0's store, and the address to which it is bound."""
    return store._served(store._Address("127.0.0.1", port, "here"), LAUNCH, LIMIT)


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


def test_who_gave_up_does_not_end_a_later_start_in_the_same_store() -> None:
    held, _ = serve(0)
    address = store._Address("127.0.0.1", held.port, "here")
    first = store._host(address, LAUNCH, LIMIT, None)
    second = store._host(address, LAUNCH, LIMIT, None)
    first.given_up()
    found = greeting.read_greeting(held, Deadline(0.0))
    assert found is not None
    assert not found["ended"]
    second.given_up()
    found = greeting.read_greeting(held, Deadline(0.0))
    assert found is not None
    assert found["ended"]


def join(port: int, deadline: Deadline) -> store.RendezvousPoint:
    """Join as rank 1, in a process that was in no world before."""
    return store._join(store._Address("127.0.0.1", port, "here"), replace(LAUNCH, rank=1), LIMIT, deadline, None)


def test_a_listener_that_hangs_up_may_be_the_last_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store._Process, "servers", set())
    old = socket.create_server(("127.0.0.1", 0))
    port = old.getsockname()[1]
    hosted: list[store.RendezvousPoint] = []

    def change_over() -> None:
        for _ in range(4):
            old.accept()[0].close()
        old.close()
        hosted.append(store._host(store._Address("127.0.0.1", port, "here"), LAUNCH, LIMIT, None))

    thread = threading.Thread(target=change_over)
    thread.start()
    joined = join(port, Deadline(60))
    thread.join()
    hosted[0].store.set("key", "of this world")
    assert joined.store.get("key") == b"of this world"


@pytest.mark.parametrize(("answer", "said"), [(b"", "it hangs up"), (b"HTTP/1.1 400", "it answers with b'HTTP'")])
def test_a_server_that_is_no_store(monkeypatch: pytest.MonkeyPatch, answer: bytes, said: str) -> None:
    """One that hangs up is looked at until the time is up, one that answers is another program's for certain."""
    monkeypatch.setattr(store._Process, "servers", set())
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            while True:
                try:
                    accepted, _ = listener.accept()
                except OSError:
                    return
                with accepted:
                    accepted.sendall(answer)

        threading.Thread(target=hang_up, daemon=True).start()
        deadline = Deadline(300 if answer else 1)
        with pytest.raises(CommTimeoutError, match=f"rank 1 of 2: .* does not answer like a store .*: {said}"):
            join(listener.getsockname()[1], deadline)
        assert (deadline.left_s() > 0) == bool(answer)


def opened(init_method: str | None, launch: LaunchInfo = LAUNCH) -> store.RendezvousPoint:
    settings = resolve(environ={}, overrides={"process_group.init_method": init_method})
    return store.open_store(launch, settings, LIMIT, Deadline(10), None)


@pytest.mark.parametrize("host", ["", "localhost"])
def test_a_file_of_this_host_is_checked(tmp_path: Path, host: str) -> None:
    url = f"file://{host}{tmp_path}/meet"
    assert opened(url).description.startswith(f"at {url} ")
    tmp_path.chmod(0o777)
    with pytest.raises(LaunchError, match="every user may replace files in its folder"):
        opened(url)


def test_a_file_of_another_host_is_refused() -> None:
    """torch would take the file /meet."""
    with pytest.raises(LaunchError, match=r"a file of the host 'tmp'; expected .*, such as 'file:///tmp/meet'"):
        opened("file://tmp/meet")


@pytest.mark.parametrize("agents", ["True", "False"])
def test_a_world_of_one_needs_no_port(monkeypatch: pytest.MonkeyPatch, agents: str) -> None:
    """Each of several processes that torchrun has started may be one."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agents)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        alone = LaunchInfo("arguments", 0, 1, master_addr="127.0.0.1", master_port=taken.getsockname()[1])
        assert isinstance(opened(None, alone).store, HashStore)


def test_a_scheme_that_nobody_serves() -> None:
    with pytest.raises(LaunchError, match="handler for http://; expected env://, tcp://host:port or file:///path"):
        opened("http://a:1")


def test_an_ipv6_address_in_brackets() -> None:
    launch = replace(LAUNCH, master_addr="[::1]", master_port=1)
    assert store._masters(launch, 2).host == "::1"
