"""Where rank 0 listens, and how it is found: real sockets on the loopback interface."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from comm_orchestrator.rendezvous import client, protocol, server
from comm_orchestrator.rendezvous.protocol import Deadline
from comm_utils.errors import CommTimeoutError, LaunchError
from comm_utils.testing import patience

LIMIT = timedelta(seconds=10)


@pytest.mark.parametrize(
    ("host", "alone", "bound"),
    [
        ("127.0.0.1", False, "127.0.0.1"),
        ("127.0.0.1", True, "127.0.0.1"),
        ("localhost", True, "127.0.0.1"),
        # Other hosts may know this one by an address that is none of its loopback interface's.
        ("localhost", False, None),
        ("no-such-host.invalid", False, None),
        # A service's address, which leads here through a translation.
        ("192.0.2.200", False, None),
    ],
)
def test_no_wider_than_it_has_to(host: str, alone: bool, bound: str | None) -> None:
    with server.listen(host, 0, alone) as listener:
        assert listener.getsockname()[0] == bound or (bound is None and listener.getsockname()[0] in ("::", "0.0.0.0"))


def test_a_port_in_use_names_its_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(server.PortInUseError, match=f"port {port} of 127.0.0.1 is in use by pid {os.getpid()}, "):
            server.listen("127.0.0.1", port, alone=True)


def test_a_port_of_an_own_store_is_known_without_a_look_at_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = server.listen("127.0.0.1", 0, alone=True)
    port = listener.getsockname()[1]
    store = server.serve(listener, LIMIT)
    looks: list[str] = []
    monkeypatch.setattr(psutil, "net_connections", looks.append)
    with pytest.raises(server.PortInUseError, match=f"port {port} of 127.0.0.1 is in use by pid {os.getpid()}, "):
        server.listen("127.0.0.1", port, alone=True)
    assert not looks
    del store


def test_a_loopback_interface_that_is_down_is_named_at_once() -> None:
    """In a network of its own, whose only interface is down; a store would try until its timeout of a day."""
    alone = ["unshare", "--net"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let this user make a network namespace")
    program = (
        "from datetime import timedelta; from comm_orchestrator.rendezvous import server; "
        "server.serve(server.listen('127.0.0.1', 0, alone=True), timedelta(days=1))"
    )
    command = [*alone, sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60 * patience())
    assert "LaunchError: rank 0 listens at 127.0.0.1:" in ended.stderr
    assert "(ip link set lo up)" in ended.stderr


def test_a_store_on_the_listener_and_its_clients() -> None:
    listener = server.listen("127.0.0.1", 0, alone=True)
    port = listener.getsockname()[1]
    store = server.serve(listener, LIMIT)
    assert client.wait_for_listener("127.0.0.1", port, Deadline(5), "here") == "127.0.0.1"
    joined = client.connect("127.0.0.1", port, Deadline(5), LIMIT)
    joined.set("key", "value")
    assert store.get("key") == b"value"
    assert client.unreachable_reason("127.0.0.1", port) == ""
    # Somebody still holds the store of the last world: the next one is made in the same server.
    again = server.serve_again("127.0.0.1", port, LIMIT)
    assert again.get("key") == b"value"
    del store, joined, again
    with server.listen("127.0.0.1", port, alone=True):
        pass


def test_one_who_comes_late_is_waited_for() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    servers = []
    timer = threading.Timer(0.4, lambda: servers.append(socket.create_server(("127.0.0.1", port))))
    timer.start()
    start = time.monotonic()
    assert client.wait_for_listener("127.0.0.1", port, Deadline(10), "here") == "127.0.0.1"
    assert time.monotonic() - start >= 0.4
    timer.join()
    servers[0].close()


@pytest.mark.parametrize(
    ("host", "error", "text"),
    [
        (
            "127.0.0.1",
            CommTimeoutError,
            "rank 0 is not to be found at 127.0.0.1:1 (told), which refuses connections",
        ),
        ("no-such-host.invalid", LaunchError, "the master address 'no-such-host.invalid' (told) does not resolve on "),
    ],
)
def test_one_who_never_comes(host: str, error: type[Exception], text: str) -> None:
    start = time.monotonic()
    with pytest.raises(error) as caught:
        client.wait_for_listener(host, 1, Deadline(0.3), "told")
    assert str(caught.value).startswith(text)
    assert time.monotonic() - start < 2 * patience()
    assert client.unreachable_reason(host, 1) != ""


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (None, CommTimeoutError, "says nothing"),
        (b"HTTP/1.1 400 Bad Request", client.ConnectionEndedError, "answers with b'HTTP'"),
        (b"", client.ConnectionEndedError, "(hangs up|Connection reset by peer)"),
    ],
)
def test_something_that_is_no_store(
    answer: bytes | None, error: type[Exception], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            with listener.accept()[0] as accepted:
                accepted.sendall(answer or b"")

        if answer is not None:
            threading.Thread(target=serve, daemon=True).start()
        start, threads = time.monotonic(), threading.active_count()
        with pytest.raises(error, match=rf"does not answer like a store of torch\.distributed: it {said}") as caught:
            client.connect("127.0.0.1", port, Deadline(0.5), LIMIT)
        assert f"there listens pid {os.getpid()}, " in str(caught.value)
        assert str(caught.value).endswith("set MASTER_PORT to a free port")
        assert ("see whether that process is stopped" in str(caught.value)) == (answer is None)
        assert time.monotonic() - start < 3 * patience()
        assert threading.active_count() <= threads
    assert capfd.readouterr().err == ""  # no page of C++ stack frames


@pytest.mark.parametrize("limit_s", [0.5, 60.0])
def test_a_store_that_ends_after_its_first_answer(monkeypatch: pytest.MonkeyPatch, limit_s: float) -> None:
    """As that of a rank 0 which gives up at once; torch's client would try again until its timeout."""
    assert client._known()
    monkeypatch.setattr(client, "_CONNECTING_S", 0.25)
    listener = server.listen("127.0.0.1", 0, alone=True)
    port = listener.getsockname()[1]
    stores = [server.serve(listener, LIMIT)]
    connects = client._client

    def after_its_end(*args: Any) -> Any:
        stores.clear()
        return connects(*args)

    monkeypatch.setattr(client, "_client", after_its_end)
    start = time.monotonic()
    with pytest.raises(client.ConnectionEndedError) as caught:
        client.connect("127.0.0.1", port, Deadline(limit_s), LIMIT)
    assert f"the store at 127.0.0.1:{port} has ended: it answered, and now it refuses connections" in str(caught.value)
    assert time.monotonic() - start < 3 * patience()


