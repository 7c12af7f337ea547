"""The two hosts are hosts: names, addresses, processes and shared memory of their own."""

from __future__ import annotations

import sys

from launchers.hosts import Host
from launchers.processes import run

FACTS = """
import os, socket
print(socket.gethostname(), socket.gethostbyname(socket.gethostname()), len(os.listdir("/dev/shm")), os.getcwd())
print(*sorted(os.listdir("/sys/class/net")), "1" in os.listdir("/proc"))
"""
# One waits for a connection, the other one tries until it waits.
LISTEN = """
import socket
with socket.create_server(("", 4000)) as server:
    connection, (address, port) = server.accept()
    print(address)
"""
CONNECT = """
import socket, sys, time
for attempt in range(200):
    try:
        socket.create_connection((sys.argv[1], 4000), timeout=1).close()
        break
    except OSError:
        time.sleep(0.05)
"""


def test_facts(two_hosts: tuple[Host, Host]) -> None:
    for host, done in zip(
        two_hosts, run([host.command([sys.executable, "-c", FACTS]) for host in two_hosts], 30), strict=True
    ):
        assert done.returncode == 0, done
        first, second = done.stdout.splitlines()
        assert first.split()[:3] == [host.name, host.address, "0"]
        assert second.split() == ["eth0", "lo", "True"]


def test_each_reaches_the_other_by_name(two_hosts: tuple[Host, Host]) -> None:
    for here, there in (two_hosts, two_hosts[::-1]):
        listen = there.command([sys.executable, "-c", LISTEN])
        heard, connected = run([listen, here.command([sys.executable, "-c", CONNECT, there.name])], 30)
        assert heard.stdout == f"{here.address}\n", f"{heard}\n{connected}"
