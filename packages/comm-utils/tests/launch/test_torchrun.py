"""torchrun, and the variables of torch's ``env://``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_utils import LaunchError
from comm_utils.launch import LaunchInfo, discover

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0.example",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "PATH": "/bin",
}
FIELDS = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "node_rank": "GROUP_RANK",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}


def test_torchrun() -> None:
    before = dict(TORCHRUN)
    assert discover(TORCHRUN) == LaunchInfo(
        "torchrun",
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        node_rank=1,
        master_addr="node0.example",
        master_port=29500,
        sources={name: f"environment variable {variable}" for name, variable in FIELDS.items()},
    )
    assert before == TORCHRUN


@given(st.sets(st.sampled_from(sorted(TORCHRUN.keys() - {"RANK", "WORLD_SIZE"}))))
def test_what_is_not_said_is_not_made_up(missing: set[str]) -> None:
    found = discover({name: value for name, value in TORCHRUN.items() if name not in missing})
    assert found.launcher == ("environment" if "TORCHELASTIC_RUN_ID" in missing else "torchrun")
    for field, variable in FIELDS.items():
        assert (getattr(found, field) is None) == (variable in missing)
        assert (field in found.sources) == (variable not in missing)


@given(st.integers(1, 10_000), st.data())
def test_any_rank_of_any_world(world_size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    found = discover({"RANK": str(rank), "WORLD_SIZE": str(world_size)})
    assert (found.rank, found.world_size, found.launcher) == (rank, world_size, "environment")


@given(st.integers(-5, 10), st.integers(-5, 10))
def test_ranks_outside_the_world_are_refused(rank: int, world_size: int) -> None:
    environ = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    if world_size >= 1 and 0 <= rank < world_size:
        assert discover(environ).rank == rank
        return
    with pytest.raises(LaunchError, match=r"environment variable (RANK|WORLD_SIZE)"):
        discover(environ)


@pytest.mark.parametrize(("present", "missing"), [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_one_without_the_other(present: str, missing: str) -> None:
    with pytest.raises(LaunchError, match=f"{present} is set to '1' but {missing} is not set; .* unset {present}"):
        discover({present: "1", "LOCAL_RANK": "0"})


@pytest.mark.parametrize("variable", [name for name in FIELDS.values() if name != "MASTER_ADDR"])
@pytest.mark.parametrize("value", ["", "two", "1.5", "0x2", "1,2"])
def test_values_that_are_no_integers(variable: str, value: str) -> None:
    with pytest.raises(LaunchError, match=f"environment variable {variable}: got '{value}'; expected an integer"):
        discover({**TORCHRUN, variable: value})


@pytest.mark.parametrize("local_rank", ["-1", "4", "7"])
def test_local_ranks_outside_the_host(local_rank: str) -> None:
    with pytest.raises(LaunchError, match=rf"local rank: got {local_rank} \(environment variable LOCAL_RANK\)"):
        discover({**TORCHRUN, "LOCAL_RANK": local_rank})


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_ports_outside_the_range(port: str) -> None:
    with pytest.raises(
        LaunchError, match=rf"master port: got {port} \(environment variable MASTER_PORT\); expected 0 to"
    ):
        discover({**TORCHRUN, "MASTER_PORT": port})


@pytest.mark.parametrize("address", ["", " "])
def test_empty_addresses(address: str) -> None:
    with pytest.raises(LaunchError, match=r"master address: got ' ?' \(environment variable MASTER_ADDR\); expected a"):
        discover({**TORCHRUN, "MASTER_ADDR": address})


def test_the_run_is_the_job_where_it_has_a_name() -> None:
    found = discover({**TORCHRUN, "TORCHELASTIC_RUN_ID": "run-7"})
    assert found.job_id == "run-7"
    assert found.sources["job_id"] == "environment variable TORCHELASTIC_RUN_ID"
