"""The libraries' environment variables that the network section sets."""

from __future__ import annotations

from collections.abc import Mapping

from comm_config.models import CommConfig

__all__ = ["network_environment"]


def network_environment(config: CommConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set before NCCL, gloo, oneCCL or libfabric is first used.

    Flags are ``"1"`` and ``"0"``. Nothing is changed here.

    :param config: the settings; only ``config.network`` matters
    :param environ: the environment of the process; a variable it holds, even an empty one, is left out
    """
    network = config.network
    wanted = _interface_variables(network.interface) if network.interface is not None else {}
    for library in (network.nccl, network.gloo, network.ccl):
        wanted.update(library.set_variables())
    return {name: value for name, value in wanted.items() if name not in environ}


def _interface_variables(interface: str) -> dict[str, str]:
    return {
        "GLOO_SOCKET_IFNAME": interface,
        # NCCL takes names for prefixes (eth1 would admit eth10) unless "=" says otherwise.
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "CCL_KVS_IFACE": interface,
        "FI_TCP_IFACE": interface,
    }
