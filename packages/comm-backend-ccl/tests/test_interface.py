"""The interface for oneCCL, whatever names this host and its interfaces have."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys

import pytest

from comm_backend_ccl import provider
from comm_backend_ccl.interface import interface_between

_CCL = provider.availability()["ccl"]
_MAKES_A_GROUP = """
from comm_backend_ccl import oneccl_library

known = {}
oneccl_library.initialize(0, 1, "lo", False)
oneccl_library.create(1, 0, known.get, known.__setitem__)
"""


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


@pytest.mark.skipif(not _CCL.usable, reason=_CCL.reason)
def test_a_loopback_interface_without_an_ipv4_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("FI_TCP_IFACE", "FI_PROVIDER"):
        monkeypatch.delenv(variable, raising=False)
    prepare = 'ip link set lo up && ip address del 127.0.0.1/8 dev lo && exec "$@"'
    apart = ["unshare", "--net", "sh", "-c", prepare, "sh"]
    if not shutil.which("unshare") or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a network namespace")
    command = [*apart, sys.executable, "-c", _MAKES_A_GROUP]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert "oneCCL could not make a group: " in ended.stderr
    assert "; the loopback interface lo has no IPv4 address: give it one (ip address add 127" in ended.stderr


def test_an_interface_without_an_address_is_named_and_one_with_ipv6_alone_is_not() -> None:
    prepare = (
        "ip link add none type veth peer name six && ip link set six up && "
        'ip address add 2001:db8::1/64 dev six nodad && exec "$@"'
    )
    apart = ["unshare", "--net", "sh", "-c", prepare, "sh"]
    if not shutil.which("unshare") or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a network namespace with interfaces of its own")
    program = "from comm_backend_ccl.interface import missing_address as m; print([m('none'), m('six')])"
    ended = subprocess.run([*apart, sys.executable, "-c", program], capture_output=True, text=True, check=False)
    said = "the interface none has no address: give it one, or name another interface in FI_TCP_IFACE"
    assert ended.stdout.strip() == str([said, ""]), ended.stderr
