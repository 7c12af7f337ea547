"""The facts of a launch."""

from __future__ import annotations

import dataclasses
import re
from numbers import Integral
from typing import Any

import pytest

from comm_utils import LaunchError
from comm_utils.launch import LaunchInfo


def test_facts_do_not_change() -> None:
    found = LaunchInfo("test", 0, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.rank = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        found.sources["rank"] = "elsewhere"  # type: ignore[index]


def test_errors_name_the_launcher_where_no_source_is_known() -> None:
    with pytest.raises(LaunchError, match=r"rank: got 2 \(slurm\); expected 0 to 1 for a world size of 2 \(slurm\)"):
        LaunchInfo("slurm", 2, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"local_rank": -1}, r"local rank: got -1 \(here\); expected 0 or more"),
        ({"node_rank": -1}, r"node rank: got -1 \(here\); expected 0 or more"),
        ({"local_world_size": 0}, r"local world size: got 0 \(here\); expected at least 1"),
        ({"local_rank": 2, "local_world_size": 2}, r"local rank: got 2 \(here\); expected less than the local world"),
        ({"master_addr": ""}, r"master address: got '' \(here\); expected a host name or an IP address"),
        ({"master_port": 65536}, r"master port: got 65536 \(here\); expected 0 to 65535"),
    ],
)
def test_values_out_of_range(fields: dict[str, int], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        LaunchInfo("test", 0, 4, **fields, sources=dict.fromkeys(fields, "here"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"rank": "0"}, "rank: got '0', of type str (test); expected an integer"),
        ({"world_size": None}, "world size: got None, of type NoneType (test); expected an integer"),
        ({"rank": False}, "rank: got False, of type bool (test); expected an integer"),
        ({"local_rank": 0.0}, "local rank: got 0.0, of type float (test); expected an integer"),
        ({"master_port": "29500"}, "master port: got '29500', of type str (test); expected an integer"),
        ({"job_id": 17}, "job id: got 17, of type int (test); expected text"),
    ],
)
def test_values_of_other_types_are_refused(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=f"^{re.escape(message)}$"):
        LaunchInfo(**{"launcher": "test", "rank": 0, "world_size": 1, **facts})


@Integral.register
class Number:
    """As numpy's integers, which are no ``int``."""

    def __int__(self) -> int:
        return 1


def test_integers_of_other_types_become_pythons() -> None:
    number: Any = Number()
    found = LaunchInfo("test", number, 2, local_rank=number, master_port=number)
    assert [type(one) for one in (found.rank, found.local_rank, found.master_port)] == [int] * 3
    assert found == LaunchInfo("test", 1, 2, local_rank=1, master_port=1)