def test_a_store_that_is_none_at_an_ipv6_address_names_its_process() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"this host has no ::1: {error}")
    with listener:
        port = listener.getsockname()[1]
        said = client.explained("::1", port, "hangs up")
    assert f"there listens pid {os.getpid()}, " in said
    assert said.endswith("; set MASTER_PORT to a free port")


_AT_A_LINK_LOCAL_ADDRESS = """
from datetime import timedelta
import pytest
from comm_orchestrator.rendezvous import client, server
from comm_orchestrator.rendezvous.protocol import Deadline

host, limit = "fe80::1%inner", timedelta(seconds=10)
listener = server.listen(host, 0, alone=True)
port = listener.getsockname()[1]
store = server.serve(listener, limit)
client.wait_for_listener(host, port, Deadline(5), "here")
client.connect(host, port, Deadline(5), limit).set("key", "value")
print(store.get("key").decode(), client.unreachable_reason(host, port) or "reached")
with pytest.raises(server.PortInUseError) as caught:
    server.listen(host, port, alone=True)
print(caught.value.pid is not None)
"""


def test_a_link_local_address_with_its_interface() -> None:
    prepare = (
        "ip link set lo up && ip link add inner type veth peer name outer && ip link set outer up && "
        'ip link set inner up && ip address add fe80::1/64 dev inner nodad && exec "$@"'
    )
    apart = ["unshare", "--net", "sh", "-c", prepare, "sh"]
    if not shutil.which("unshare") or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a network namespace and a pair of interfaces")
    command = [*apart, sys.executable, "-c", _AT_A_LINK_LOCAL_ADDRESS]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60 * patience())
    assert ended.stdout.split() == ["value", "reached", "True"], ended.stderr


