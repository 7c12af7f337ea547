"""Ranks that share cores or span NUMA nodes, with the command that separates them."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from comm_orchestrator.tools.doctor import placement
from comm_orchestrator.tools.doctor.finding import Finding
from comm_orchestrator.tools.doctor.rendering import render
from comm_orchestrator.tools.doctor.report import RankReport, merge_reports
from comm_utils.topology import parse_cpu_list, read_placement


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Write two sockets of two cores with two threads each: cores 0,4 and 2,6 on node 0, 1,5 and 3,7 on node 1."""
    for cpu in range(8):
        here, socket = tmp_path / f"devices/system/cpu/cpu{cpu}", cpu % 2
        for name, text in {
            "topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}",
            "topology/physical_package_id": str(socket),
            "cache/index3/level": "3",
            "cache/index3/shared_cpu_list": "0,2,4,6" if socket == 0 else "1,3,5,7",
        }.items():
            (here / name).parent.mkdir(parents=True, exist_ok=True)
            (here / name).write_text(text + "\n")
    for node, cpus in enumerate(("0,2,4,6", "1,3,5,7")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    return tmp_path


def reports(sysfs: Path, *lists: str, of_host: str = "0-7", launcher: str = "torchrun") -> list[RankReport]:
    """Return the reports of ranks that are bound to these lists of cpus."""
    found = []
    for rank, cpus in enumerate(lists):
        where = read_placement(parse_cpu_list(cpus), sysfs)
        table = {**placement.as_table(where, parse_cpu_list(of_host), sysfs), "cpus_online": 8}
        found.append(RankReport(rank, len(lists), "a", 100 + rank, launcher, placement=table))
    return found


def judged(*args: Any, **more: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(one.level, one.found, one.ranks) for one in placement.judge(reports(*args, **more))]


def test_ranks_with_cores_of_their_own(sysfs: Path) -> None:
    assert judged(sysfs, "0,4", "1,5") == [
        ("ok", "cpus 0,4, NUMA node 0, last-level cache of cpus 0,2,4,6", (0,)),
        ("ok", "cpus 1,5, NUMA node 1, last-level cache of cpus 1,3,5,7", (1,)),
    ]


def test_ranks_on_one_hardware_thread(sysfs: Path) -> None:
    assert judged(sysfs, "0", "0", "2") == [
        ("warning", "2 ranks run on cpu 0 alone: they take turns", (0, 1)),
        ("ok", "cpu 2, NUMA node 0, last-level cache of cpus 0,2,4,6", (2,)),
    ]


def test_more_ranks_than_hardware_threads(sysfs: Path) -> None:
    found = judged(sysfs, "0,2", "0,2", "0,2")
    assert found == [("warning", "3 ranks share cpus 0,2: they take turns", (0, 1, 2))]


def test_ranks_on_threads_of_one_core(sysfs: Path) -> None:
    found = judged(sysfs, "0", "4", "1")
    assert found[0] == ("warning", "2 ranks share one core, of which cpus 0,4 are hardware threads", (0, 1))
    assert found[1][0] == "ok"


def test_ranks_that_span_nodes(sysfs: Path) -> None:
    (first, *_) = found = judged(sysfs, "0-7", "0-7")
    assert [level for level, *_ in found] == ["warning"] * 2
    assert first[1].startswith("cpus 0-7, NUMA nodes 0-1, 2 last-level caches: its threads and its memory")
    assert judged(sysfs, "0-7") == [("ok", "cpus 0-7, NUMA nodes 0-1, 2 last-level caches", (0,))]


def test_hosts_are_judged_apart_and_unknown_placements_not_at_all(sysfs: Path) -> None:
    first, second = reports(sysfs, "0", "0")
    elsewhere = RankReport(1, 2, "b", 7, placement=second.placement)
    assert [one.level for one in placement.judge([first, elsewhere])] == ["ok", "ok"]
    assert placement.judge([RankReport(0, 1, "a", 1), RankReport(0, 1, "a", 1, placement={"cpus": ""})]) == []


NODES = [[parse_cpu_list(one) for one in ("0,4", "2,6")], [parse_cpu_list(one) for one in ("1,5", "3,7")]]


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        (
            "torchrun",
            "torchrun --nproc-per-node 2 --no-python bash -c 'cpus=(0,2,4,6 1,3,5,7); exec taskset -c "
            "${cpus[LOCAL_RANK]} python PROGRAM.py'",
        ),
        ("openmpi", "mpirun -n 4 --map-by slot:PE=2 --bind-to core python PROGRAM.py"),
        ("mpich", "mpirun -n 4 -bind-to core:2 python PROGRAM.py"),
        ("intel_mpi", "mpirun -n 4 -genv I_MPI_PIN 1 -genv I_MPI_PIN_DOMAIN auto:compact python PROGRAM.py"),
        ("slurm", "srun --ntasks-per-node=2 --cpus-per-task=2 --cpu-bind=cores python PROGRAM.py"),
        (
            "environment",
            "start the ranks of the host as taskset -c 0,2,4,6 python PROGRAM.py, taskset -c 1,3,5,7 python PROGRAM.py",
        ),
    ],
)
def test_the_command_is_that_of_the_launcher(launcher: str, command: str) -> None:
    assert placement.remedy_for(launcher, 2, 4, NODES, 8) == command


