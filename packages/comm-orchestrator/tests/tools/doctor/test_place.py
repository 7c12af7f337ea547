"""Launcher, names, interfaces, port and backends: what is wrong is found, with a remedy."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

import comm_config
from comm_orchestrator import selector
from comm_orchestrator.tools.doctor import launch, network, software
from comm_orchestrator.tools.doctor.finding import Finding
from comm_orchestrator.tools.doctor.time_limit import StuckError
from comm_utils import Availability
from comm_utils.launch import LaunchInfo

HERE = {"lo": ["127.0.0.1", "::1"], "eth0": ["192.0.2.5"], "eth1": []}
SETTINGS = comm_config.resolve(environ={})


def over_hosts(rank: int = 1, **more: Any) -> LaunchInfo:
    return LaunchInfo("slurm", rank, 2, 0, 1, rank, **{"master_addr": "node01", "master_port": 29500, **more})


def levels(findings: list[Finding]) -> list[str]:
    return [one.level for one in findings]


# --- launcher


def test_nobody_launched_it() -> None:
    info, found = launch.find({}, SETTINGS)
    assert info is not None
    assert levels(found) == ["ok"]
    assert launch.as_table(info)["rank"] == {"value": 0, "source": "default: no launcher was found"}
    assert launch.as_table(info)["master_addr"] == {"value": None, "source": "not known"}


def test_half_a_launcher() -> None:
    info, (one,) = launch.find({"WORLD_SIZE": "2"}, SETTINGS)
    assert info is None
    assert one.level == "problem"
    assert "RANK is not set" in one.found
    assert one.remedy.startswith("set both")


def test_variables_that_are_left_over() -> None:
    info, (one,) = launch.find({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, SETTINGS)
    assert info is not None
    assert (one.level, one.remedy) == ("warning", "unset MASTER_ADDR MASTER_PORT, or set RANK and WORLD_SIZE as well")


def test_launchers_that_contradict_each_other() -> None:
    mpi = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
    _, (one, *more) = launch.find({"RANK": "0", "WORLD_SIZE": "1", **mpi}, SETTINGS)
    assert set(levels([one, *more])) == {"warning"}
    assert "world size 4 (environment variable PMI_SIZE)" in one.found
    assert one.remedy.startswith("unset")


# --- names


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What names resolve to; all others to nothing."""
    known: dict[str, list[str]] = {"node02": ["192.0.2.5"], "node01": ["192.0.2.4"]}

    def resolve(name: str) -> list[str]:
        if name not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return known[name]

    monkeypatch.setattr(network, "resolve", resolve)
    monkeypatch.setattr(socket, "gethostname", lambda: "node02")
    return known


def test_good_names(hosts: dict[str, list[str]]) -> None:
    assert levels(network.check_host_names(over_hosts(), HERE, 5)) == ["ok", "ok"]


def test_a_master_that_does_not_resolve(hosts: dict[str, list[str]]) -> None:
    del hosts["node01"]
    own, master = network.check_host_names(over_hosts(), HERE, 5)
    assert (own.level, master.level) == ("ok", "problem")
    assert "node01 (slurm) does not resolve on node02 (Name or service not known)" in master.found
    assert master.remedy.startswith("set MASTER_ADDR to")


def test_the_loopback_trap(hosts: dict[str, list[str]]) -> None:
    hosts["node02"] = ["127.0.1.1"]
    own, _ = network.check_host_names(over_hosts(), HERE, 5)
    assert own.level == "warning"
    assert own.remedy == "in /etc/hosts, replace the line of node02 by '192.0.2.5 node02'"
    hosts["node01"] = ["127.0.1.1"]
    _, master = network.check_host_names(over_hosts(), HERE, 5)
    assert master.level == "problem"
    assert "every host would look for rank 0 on itself" in master.found
    _, master = network.check_host_names(over_hosts(rank=0), HERE, 5)
    assert master.level == "warning"
    assert "MASTER_ADDR to an address of rank 0's host, such as 192.0.2.5" in master.remedy
    hosts["localhost"] = ["127.0.0.1"]
    assert levels(network.check_host_names(over_hosts(rank=0, master_addr="localhost"), HERE, 5)) == [
        "warning",
        "problem",
    ]
    on_one_host = LaunchInfo("torchrun", 0, 2, 0, 2, 0, "localhost", 29500)
    assert levels(network.check_host_names(on_one_host, HERE, 5)) == ["ok", "ok"]


def test_own_name_without_an_address_of_this_host(hosts: dict[str, list[str]]) -> None:
    hosts["node02"] = ["198.51.100.1"]
    assert levels(network.check_host_names(over_hosts(), HERE, 5)) == ["warning", "ok"]
    del hosts["node02"]
    own, _ = network.check_host_names(over_hosts(), HERE, 5)
    assert (own.level, own.remedy) == ("warning", "add the line '192.0.2.5 node02' to /etc/hosts")


def test_a_name_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(limit_s: float, call: object, doing: str) -> None:
        raise StuckError(f"{doing} did not come back within {limit_s:g} s")

    monkeypatch.setattr(network, "within", never)
    _, master = network.check_host_names(over_hosts(), HERE, 5)
    assert master.level == "problem"
    assert "did not come back within 5 s" in master.found


# --- interfaces


