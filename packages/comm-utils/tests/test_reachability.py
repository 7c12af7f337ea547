"""Listeners, and the addresses that cannot be reached."""

from __future__ import annotations

import os
import socket
import time

import pytest

from comm_utils.reachability import Listener, interface_address, unreachable


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_loopback_has_an_address_and_an_unknown_interface_none() -> None:
    assert interface_address("lo") == "127.0.0.1"
    assert interface_address("no-such-interface-of-any-length") == ""


@pytest.mark.parametrize("interface", ["lo", "", "nowhere0"])
def test_no_port_is_opened_where_no_other_host_could_connect(interface: str) -> None:
    before = open_files()
    listener = Listener(interface)
    assert listener.address == ""
    assert open_files() == before
    listener.close()


@pytest.fixture
def outward(monkeypatch: pytest.MonkeyPatch) -> Listener:
    """A listener on an interface that is not called lo, but has its address."""
    monkeypatch.setattr("comm_utils.reachability.interface_address", lambda name: "127.0.0.1")
    return Listener("eth7")


def test_who_listens_is_reached_and_who_has_closed_is_not(outward: Listener) -> None:
    assert outward.address.startswith("127.0.0.1:")
    assert unreachable({7: outward.address}, 5) == {}
    outward.close()
    assert unreachable({7: outward.address}, 5) == {7: "Connection refused, as a process that has ended does"}
    outward.close()


def test_ipv6_addresses_are_tried_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this host has no ::1: {error}")
    monkeypatch.setattr("comm_utils.reachability.interface_address", lambda name: "::1")
    listener = Listener("eth7")
    assert listener.address.startswith("[::1]:")
    assert unreachable({7: listener.address}, 5) == {}
    listener.close()
    assert unreachable({7: listener.address}, 5) == {7: "Connection refused, as a process that has ended does"}


def test_who_does_not_answer_is_named_when_the_time_is_over() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        host, port = full.getsockname()
        waiting = [socket.socket() for _ in range(3)]  # until no more fit
        for one in waiting:
            one.setblocking(False)
            one.connect_ex((host, port))
        begin = time.monotonic()
        assert unreachable({"a": f"{host}:{port}", "b": ""}, 0.3) == {"a": "no answer"}
        assert 0.25 < time.monotonic() - begin < 5
        for one in waiting:
            one.close()


@pytest.mark.parametrize(
    "address",
    ["", "nonsense", "127.0.0.1:", "127.0.0.1:port", "127.0.0.1:99999999", "name:80", "[name]:80", "[::1%no]:80"],
)
def test_what_is_no_address_is_left_out(address: str) -> None:
    assert unreachable({"a": address}, 0.1) == {}


def test_nothing_stays_open(outward: Listener) -> None:
    before = open_files()
    for _ in range(20):
        unreachable({0: outward.address, 1: "127.0.0.1:1"}, 1)
    assert open_files() == before
    outward.close()
    assert open_files() == before - 1