_AT_TWO_ADDRESSES = """
from datetime import timedelta
from comm_orchestrator.rendezvous import client, server
from comm_orchestrator.rendezvous.protocol import Deadline

client._ADDRESS_S = 0.3
deadline, limit = Deadline(120), timedelta(seconds=10)
listener = server.listen("192.0.2.1", 0, alone=True)
port = listener.getsockname()[1]
store = server.serve(listener, limit)
client.wait_for_listener("node", port, deadline, "here")
client.connect("node", port, deadline, limit).set("key", "value")
in_time = deadline.elapsed_s() < client._SILENCE_S  # all of which the first address used to take
print(store.get("key").decode(), in_time, client.resolve("node", port, 1)[0][4][0])
"""


def test_the_only_address_of_a_name_has_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a store whose listen queue is full while many ranks start."""
    monkeypatch.setattr(client, "_ADDRESS_S", 0.2)
    with socket.socket() as listener, ExitStack() as queue:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        host, port = listener.getsockname()
        for _ in range(3):
            waits = queue.enter_context(socket.socket())
            waits.setblocking(False)
            waits.connect_ex((host, port))

        def accept() -> None:
            time.sleep(0.5)
            with suppress(OSError):  # the end of the test
                while True:
                    queue.enter_context(listener.accept()[0])

        accepting = threading.Thread(target=accept)
        accepting.start()
        with client._connected(host, port, 20.0) as connection:
            assert connection.getpeername() == (host, port)
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join(20)


def test_a_name_whose_first_address_does_not_answer(tmp_path: Path) -> None:
    """As where a name has an IPv6 address, and IPv6 packets are dropped on the way."""
    (tmp_path / "hosts").write_text("2001:db8::2 node\n192.0.2.1 node\n")
    prepare = (
        'mount --bind "$1" /etc/hosts && shift && ip link set lo up && ip link add inner type veth peer name outer && '
        "ip link set outer up && ip link set inner up && ip address add 192.0.2.1/24 dev inner && "
        "ip address add 2001:db8::1/64 dev inner nodad && "
        'ip neigh replace 2001:db8::2 lladdr 02:00:00:00:00:99 nud permanent dev inner && exec "$@"'
    )
    apart = ["unshare", "--net", "--mount", "sh", "-c", prepare, "sh", str(tmp_path / "hosts")]
    if not shutil.which("unshare") or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs namespaces of a network and of mounts, and a pair of interfaces")
    command = [*apart, sys.executable, "-c", _AT_TWO_ADDRESSES]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60 * patience())
    assert ended.stdout.split() == ["value", "True", "2001:db8::2"], ended.stdout + ended.stderr


def test_an_address_that_leads_to_somebody_else() -> None:
    """As a proxy may accept connections for any host: rank 0, whose store runs, can say so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert "127.0.0.1" in client.unreachable_reason("127.0.0.1", port)
        assert "says nothing from there" in client.unreachable_reason("127.0.0.1", port)


def test_waiting_is_no_secret(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_FIRST_NOTICE_S", 0.05)
    deadline = Deadline(0.5)
    while deadline.pause(lambda: "for Godot"):
        pass
    told = [record.getMessage() for record in caplog.records]
    assert 3 <= len(told) <= 4  # after 0.05, 0.1, 0.2 and 0.4 s
    assert told[0].endswith("and still waiting: for Godot")


def test_a_forked_child_lets_go_of_the_port() -> None:
    listener = server.listen("127.0.0.1", 0, alone=True)
    port = listener.getsockname()[1]
    store = server.serve(listener, LIMIT)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    try:
        store.set("key", "value")
        assert client.connect("127.0.0.1", port, Deadline(5), LIMIT).get("key") == b"value"
        del store
        with server.listen("127.0.0.1", port, alone=True):
            pass
    finally:
        os.close(writing)
        os.waitpid(child, 0)
