"""Who started this process: pure functions of the environment variables."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_utils import LaunchError
from comm_utils.launch import LAUNCHERS, LaunchInfo, discover

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


@pytest.mark.parametrize("environ", [{}, {"LOCAL_RANK": "3", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "x"}])
def test_nobody(environ: dict[str, str]) -> None:
    found = discover(environ)
    assert found.launcher == "none"
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size, found.node_rank) == (0, 1, 0, 1, 0)
    assert (found.master_addr, found.master_port) == (None, None)
    assert set(found.sources.values()) == {"default: no launcher was found"}


def test_a_single_process_is_asked_for_last() -> None:
    names = [name for name, _ in LAUNCHERS]
    assert names[-1] == "single"
    assert len(names) == len(set(names))


def test_facts_do_not_change() -> None:
    found = discover(TORCHRUN)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.rank = 0  # type: ignore[misc]
    with pytest.raises(TypeError):
        LaunchInfo("test", 0, 1).sources["rank"] = "elsewhere"  # type: ignore[index]


def test_errors_name_the_launcher_where_no_source_is_known() -> None:
    with pytest.raises(LaunchError, match=r"rank: got 2 \(slurm\); expected 0 to 1 for a world size of 2 \(slurm\)"):
        LaunchInfo("slurm", 2, 2)
