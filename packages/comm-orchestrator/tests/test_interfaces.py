"""Names of interfaces, as NCCL takes them and as gloo needs them."""

from __future__ import annotations

import shutil
import subprocess
import sys

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_orchestrator import interfaces
from comm_utils.errors import LaunchError

NAMES = ["docker0", "eth0", "eth1", "eth10", "ib0", "lo"]
FOUND = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.5"],
    "eth1": ["10.1.0.5", "fe80::1"],
    "docker0": ["172.17.0.1"],
    "ib0": [],
}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("eth", ["eth0", "eth1", "eth10"]),
        ("eth1", ["eth1", "eth10"]),
        ("=eth1", ["eth1"]),
        ("=eth1,lo", ["eth1", "lo"]),
        ("eth0,ib", ["eth0", "ib0"]),
        ("^lo,docker", ["eth0", "eth1", "eth10", "ib0"]),
        ("^=eth1", ["docker0", "eth0", "eth10", "ib0", "lo"]),
        (" eth0 , lo ", ["eth0", "lo"]),
        ("wlan", []),
    ],
)
def test_patterns(pattern: str, names: list[str]) -> None:
    assert interfaces.matching(pattern.strip(), NAMES) == names


@given(st.lists(st.sampled_from(NAMES), min_size=1), st.booleans())
def test_a_negated_pattern_means_the_rest(parts: list[str], exact: bool) -> None:
    body = ("=" if exact else "") + ",".join(parts)
    meant, rest = interfaces.matching(body, NAMES), interfaces.matching("^" + body, NAMES)
    assert sorted([*meant, *rest]) == NAMES


def test_the_interface_of_an_address() -> None:
    assert interfaces.interface_for("10.1.0.5", FOUND) == "eth1"
    assert interfaces.interface_for("127.0.1.1", FOUND) == "lo"
    assert interfaces.interface_for("192.0.2.9", FOUND) is None
    assert interfaces.interface_for(None, FOUND) is None


def test_the_interface_of_a_link_local_address_that_several_have() -> None:
    both = {"eth0": ["fe80::1"], "eth1": ["fe80::1"]}
    assert interfaces.interface_for("fe80::1%eth1", both) == "eth1"
    assert interfaces.interface_for("fe80::1", both) == "eth0"
    assert interfaces.interface_for("fe80::2%eth1", both) is None


_TWO_LINKS = """
set -e
for one in 0 1; do
    ip link add eth$one type veth peer name peer$one
    ip link set eth$one up
    ip link set peer$one up
    ip address add fe80::1/64 dev eth$one nodad
done
exec "$@"
"""
_VARIABLES = """
from comm_orchestrator import interfaces
print(interfaces.variables({}, "fe80::2%eth1", interfaces.addresses(), ccl=False))
"""


def test_a_peer_at_a_link_local_address_of_the_second_of_two_links() -> None:
    apart = ["unshare", "--net", "sh", "-c", _TWO_LINKS, "sh"]
    if not shutil.which("ip") or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a network namespace of its own")
    found = subprocess.run([*apart, sys.executable, "-c", _VARIABLES], capture_output=True, text=True, timeout=60)
    assert found.stdout == "{'GLOO_SOCKET_IFNAME': 'eth1'}\n", found.stderr


def test_an_address_that_others_might_reach() -> None:
    unknown = {"lo": ["127.0.0.1"], "eth9": ["203.0.113.9"], "eth8": ["fe80::1"]}
    assert interfaces.outward_address(unknown) == "203.0.113.9"
    assert interfaces.outward_address({"lo": ["127.0.0.1"]}) is None
    assert interfaces.outward_address({"lo": ["::1"], "eth0": ["fe80::1", "fd00::5"]}) == "fd00::5"


def test_bridges_of_this_host_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "local_address_to", lambda host: None)  # there is no default route
    assert interfaces.outward_address(FOUND) == "10.0.0.5"
    bridges = {name: FOUND[name] for name in ("lo", "docker0")}
    assert interfaces.outward_address(bridges) == "172.17.0.1"
    assert interfaces.outward_address({**bridges, "wlan0": ["10.2.0.5"], "virbr0": ["192.168.122.1"]}) == "10.2.0.5"


def test_the_default_routes_address_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "local_address_to", lambda host: "10.1.0.5" if "." in host else None)
    assert interfaces.outward_address(FOUND) == "10.1.0.5"


def test_several_hosts_of_which_no_address_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """They met in a file, or in a store of the caller's: anything but the loopback interface."""
    monkeypatch.setattr(interfaces, "outward_address", lambda found: "10.0.0.5")
    assert interfaces.variables({}, "", FOUND, ccl=False) == {"GLOO_SOCKET_IFNAME": "eth0"}
    monkeypatch.setattr(interfaces, "outward_address", lambda found: None)
    assert interfaces.variables({}, "", FOUND, ccl=False) == {}


def test_a_peers_name_that_means_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rank 0's host resolves MASTER_ADDR: anything but the loopback interface leads to other hosts."""
    monkeypatch.setattr(interfaces, "local_address_to", lambda host: "127.0.0.1")
    monkeypatch.setattr(interfaces, "outward_address", lambda found: "10.0.0.5")
    assert interfaces.variables({}, "node01", FOUND, ccl=False) == {"GLOO_SOCKET_IFNAME": "eth0"}


