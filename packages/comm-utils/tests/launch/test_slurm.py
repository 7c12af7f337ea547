"""Tasks that srun started; test_recorded.py has the variables of a real cluster."""

from __future__ import annotations

import pytest

from comm_utils import LaunchError
from comm_utils.launch import LaunchInfo, discover, slurm
from comm_utils.launch.ports import derived_port

# Rank 5 of 7 on four nodes, the second task of the third node.
TASK = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NODELIST": "node[01-04,7],login1",
    "SLURM_NTASKS": "99",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "node[02-04,7]",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}


def test_task() -> None:
    assert discover(TASK) == LaunchInfo(
        "slurm",
        rank=5,
        world_size=7,
        local_rank=1,
        local_world_size=2,
        node_rank=2,
        master_addr="node02",
        master_port=derived_port("1234.2"),
        job_id="1234.2",
        sources={
            "rank": "environment variable SLURM_PROCID",
            "world_size": "environment variable SLURM_STEP_NUM_TASKS",
            "local_rank": "environment variable SLURM_LOCALID",
            "local_world_size": "position 2 (SLURM_NODEID) in SLURM_STEP_TASKS_PER_NODE",
            "node_rank": "environment variable SLURM_NODEID",
            "master_addr": "first host of SLURM_STEP_NODELIST",
            "master_port": "derived from environment variables SLURM_JOB_ID and SLURM_STEP_ID",
            "job_id": "environment variables SLURM_JOB_ID and SLURM_STEP_ID",
        },
    )


@pytest.mark.parametrize(("node", "size"), [("0", 2), ("1", 2), ("2", 2), ("3", 1)])
def test_nodes_with_different_numbers_of_tasks(node: str, size: int) -> None:
    assert discover({**TASK, "SLURM_NODEID": node, "SLURM_LOCALID": "0"}).local_world_size == size


def test_old_names() -> None:
    environ = {
        "SLURM_JOBID": "1234",
        "SLURM_STEPID": "0",
        "SLURM_NODELIST": "a,b",
        "SLURM_NPROCS": "3",
        "SLURM_TASKS_PER_NODE": "2,1",
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
    }
    found = discover(environ)
    assert (found.rank, found.world_size, found.local_world_size, found.master_addr) == (2, 3, 1, "a")
    assert found.job_id == "1234.0"


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"},  # a batch script
        {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"},
        {**TASK, "SLURM_STEP_ID": str(0xFFFFFFFA)},  # the shell of an interactive allocation
        {**TASK, "SLURM_STEP_ID": str(0xFFFFFFFB)},  # a batch script
    ],
)
def test_what_srun_did_not_start(environ: dict[str, str]) -> None:
    assert slurm.discover(environ) is None


def test_one_node() -> None:
    one = {"SLURM_STEP_NODELIST": "node03", "SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0"}
    found = discover({**TASK, **one})
    assert found.master_addr == "127.0.0.1"
    assert found.sources["master_addr"] == "the only host of SLURM_STEP_NODELIST"


def test_an_arbitrary_distribution_has_its_own_first_host() -> None:
    arbitrary = {**TASK, "SLURM_DISTRIBUTION": "arbitrary"}
    found = discover({**arbitrary, "SLURM_ARBITRARY_NODELIST": "node7,node02,node[03-04]"})
    assert found.master_addr == "node7"
    assert found.sources["master_addr"] == "first host of SLURM_ARBITRARY_NODELIST"
    assert discover(arbitrary).master_addr is None


def test_a_heterogeneous_job_whose_lists_describe_one_component() -> None:
    found = discover({**TASK, "SLURM_HET_SIZE": "2", "SLURM_STEP_NUM_TASKS": "12"})
    assert (found.rank, found.world_size, found.local_rank) == (5, 12, 1)
    assert (found.master_addr, found.local_world_size) == (None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"SLURM_STEP_NUM_TASKS": "8"},
            r"TASKS_PER_NODE: got '2\(x3\),1', 7 tasks; expected 8 \(.*SLURM_STEP_NUM_TASKS",
        ),
        ({"SLURM_STEP_NODELIST": "a,b,c"}, r"TASKS_PER_NODE: got .*, 4 hosts; expected 3 \(.*NODELIST: 'a,b,c'\)"),
        ({"SLURM_STEP_NODELIST": "a[1"}, r"environment variable SLURM_STEP_NODELIST: got 'a\[1'; expected a list of"),
        ({"SLURM_STEP_TASKS_PER_NODE": "x"}, "environment variable SLURM_STEP_TASKS_PER_NODE: got 'x'; expected task"),
        ({"SLURM_NODEID": "4"}, r"SLURM_NODEID: got '4'; expected 0 to 3 for 4 hosts \(.*TASKS_PER_NODE"),
        ({"SLURM_NODEID": "-1"}, "SLURM_NODEID: got '-1'; expected 0 to 3"),
        ({"SLURM_PROCID": "7"}, r"rank: got 7 \(environment variable SLURM_PROCID\); expected 0 to 6"),
        ({"SLURM_PROCID": "x"}, "environment variable SLURM_PROCID: got 'x'; expected an integer"),
        ({"SLURM_LOCALID": "2"}, r"local rank: got 2 \(.*LOCALID\); expected less than the local world size of 2"),
        ({"SLURM_STEP_ID": ""}, "environment variable SLURM_STEP_ID: got ''; expected an integer: correct or unset it"),
    ],
)
def test_contradictions_inside(changes: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        discover({**TASK, **changes})


def test_the_number_of_tasks_is_needed() -> None:
    with pytest.raises(LaunchError, match=r"SLURM_PROCID is set to '0' but SLURM_NTASKS is not set; start .* srun"):
        discover({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"})
