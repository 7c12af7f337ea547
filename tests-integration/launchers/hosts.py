"""Two or three hosts on one machine: namespaces with their own name, network, processes and shared memory.

Each host lives as long as one process that waits for the end of its input, which is first in a namespace of processes.
The kernel ends the others with it, and removes the namespaces and the network between them: so nothing is left,
not even of daemons, and not even if this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers.processes import Command, clean_environment, marked

# Reserved for documentation, so that no real network has these addresses.
NETWORK = "192.0.2"
TOOLS = ("unshare", "nsenter", "ip", "mount", "hostname")

# Nobody outside sees the other /etc/hosts. /sys shows the interfaces of the network in which it was mounted. The shell
# waits, because the first process of a namespace has to reap those that lost their parents, and hands its input on as
# file 3, because it would give its background job an empty one.
HOLDER = """
set -e
exec 3<&0
hostname "$1"
mount --bind "$2" /etc/hosts
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
echo ready
cat <&3 &
wait
"""
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
UNSHARE = ("unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc")


@dataclass(frozen=True)
class Host:
    """A name and an IPv4 address, which the other host can reach; ``pid`` is in all of its namespaces."""

    name: str
    address: str
    pid: int

    def command(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Command:
        """``arguments`` as a command on this host, in the current folder."""
        enter = ["nsenter", "--target", str(self.pid), *NAMESPACES, "env", f"--chdir={Path.cwd()}"]
        return Command([*enter, *arguments], environment or {})


def missing() -> str:
    """Why there can be no hosts here, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if lacking := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"network namespaces need {', '.join(lacking)}: apt-get install iproute2 util-linux mount hostname"
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        return "this machine does not let root make namespaces"
    return ""


@contextlib.contextmanager
def two_hosts(first: str, second: str, own_address: str = "") -> Iterator[tuple[Host, Host]]:
    """Two hosts of these names, with one network between them. Both resolve both names, and know no others.

    Args:
        own_address: of a host's own name on itself; empty: its address in the network.
    """
    with _hosts((first, second), own_address) as (a, b):
        link = ["ip", "link", "add", "eth0", "netns", str(a.pid), "type", "veth", "peer", "eth0", "netns", str(b.pid)]
        _call(Command(link))
        _set_up(a, b)
        yield a, b


@contextlib.contextmanager
def three_hosts(first: str, second: str, third: str) -> Iterator[tuple[Host, Host, Host]]:
    """Three hosts on one network, whose switch is a bridge on the first."""
    with _hosts((first, second, third)) as (a, b, c):
        _call(a.command(["ip", "link", "add", "eth0", "type", "bridge"]))
        for port, host in (("port1", b), ("port2", c)):
            link = ["ip", "link", "add", port, "netns", str(a.pid), "type", "veth", "peer", "eth0", "netns"]
            _call(Command([*link, str(host.pid)]))
            _call(a.command(["ip", "link", "set", port, "master", "eth0", "up"]))
        _set_up(a, b, c)
        yield a, b, c


@contextlib.contextmanager
def _hosts(names: Sequence[str], own_address: str = "") -> Iterator[list[Host]]:
    addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
        mark = stack.enter_context(marked())
        tables = {name: folder / name for name in names}
        for own, table in tables.items():
            known = {**addresses, own: own_address or addresses[own]}
            table.write_text("127.0.0.1 localhost\n" + "".join(f"{known[name]} {name}\n" for name in names))
        yield [Host(name, addresses[name], stack.enter_context(_held(name, tables[name], mark))) for name in names]


def _set_up(*hosts: Host) -> None:
    for host in hosts:
        _call(host.command(["ip", "address", "add", f"{host.address}/24", "dev", "eth0"]))
        _call(host.command(["ip", "link", "set", "eth0", "up"]))


@contextlib.contextmanager
def _held(name: str, table: Path, mark: Mapping[str, str]) -> Iterator[int]:
    holder = subprocess.Popen(
        [*UNSHARE, "sh", "-c", HOLDER, "holder", name, str(table)],
        env={**clean_environment(), **mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert holder.stdout
    assert holder.stderr
    try:
        if holder.stdout.readline() != "ready\n":
            raise RuntimeError(f"no host {name}: {holder.stderr.read()}")
        # unshare itself stays outside of the namespace of processes.
        yield int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text())
    finally:
        holder.communicate(timeout=10)


def _call(command: Command) -> None:
    subprocess.run(command.arguments, check=True, capture_output=True, text=True)
