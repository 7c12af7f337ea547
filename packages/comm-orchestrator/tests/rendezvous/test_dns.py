"""Names that cannot be looked up."""

from __future__ import annotations

import socket

import pytest

from comm_orchestrator import interfaces, rank_discovery
from comm_orchestrator.rendezvous.client import unreachable_reason, wait_for_listener
from comm_orchestrator.rendezvous.dns import resolve
from comm_orchestrator.rendezvous.protocol import Deadline
from comm_utils.errors import LaunchError

NO_NAMES = pytest.mark.parametrize("host", ["node..1", f"{'n' * 64}.example"])


@NO_NAMES
def test_what_is_no_host_name_does_not_resolve(host: str) -> None:
    with pytest.raises(socket.gaierror, match="it is no host name: "):
        resolve(host, 29500, 10)
    assert interfaces.local_address_to(host) is None
    assert not rank_discovery._different(host, "127.0.0.1")


@NO_NAMES
def test_the_variable_of_what_is_no_host_name_is_named(host: str) -> None:
    with pytest.raises(LaunchError, match=r"\(environment variable MASTER_ADDR\) does not resolve on .* no host name"):
        wait_for_listener(host, 29500, Deadline(0.2), "environment variable MASTER_ADDR")
    assert "no host name" in unreachable_reason(host, 29500)