@pytest.mark.parametrize(
    ("address", "usable"),
    [
        ("10.0.0.5", True),
        ("169.254.0.5", True),
        ("fd00::5", True),
        ("127.0.1.1", False),
        ("::1", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("no address", False),
        (None, False),
    ],
)
def test_addresses_that_other_hosts_can_use(address: str | None, usable: bool) -> None:
    assert interfaces.is_for_other_hosts(address) is usable


def test_on_one_host_it_is_the_loopback_interface() -> None:
    assert interfaces.variables({}, None, FOUND, ccl=False) == {"GLOO_SOCKET_IFNAME": "lo"}
    only_ipv6 = {"eth0": ["fd00::1"], "lo": ["::1"]}
    assert interfaces.variables({}, None, only_ipv6, ccl=False) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert interfaces.variables({"NCCL_SOCKET_IFNAME": "^lo"}, None, FOUND, ccl=False) == {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize(
    ("given_", "gloo"),
    [
        ({}, "eth0"),
        ({"NCCL_SOCKET_IFNAME": "^lo,docker"}, "eth0"),
        ({"NCCL_SOCKET_IFNAME": "=eth1"}, "eth1"),
        ({"NCCL_SOCKET_IFNAME": "wlan"}, "eth0"),
        ({"GLOO_SOCKET_IFNAME": "^lo,docker,eth0"}, "eth1"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, None),
        ({"GLOO_SOCKET_IFNAME": "eth0,eth1"}, None),
    ],
)
def test_between_hosts(monkeypatch: pytest.MonkeyPatch, given_: dict[str, str], gloo: str | None) -> None:
    monkeypatch.setattr(interfaces, "local_address_to", lambda host: "10.0.0.5")
    found = interfaces.variables(given_, "10.0.0.9", FOUND, ccl=False)
    assert found.get("GLOO_SOCKET_IFNAME") == gloo


def test_oneccl_takes_the_same() -> None:
    found = interfaces.variables({"FI_TCP_IFACE": "x"}, None, FOUND, ccl=True)
    assert found == {"GLOO_SOCKET_IFNAME": "lo", "CCL_KVS_IFACE": "lo"}


@pytest.mark.parametrize(
    ("given_", "ccl"),
    [
        ({}, "eth0"),
        ({"NCCL_SOCKET_IFNAME": "=eth1"}, "eth1"),
        ({"GLOO_SOCKET_IFNAME": "^lo,docker,eth0"}, "eth1"),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, "eth1"),
        ({"GLOO_SOCKET_IFNAME": "eth1,eth0"}, "eth1"),
    ],
)
def test_oneccl_takes_the_same_between_hosts(monkeypatch: pytest.MonkeyPatch, given_: dict[str, str], ccl: str) -> None:
    monkeypatch.setattr(interfaces, "local_address_to", lambda host: "10.0.0.5")
    found = interfaces.variables(given_, "10.0.0.9", FOUND, ccl=True)
    assert (found["CCL_KVS_IFACE"], found["FI_TCP_IFACE"]) == (ccl, ccl)


def test_a_name_that_means_nothing_here() -> None:
    with pytest.raises(LaunchError, match=r"GLOO_SOCKET_IFNAME='ib' means none .* eth0 \(10.0.0.5\)"):
        interfaces.variables({"GLOO_SOCKET_IFNAME": "ib"}, None, FOUND, ccl=False)


@pytest.mark.parametrize("lo", [{}, {"lo": []}])
def test_gloo_without_a_loopback_address(lo: dict[str, list[str]]) -> None:
    found = {**lo, "eth0": ["10.0.0.5"]}
    text = r"gloo needs a loopback interface .* eth0 \(10.0.0.5\); set it up \(ip link set lo up; .* GLOO_SOCKET_IFNAME"
    with pytest.raises(LaunchError, match=text):
        interfaces.variables({}, None, found, ccl=False, gloo=True)
    assert interfaces.variables({}, None, found, ccl=True) == {}
    assert interfaces.variables({"GLOO_SOCKET_IFNAME": "eth0"}, None, found, ccl=False, gloo=True) == {}


def test_the_interface_that_is_named_has_no_address() -> None:
    with pytest.raises(LaunchError, match=r"GLOO_SOCKET_IFNAME='ib0': the interface ib0 of .* has no address; up with"):
        interfaces.variables({"GLOO_SOCKET_IFNAME": "ib0"}, None, FOUND, ccl=False)


def test_addresses_without_what_psutil_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a world without ``/proc``; ``test_without_proc.py`` has a real one."""
    expected = interfaces.addresses()

    def missing() -> None:
        raise FileNotFoundError(2, "No such file or directory", "/proc/net/dev")

    monkeypatch.setattr(psutil, "net_if_stats", missing)
    assert interfaces.addresses() == expected


def test_this_machine_has_a_loopback_interface() -> None:
    found = interfaces.addresses()
    assert any("127.0.0.1" in own for own in found.values())
    assert interfaces.local_address_to("127.0.0.1") == "127.0.0.1"
    assert interfaces.local_address_to("no-such-host.invalid") is None