def test_shares_stay_on_a_node() -> None:
    assert "cpus=(0,4 2,6 1,5);" in placement.remedy_for("torchrun", 3, 3, NODES, 8)
    assert "cpus=(0,4 2,6 1,5 3,7);" in placement.remedy_for("torchrun", 4, 4, NODES, 8)
    one_and_three = [NODES[0][:1], [*NODES[1], parse_cpu_list("9,11")]]
    assert "cpus=(0,4 1,5);" in placement.remedy_for("torchrun", 2, 2, one_and_three, 8)
    assert "and so on" in placement.remedy_for("none", 3, 3, NODES, 8)


def test_fewer_ranks_where_there_are_too_few_cores() -> None:
    assert placement.remedy_for("torchrun", 9, 9, NODES, 8) == (
        "start at most 4 ranks on this host (--nproc-per-node 4)"
    )
    found = placement.remedy_for("slurm", 2, 2, [NODES[0][:1]], 8)
    assert found.startswith("start at most 1 rank on this host (--ntasks-per-node=1), or let the job use more of its 8")
    assert "without taskset and numactl" in found
    assert placement.remedy_for("none", 9, 9, NODES, 8) == "start at most 4 ranks on this host"


def test_the_report_names_the_ranks_once_and_fits(sysfs: Path) -> None:
    report = merge_reports(reports(sysfs, "0", "0", "0", "0"), [], [])
    (one,) = [one for one in report.findings if one.check == "placement"]
    assert (one.level, one.ranks) == ("warning", ())
    shown = render(
        type(report)(True, 4, [one, Finding("ok", "open_files", "1024")], report.ranks[:1], [], []), io.StringIO(), 80
    )
    assert max(map(len, shown.splitlines())) <= 80
    assert "4 ranks run on cpu 0 alone: they take turns" in shown
    assert "-> torchrun --nproc-per-node 4" in shown
    assert report.to_json()["ranks"][0]["placement"]["numa_nodes"] == [0]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_the_command_for_torchrun_binds_each_rank() -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    command = placement.remedy_for("torchrun", 2, 2, [[frozenset({one}) for one in cpus]], 2)
    script = shlex.split(command)[shlex.split(command).index("-c") + 1]
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    script = script.replace("python PROGRAM.py", f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}")
    for rank, cpu in enumerate(cpus):
        env = {**os.environ, "LOCAL_RANK": str(rank)}
        done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == f"[{cpu}]"
