"""The facts that the ranks agree on, from the records of all of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from comm_config import resolve
from comm_orchestrator.rendezvous import join
from comm_orchestrator.rendezvous.records import RankRecord
from comm_orchestrator.selector import Choice
from comm_utils.launch import LaunchInfo


def test_an_address_of_a_host_is_one_that_the_others_can_use() -> None:
    """A rank on rank 0's host may have reached rank 0 over loopback."""
    came_from = [("a", None), ("a", "127.0.0.1"), ("b", "192.0.2.2"), ("c", "::1"), ("c", "192.0.2.3")]
    records = [
        RankRecord(rank, len(came_from), host, host, 100 + rank, address=address)
        for rank, (host, address) in enumerate(came_from)
    ]
    agreed = join._judge(records, Choice("gloo", "named"))
    assert isinstance(agreed, dict)
    assert agreed["addresses"] == [None, "192.0.2.2", "192.0.2.3"]


@pytest.mark.parametrize(
    ("rank", "addresses", "peer"),
    [
        (0, ["192.0.2.1", "192.0.2.2"], "192.0.2.2"),
        (1, ["192.0.2.1", "192.0.2.2"], "192.0.2.1"),
        (1, [None, "192.0.2.2"], "node01"),
        (0, ["192.0.2.1"], None),
    ],
)
def test_a_peer_is_on_another_host(rank: int, addresses: Sequence[str | None], peer: str | None) -> None:
    """The launcher may number the hosts in another order than the ranks do."""
    launch = LaunchInfo("torchrun", rank, 2, node_rank=1 - rank, master_addr="node01")
    assert join._peer(launch, [0, 1], addresses) == peer


def test_a_program_without_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Python is embedded in another program."""
    monkeypatch.setattr(sys, "argv", [])
    assert join._own_record(LaunchInfo("none", 0, 1), resolve(environ={}), "cpu").program == ""
