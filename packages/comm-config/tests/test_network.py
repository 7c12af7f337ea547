"""The libraries' variables: from keys, from ``variables`` and from ``interface``."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_config import CclConfig, CommConfig, ConfigError, GlooConfig, NcclConfig, load_config, network_environment
from comm_config.library import LibraryConfig

LIBRARIES = [NcclConfig, GlooConfig, CclConfig]


def load(**network: Any) -> CommConfig:
    return load_config({"network": network}, environ={})


def variables(**network: Any) -> dict[str, str]:
    return network_environment(load(**network), {})


def problem(**network: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**network)
    return str(caught.value).removeprefix("configuration dict: network.")


def test_nothing_is_set_by_default() -> None:
    assert network_environment(CommConfig(), {}) == {}


@pytest.mark.parametrize("library", LIBRARIES)
def test_descriptions_name_the_variable(library: type[LibraryConfig]) -> None:
    keys = [key for key in library.model_fields if key != "variables"]
    assert [(library.model_fields[key].description or "").split(":")[0] for key in keys] == [
        library.variable_of(key) for key in keys
    ]
    assert all(re.fullmatch(library.variable_pattern(), library.variable_of(key)) for key in keys)


def test_every_key_becomes_its_variable() -> None:
    assert variables(
        nccl={"debug": "info", "ib_disable": False, "p2p_disable": True, "buffsize": 4194304, "net_gdr_level": 3},
        gloo={"socket_ifname": "eth0,eth1", "device_transport": "tcp"},
        ccl={
            "worker_count": 2,
            "worker_offload": 0,
            "atl_transport": "OFI",
            "kvs_iface": "eth0",
            "process_launcher": "none",
            "allreduce": "ring",
            "fi_provider": "tcp",
            "fi_tcp_iface": "eth0",
        },
    ) == {
        "NCCL_DEBUG": "INFO",
        "NCCL_IB_DISABLE": "0",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_BUFFSIZE": "4194304",
        "NCCL_NET_GDR_LEVEL": "3",
        "GLOO_SOCKET_IFNAME": "eth0,eth1",
        "GLOO_DEVICE_TRANSPORT": "TCP",
        "CCL_WORKER_COUNT": "2",
        "CCL_WORKER_OFFLOAD": "0",
        "CCL_ATL_TRANSPORT": "ofi",
        "CCL_KVS_IFACE": "eth0",
        "CCL_PROCESS_LAUNCHER": "none",
        "CCL_ALLREDUCE": "ring",
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": "eth0",
    }


def test_what_a_start_script_exports_can_be_written_down() -> None:
    """The exports that the documents this project implements tell users to write."""
    assert variables(
        nccl={
            "ib_disable": 0,
            "socket_ifname": "ib0",
            "algo": "Tree",
            "debug": "INFO",
            "debug_file": "logs/nccl.log",
            "buffsize": 8388608,
        }
    ) == {
        "NCCL_IB_DISABLE": "0",
        "NCCL_SOCKET_IFNAME": "ib0",
        "NCCL_ALGO": "Tree",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": "logs/nccl.log",
        "NCCL_BUFFSIZE": "8388608",
    }
    assert load(nccl={"debug": "TRACE"}).network.nccl.debug == "TRACE"


def test_an_interface_reaches_every_library() -> None:
    # "=": NCCL would take eth1 for a prefix, and eth10 too.
    assert variables(interface="eth1") == {
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "=eth1",
        "CCL_KVS_IFACE": "eth1",
        "FI_TCP_IFACE": "eth1",
    }


def test_a_library_may_name_another_interface() -> None:
    assert variables(
        interface="eth1",
        nccl={"socket_ifname": "ib0"},
        gloo={"variables": {"GLOO_SOCKET_IFNAME": "lo"}},
        ccl={"kvs_iface": "eth2"},
    ) == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "ib0",
        "CCL_KVS_IFACE": "eth2",
        "FI_TCP_IFACE": "eth1",
    }


@pytest.mark.parametrize("name", ["^lo", "=eth0", "eth0,eth1", "a b", "", "much_too_long_name", "a/b", "eth0\n"])
def test_an_interface_is_one_exact_name(name: str) -> None:
    assert problem(interface=name).startswith(f"interface: got {name!r}, expected the exact name of one interface")


@pytest.mark.parametrize("name", ["lo", "eth0", "enp0s31f6", "ib0.8001", "eth0:1"])
def test_names_of_interfaces(name: str) -> None:
    assert load(interface=name).network.interface == name


def test_variables_without_a_key() -> None:
    assert variables(
        nccl={"variables": {"NCCL_RAS_ENABLE": 0, "TORCH_NCCL_BLOCKING_WAIT": True}},
        gloo={"variables": {"TORCH_GLOO_LAZY_INIT": "1"}},
        ccl={"variables": {"CCL_CHUNK_SIZE": 16777216, "FI_LOG_LEVEL": "warn"}},
    ) == {
        "NCCL_RAS_ENABLE": "0",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "TORCH_GLOO_LAZY_INIT": "1",
        "CCL_CHUNK_SIZE": "16777216",
        "FI_LOG_LEVEL": "warn",
    }


def test_a_key_wins_over_variables() -> None:
    assert variables(nccl={"debug": "WARN", "variables": {"NCCL_DEBUG": "INFO"}}) == {"NCCL_DEBUG": "WARN"}


@pytest.mark.parametrize(
    ("library", "name", "message"),
    [
        ("nccl", "CCL_X", "'CCL_X' does not belong here; expected under network.ccl.variables"),
        ("nccl", "FI_PROVIDER", "'FI_PROVIDER' does not belong here; expected under network.ccl.variables"),
        ("gloo", "NCCL_X", "'NCCL_X' does not belong here; expected under network.nccl.variables"),
        ("gloo", "TORCH_NCCL_X", "'TORCH_NCCL_X' does not belong here; expected under network.nccl.variables"),
        ("ccl", "GLOO_X", "'GLOO_X' does not belong here; expected under network.gloo.variables"),
        (
            "nccl",
            "DEBUG",
            "'DEBUG' is no variable of this library; expected the full name, NCCL_NAME or TORCH_NCCL_NAME",
        ),
        ("nccl", "nccl_debug", "'nccl_debug' is no variable of this library; expected the full name, NCCL_NAME or"),
        ("ccl", "CCL_a=b", "'CCL_a=b' is no variable of this library; expected the full name, CCL_NAME or FI_NAME"),
        (
            "gloo",
            "GLOO_",
            "'GLOO_' is no variable of this library; expected the full name, GLOO_NAME or TORCH_GLOO_NAME",
        ),
        ("gloo", "LD_PRELOAD", "'LD_PRELOAD' is no variable of this library"),
    ],
)
def test_variables_of_others_are_refused(library: str, name: str, message: str) -> None:
    said = problem(**{library: {"variables": {name: "1"}}})
    assert said.startswith(f"{library}.variables: got {{{name!r}: '1'}}, {message}")


@pytest.mark.parametrize("value", ["", [], None, 1.5, "a\0b"])
def test_values_that_no_variable_can_have(value: object) -> None:
    assert problem(nccl={"variables": {"NCCL_X": value}}).startswith(
        f"nccl.variables.NCCL_X: got {value!r}, expected a string"
    )


@given(st.sets(st.sampled_from(["NCCL_DEBUG", "NCCL_ALGO", "CCL_KVS_IFACE", "GLOO_SOCKET_IFNAME", "PATH"])))
def test_what_the_environment_holds_wins(present: set[str]) -> None:
    config = load(interface="eth0", nccl={"debug": "INFO", "variables": {"NCCL_ALGO": "Tree"}})
    environ = dict.fromkeys(present, "")
    wanted = network_environment(config, {})
    assert network_environment(config, environ) == {key: text for key, text in wanted.items() if key not in present}
    assert environ == dict.fromkeys(present, "")


def test_the_result_can_be_put_into_an_environment(values_of: Any, schema: Any) -> None:
    @given(values_of(schema["properties"]["network"]))
    def check(network: dict[str, Any]) -> None:
        wanted = network_environment(load(**network), {})
        assert all(re.fullmatch("[A-Z][A-Z0-9_]*", name) for name in wanted)
        assert all(text.strip() and "\0" not in text for text in wanted.values())

    check()