def test_the_way_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "local_address_to", lambda host: "192.0.2.5")
    (one,) = network.check_interfaces(over_hosts(), "node01", {}, HERE, nccl=False)
    assert (one.level, one.found) == ("ok", "eth0 (192.0.2.5) leads to the master node01")
    assert [one["name"] for one in network.interface_rows("node01", HERE) if one["leads_to_master"]] == ["eth0"]
    monkeypatch.setattr(network, "local_address_to", lambda host: None)
    (one,) = network.check_interfaces(over_hosts(), "node01", {}, HERE, nccl=False)
    assert one.level == "problem"
    assert "ip route" in one.remedy


@pytest.mark.parametrize(
    ("variables", "nccl", "expected"),
    [
        ({"GLOO_SOCKET_IFNAME": "ib0"}, False, ["problem"]),
        ({"GLOO_SOCKET_IFNAME": "eth0,ib0"}, False, ["ok"]),  # read as NCCL would
        ({"GLOO_SOCKET_IFNAME": "eth1"}, False, ["problem"]),  # which has no address
        ({"NCCL_SOCKET_IFNAME": "ib"}, False, ["warning"]),
        ({"NCCL_SOCKET_IFNAME": "ib"}, True, ["problem"]),
        ({"NCCL_SOCKET_IFNAME": "eth1"}, True, ["problem"]),
        ({"NCCL_SOCKET_IFNAME": "^lo,docker"}, True, ["ok"]),
        ({"CCL_KVS_IFACE": "ib0", "FI_TCP_IFACE": "eth0"}, False, ["warning"]),
    ],
)
def test_variables_that_name_interfaces(variables: dict[str, str], nccl: bool, expected: list[str]) -> None:
    found = network.check_interfaces(LaunchInfo("none", 0, 1), None, variables, HERE, nccl)
    assert levels(found) == expected
    if expected != ["ok"]:
        name = next(iter(variables))
        assert f"{name}=" in found[0].found
        assert found[0].remedy == f"unset {name}, or set it to one of eth0, lo"


def test_a_master_address_that_is_no_host_name() -> None:
    launch = LaunchInfo("environment", 0, 2, master_addr="node..1")
    found = network.check_host_names(launch, HERE, 10.0)[-1]
    assert found.level == "problem"
    assert found.found.startswith("the master address node..1 (environment) does not resolve on ")
    assert network.check_port(launch, {}, 1)[0].level == "ok"


# --- port


def test_the_port(free_port: int) -> None:
    alone = LaunchInfo("none", 0, 1, 0, 1, 0)
    job = LaunchInfo("torchrun", 0, 2, 0, 2, 0, "127.0.0.1", free_port)
    assert levels(network.check_port(alone, {}, free_port)) == ["ok"]
    assert levels(network.check_port(job, {}, 1)) == ["ok"]
    with socket.create_server(("127.0.0.1", free_port)):
        (one,) = network.check_port(job, {}, 1)
        assert one.level == "problem"
        assert f"port {free_port} of 127.0.0.1, where rank 0 is to listen, is in use by pid {os.getpid()}," in one.found
        assert "MASTER_PORT" in one.remedy
        assert levels(network.check_port(alone, {}, free_port)) == ["warning"]
        with_address = LaunchInfo("environment", 0, 1, 0, 1, 0, "127.0.0.1", free_port)
        assert levels(network.check_port(with_address, {}, 1)) == ["warning"]
        assert levels(network.check_port(job, {"TORCHELASTIC_USE_AGENT_STORE": "True"}, 1)) == ["ok"]
        assert network.check_port(LaunchInfo("torchrun", 1, 2, 1, 2, 0, "127.0.0.1", free_port), {}, 1) == []


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        chosen: int = probe.getsockname()[1]
        return chosen


# --- backends

YES, NO = Availability(True, "here"), Availability(False, "no fabric", "install one")
BROKEN = Availability(False, "x:y cannot be imported (ImportError: no libz)", "reinstall the package")


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software.devices, "device_type", lambda: "cpu")
    for available, expected in (
        ({"gloo": YES}, ["ok"]),
        ({"gloo": YES, "x": BROKEN}, ["warning", "ok"]),
        ({"gloo": NO}, ["problem"]),
    ):
        monkeypatch.setattr(selector, "available_backends", lambda available=available: available)
        found = software.check_backends(available, SETTINGS)
        assert levels(found) == expected
        assert all(one.remedy for one in found if one.level != "ok")


def test_an_accelerator_that_nothing_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software.devices, "device_type", lambda: "cuda")
    available = {"gloo": YES, "nccl": NO}
    monkeypatch.setattr(selector, "available_backends", lambda: available)
    warning, _ = software.check_backends(available, SETTINGS)
    assert (warning.level, warning.remedy) == ("warning", "install one")
    assert "gloo is used instead" in warning.found


def test_a_backend_that_is_asked_for_and_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selector, "available_backends", lambda: {"gloo": YES})
    settings = comm_config.resolve({}, environ={"COMM_PROCESS_GROUP__BACKEND": "ccl"})
    (one,) = software.check_backends({"gloo": YES}, settings)
    assert one.level == "problem"
    assert "environment variable COMM_PROCESS_GROUP__BACKEND" in one.found
    assert one.remedy == "install it with: pip install 'comm-orchestrator[ccl]'"
