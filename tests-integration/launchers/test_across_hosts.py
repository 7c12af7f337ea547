"""What only several hosts show: interfaces, addresses to listen at, and who did not come from where."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comm_utils.testing import patience
from launchers import hosts, torchrun
from launchers.hosts import Host
from launchers.launcher import Launcher, reports
from launchers.processes import run

SCRIPT = """
import json, os, socket, sys, time
import psutil, torch
import comm_orchestrator as dist

start = time.monotonic()
report = {"rank": int(os.environ["RANK"]), "host": socket.gethostname(), "pid": os.getpid()}
try:
    dist.init_distributed("gloo", verbose=False, config={"timeouts": {"init_s": float(sys.argv[1])}})
    t = torch.ones(2) * (dist.get_rank() + 1)
    dist.all_reduce(t)
    report |= {"t": t.tolist(), "local": os.environ["LOCAL_RANK"], "interface": os.environ.get("GLOO_SOCKET_IFNAME")}
    own = psutil.Process().net_connections("tcp")
    report["listens"] = sorted({one.laddr.ip for one in own if one.status == psutil.CONN_LISTEN})
    dist.barrier()
    dist.destroy_process_group()
except dist.CommError as error:
    report["error"] = f"{type(error).__name__}: {error}"
report["took_s"] = time.monotonic() - start
print(json.dumps(report), flush=True)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "program.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def two_debians() -> Iterator[tuple[Host, Host]]:
    """Two hosts that resolve their own name as Debian's installer writes it into /etc/hosts."""
    if reason := hosts.missing():
        pytest.skip(reason)
    with hosts.two_hosts("node01", "node02", "127.0.1.1") as both:
        yield both


def start(
    hosts: tuple[Host, ...], script: Path, *changes: dict[str, str], limit_s: float = 20, **common: str
) -> list[dict[str, Any]]:
    """One rank for each of ``changes``, on the hosts in turn; what they said, by rank."""
    commands = []
    for rank, change in enumerate(changes):
        variables = {"RANK": str(rank), "WORLD_SIZE": str(len(changes)), "MASTER_PORT": "29500"}
        variables |= {"MASTER_ADDR": hosts[0].name, **common, **change}
        program = [sys.executable, str(script), str(limit_s)]
        commands.append(hosts[rank % len(hosts)].command(program, variables))
    return reports(run(commands, 60))


def test_gloo_takes_the_interface_between_the_hosts_and_nothing_listens_wider(
    two_hosts: tuple[Host, Host], script: Path
) -> None:
    for found, host in zip(start(two_hosts, script, {}, {}), two_hosts, strict=True):
        assert found["t"] == [3.0, 3.0]
        assert (found["local"], found["interface"]) == ("0", "eth0")
        assert found["listens"] == [host.address]


def test_hosts_that_have_link_local_addresses_alone(script: Path) -> None:
    """gloo would take the loopback interface, which leads nowhere."""
    if reason := hosts.missing():
        pytest.skip(reason)
    with hosts.two_hosts("hostA", "hostB") as both:
        for number, host in enumerate(both, 1):
            change = f"ip address flush dev eth0 && ip address add fe80::{number}/64 dev eth0 nodad"
            subprocess.run(host.command(["sh", "-c", change]).arguments, check=True)
        for found in start(both, script, {}, {}, {}, MASTER_ADDR="fe80::1%eth0"):
            assert (found.get("t"), found.get("interface")) == ([6.0, 6.0], "eth0"), found


def test_one_host_needs_no_network(two_hosts: tuple[Host, Host], script: Path) -> None:
    """Even where the host's name means an address of the network, gloo stays on the loopback interface."""
    for found in start(two_hosts[:1], script, {}, {}, MASTER_ADDR="localhost"):
        assert found["t"] == [3.0, 3.0]
        assert found["interface"] == "lo"
        assert found["listens"] == (
            ["127.0.0.1", "::"] if found["rank"] == 0 and "::" in found["listens"] else ["127.0.0.1"]
        )


@pytest.mark.parametrize(
    ("variables", "interface"),
    [
        ({"NCCL_SOCKET_IFNAME": "^lo,docker"}, "eth0"),
        ({"GLOO_SOCKET_IFNAME": "^lo,docker"}, "eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "eth0"),
        ({"GLOO_SOCKET_IFNAME": "=eth0"}, "eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "eth0"),
        ({"COMM_NETWORK__INTERFACE": "eth0"}, "eth0"),
    ],
)
def test_interfaces_that_somebody_named(
    two_hosts: tuple[Host, Host], script: Path, variables: dict[str, str], interface: str
) -> None:
    for found in start(two_hosts, script, {}, {}, **variables):
        assert found["t"] == [3.0, 3.0]
        assert found["interface"] == interface


def test_an_interface_that_is_only_on_one_host(two_hosts: tuple[Host, Host], script: Path) -> None:
    first, second = start(two_hosts, script, {}, {"GLOO_SOCKET_IFNAME": "ib0"})
    assert second["error"].startswith("LaunchError: GLOO_SOCKET_IFNAME='ib0' means none of the interfaces of ")
    assert f"eth0 ({two_hosts[1].address}" in second["error"]
    assert f"rank 1 (pid {second['pid']} on {two_hosts[1].name}, program.py) cannot go on" in first["error"]


def test_ranks_that_never_came_and_where_the_others_came_from(two_hosts: tuple[Host, Host], script: Path) -> None:
    """Ranks 0 and 2 on one host and rank 1 on the other, of six."""
    names = [host.name for host in two_hosts]
    for found in start(two_hosts, script, {}, {}, {}, limit_s=5, WORLD_SIZE="6"):
        assert found["error"].startswith("CommTimeoutError: init_distributed: ranks 3-5 of 6 did not come within 5 s (")
        assert f"ranks 0, 2 on {names[0]}" in found["error"]
        assert f"rank 1 on {names[1]}" in found["error"]
        assert found["took_s"] < 5 + 2 * patience()


def test_a_master_address_where_nobody_is(two_hosts: tuple[Host, Host], script: Path) -> None:
    """A neighbour's address that no host has: nothing answers, on either side."""
    nobody = two_hosts[0].address.rpartition(".")[0] + ".77"
    first, second = start(two_hosts, script, {}, {}, limit_s=4, MASTER_ADDR=nobody)
    assert f"rank 0 is not to be found at {nobody}:29500 (environment variable MASTER_ADDR), which " in second["error"]
    assert "did not come within 4 s" in first["error"]
    assert f"rank 0 runs on {two_hosts[0].name}, but {nobody}:29500, where the others look for it, " in first["error"]
    assert max(first["took_s"], second["took_s"]) < 4 + 2 * patience()


def test_a_name_that_only_one_host_knows(two_hosts: tuple[Host, Host], script: Path) -> None:
    """As a host's own name is to itself, which Debian resolves to 127.0.1.1."""
    first, second = start(two_hosts, script, {}, {"MASTER_ADDR": "localhost"}, limit_s=4)
    assert "rank 0 is not to be found at localhost:29500" in second["error"]
    assert f"rank 1 of 2 did not come within 4 s (rank 0 on {two_hosts[0].name} came)" in first["error"]
    # The other way round it is no mistake: rank 0 cannot know how the others call its host.
    for found in start(two_hosts, script, {"MASTER_ADDR": "localhost"}, {}):
        assert found["t"] == [3.0, 3.0]


def test_a_host_whose_own_name_means_the_loopback_interface(two_debians: tuple[Host, Host], script: Path) -> None:
    """Ranks 0 and 2 are on one host, and rank 2 reaches rank 0 over loopback, which leads rank 1 nowhere."""
    for found in start(two_debians, script, {}, {}, {}):
        assert (found.get("t"), found.get("interface")) == ([6.0, 6.0], "eth0"), found


@pytest.mark.parametrize("ranks", [2, 4])
def test_torchrun_on_hosts_whose_own_names_mean_the_loopback_interface(
    two_debians: tuple[Host, Host], script: Path, ranks: int
) -> None:
    """The store is in torchrun's agent, so that rank 0 connects to it over loopback as well."""
    program = [sys.executable, str(script), "20"]
    for found in reports(torchrun.over_hosts(two_debians).run(program, ranks)):
        assert (found.get("t"), found.get("interface")) == ([ranks * (ranks + 1) / 2] * 2, "eth0"), found


MPI_SCRIPT = """
import json, os, sys, torch
for name in [name for name in os.environ if name.startswith(sys.argv[1])]:
    del os.environ[name]
import comm_orchestrator as dist

report = {"rank": int(os.environ.get("PMIX_RANK", os.environ.get("PMI_RANK", "0")))}
try:
    dist.init_distributed("gloo", verbose=False, auto_mpi_discovery=sys.argv[2] == "yes", timeout=20)
    t = torch.ones(2) * (dist.get_rank() + 1)
    dist.all_reduce(t)
    report |= {"t": t.tolist(), "mpi": "mpi4py" in sys.modules, "local": os.environ["LOCAL_RANK"]}
    dist.destroy_process_group()
except dist.CommError as error:
    report["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(report), flush=True)
"""


@pytest.mark.parametrize("launcher", ["openmpi"], indirect=True)
def test_a_launcher_whose_variables_tell_no_size(launcher: Launcher, tmp_path: Path) -> None:
    """PMIx sets the rank alone: MPI is asked."""
    program = tmp_path / "program.py"
    program.write_text(MPI_SCRIPT)
    found = reports(launcher.run([sys.executable, str(program), "OMPI_COMM_WORLD", "yes"], 2))
    assert [(one["t"], one["mpi"], one["local"]) for one in found] == [([3.0, 3.0], True, "0"), ([3.0, 3.0], True, "1")]


@pytest.mark.parametrize("launcher", ["openmpi"], indirect=True)
def test_a_port_that_is_ours_to_choose_is_a_free_one(launcher: Launcher, tmp_path: Path) -> None:
    """Rank 0 tells the others through MPI where it listens, and may listen anywhere."""
    program = tmp_path / "program.py"
    program.write_text(MPI_SCRIPT)
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 29500)):
        found = reports(launcher.run([sys.executable, str(program), "OMPI_COMM_WORLD", "yes"], 2))
        assert [one["t"] for one in found] == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("launcher", ["mpich-in-salloc"], indirect=True)
def test_an_mpi_over_several_hosts(launcher: Launcher, tmp_path: Path) -> None:
    """Its variables do not say where rank 0 is: MPI is asked, or the user is told what to set."""
    program = tmp_path / "program.py"
    program.write_text(MPI_SCRIPT)
    found = reports(launcher.run([sys.executable, str(program), "NOTHING", "yes"], 4))
    assert [(one["t"], one["mpi"]) for one in found] == [([10.0, 10.0], True)] * 4
    for one in reports(launcher.run([sys.executable, str(program), "NOTHING", "no"], 4)):
        assert one["error"].startswith("LaunchError: init_distributed: 4 ranks were announced")
        assert "set MASTER_ADDR to the host of rank 0" in one["error"]


@pytest.mark.parametrize("launcher", ["mpich"], indirect=True)
def test_variables_that_were_left_over_are_used_with_a_warning(launcher: Launcher, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, logging, os\nimport comm_orchestrator as dist\n"
        "said = []\nhandler = logging.Handler(logging.WARNING)\n"
        "handler.emit = lambda record: said.append(record.getMessage())\n"
        "logging.getLogger('comm').addHandler(handler)\n"
        "dist.init_distributed('gloo', verbose=False)\n"
        "report = {'rank': int(os.environ['PMI_RANK']), 'size': dist.get_world_size(), 'said': said}\n"
        "print(json.dumps(report), flush=True)\ndist.destroy_process_group()\n"
    )
    found = reports(launcher.run([sys.executable, str(program)], 2, {"RANK": "0", "WORLD_SIZE": "1"}))
    assert [one["size"] for one in found] == [1, 1]
    for one in found:
        (warning,) = one["said"]
        assert warning.startswith("init_distributed: mpich says ")
        assert "world size 2 (environment variable PMI_SIZE)" in warning
        assert warning.endswith("used")
