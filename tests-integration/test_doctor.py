"""``commctl doctor`` for real: alone, under launchers, and where something is broken."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_orchestrator.tools.doctor import clocks, trial
from comm_utils.testing import patience, run_ranks

DOCTOR = (sys.executable, "-m", "comm_orchestrator", "doctor")
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

#: The libraries for CPU tensors that the doctor tries.
USABLE = [name for name in ("ccl", "gloo") if dist.available_backends()[name].usable]


def surroundings(rank_environment: dict[str, Any], **variables: str) -> dict[str, str]:
    left_out = {*_LAUNCHER, "COLUMNS", *rank_environment}
    return {
        **{name: value for name, value in os.environ.items() if name not in left_out},
        **{"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **variables},
    }


@pytest.fixture
def run(rank_environment: dict[str, Any]) -> Callable[..., subprocess.CompletedProcess[str]]:
    def call(
        *options: str, by: tuple[str, ...] = DOCTOR, files: int | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        def limit() -> None:
            if files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

        environment = surroundings(rank_environment, **variables)
        return subprocess.run(
            [*by, *options], env=environment, capture_output=True, text=True, timeout=120, preexec_fn=limit
        )

    return call


Run = Callable[..., subprocess.CompletedProcess[str]]


def worse(document: dict[str, Any], check: str | None = None) -> list[dict[str, Any]]:
    found = [one for one in document["findings"] if one["level"] != "ok"]
    return [one for one in found if check in (None, one["check"])]


def test_alone_and_well(run: Run) -> None:
    done = run("--json")
    document = json.loads(done.stdout)
    assert done.returncode == int(document["level"] == "problem"), done.stdout + done.stderr
    assert not [one for one in worse(document) if one["level"] == "problem" and one["check"] != "shared_memory"]
    assert (document["complete"], document["world_size"]) == (True, 1)
    assert document["ranks"][0]["launch"]["rank"] == {"value": 0, "source": "default: no launcher was found"}
    found = document["collectives"]
    assert [(one["backend"], one["rank"], one["error"]) for one in found] == [(name, 0, "") for name in USABLE]
    assert all(one["all_reduce_s"] > 0 for one in found)
    assert document["backends"]["gloo"]["usable"] is True


@pytest.mark.skipif("ccl" not in USABLE, reason="oneCCL cannot run here")
def test_versions_and_places_of_oneccl_are_shown(run: Run) -> None:
    (line,) = [line for line in run().stdout.splitlines() if "oneCCL from" in line]
    assert "ccl: shared memory between up to 64 ranks of a host, kernels for " in line
    assert re.search(r", oneCCL Gold-2021\.17\.2 .*, oneCCL from /.*libcomm_oneccl\.so, libfabric 2\.\d+, ", line)
    assert re.search(r"libfabric from /.*libfabric\.so\.1, fabric provider tcp, shared memory of oneCCL off", line)


def test_the_report_for_people_is_readable_in_a_pipe(run: Run) -> None:
    done = run(COMM_TIMEOUT__X="1")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "\x1b" not in done.stdout
    assert lines[0] == f"1 rank on one host, {socket.gethostname()}"
    (line,) = [line for line in lines if "COMM_TIMEOUT__X" in line]
    assert line.startswith("warning ")
    assert "did you mean COMM_TIMEOUTS?" in line
    assert "correct its name, or unset it" in line
    assert lines[-1].startswith("no problems, ")


def test_wrong_usage(run: Run) -> None:
    for options in (("--timeout", "0"), ("--timeout", "nan"), ("--colour",)):
        done = run(*options)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr


# --- under a launcher


@pytest.mark.slow
def test_torchrun_gets_one_report(run: Run) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run("--json", by=(*torchrun, "-m", "comm_orchestrator", "doctor"))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["complete"]
    assert [one["rank"] for one in document["ranks"]] == [0, 1]
    assert [one["launcher"] for one in document["ranks"]] == ["torchrun"] * 2
    assert document["ranks"][1]["launch"]["local_rank"]["source"] == "environment variable LOCAL_RANK"
    assert [one["ranks"] for one in document["hosts"]] == [[0, 1]]
    assert [one["rank"] for one in document["clocks"]] == [0, 1]
    assert all(abs(one["offset_s"]) < 0.05 for one in document["clocks"])
    assert [(one["backend"], one["rank"], one["error"]) for one in document["collectives"]] == [
        (name, rank, "") for rank in (0, 1) for name in USABLE
    ]
    texts = [(one["check"], one["found"]) for one in document["findings"]]
    assert len(set(texts)) == len(texts)
    assert [one["ranks"] for one in document["findings"] if one["check"] == "shared_memory"] == [[]]
    (port,) = [one for one in document["findings"] if one["check"] == "port"]
    assert "torchrun's agent" in port["found"]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_on_one_hardware_thread_are_warned_of_and_the_command_separates_them(run: Run) -> None:
    cpu = min(os.sched_getaffinity(0))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
    doctor = shlex.join([*DOCTOR, "--json"])
    done = run(by=(*torchrun, "bash", "-c", f"exec taskset -c {cpu} {doctor}"))
    (bad,) = worse(json.loads(done.stdout), "placement")
    assert (bad["level"], bad["ranks"]) == ("warning", [])
    assert bad["found"] == f"2 ranks run on cpu {cpu} alone: they take turns"
    separated = shlex.split(bad["remedy"])
    assert separated[:4] == ["torchrun", *torchrun[-3:]]
    done = run(by=(*torchrun, "bash", "-c", separated[-1].replace("python PROGRAM.py", doctor)))
    document = json.loads(done.stdout)
    assert worse(document, "placement") == []
    placements = [one["placement"]["cpus"] for one in document["ranks"]]
    assert len(set(placements)) == 2
    assert all(f"cpu {one}" in " ".join(found["found"] for found in document["findings"]) for one in placements)


def by_hand(rank: int, port: int, host: str = "127.0.0.1") -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    return {**{name: str(value) for name, value in numbers.items()}, "MASTER_ADDR": host}


def pair(rank_environment: dict[str, Any], port: int, second: dict[str, str]) -> list[tuple[int, str]]:
    """Exit code and stdout of two ranks, ``second`` being added to the environment of rank 1."""
    ranks = [
        subprocess.Popen(
            [*DOCTOR, "--json", "--timeout", "5"],
            env=surroundings(rank_environment, **{**by_hand(rank, port), **(second if rank else {})}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [(rank.returncode, out) for rank in ranks for out in [rank.communicate(timeout=120)[0]]]
    finally:
        for rank in ranks:
            rank.kill()


def test_one_rank_has_a_problem_and_both_end_with_it(rank_environment: dict[str, Any], free_port: int) -> None:
    """The configuration asks rank 1 for a backend that is not there."""
    (code, out), (other_code, other_out) = pair(
        rank_environment, free_port, {"COMM_PROCESS_GROUP__BACKEND": "no_such", "NCCL_DEBUG": "INFO"}
    )
    assert (code, other_code, other_out) == (1, 1, "")
    document = json.loads(out)
    (one,) = worse(document, "backends")
    assert (one["level"], one["ranks"]) == ("problem", [1])
    assert "COMM_PROCESS_GROUP__BACKEND" in one["found"]
    assert one["remedy"]
    assert [(one["level"], one["ranks"]) for one in worse(document, "variables")] == [("warning", [1])]


def test_ranks_that_cannot_meet_each_report_alone(rank_environment: dict[str, Any], free_port: int) -> None:
    start = time.monotonic()
    results = pair(rank_environment, free_port, {"GLOO_SOCKET_IFNAME": "no_such"})
    assert time.monotonic() - start < 60 * patience()
    for rank, (code, out) in enumerate(results):
        assert code == 1
        document = json.loads(out)
        assert len(out.splitlines()) == 1
        assert not document["complete"]
        assert [one["rank"] for one in document["ranks"]] == [rank]
        (one,) = worse(document, "communication")
        assert one["level"] == "problem"
        assert "GLOO_SOCKET_IFNAME='no_such' means none of the interfaces" in one["found"]
    (one,) = worse(json.loads(results[1][1]), "interfaces")
    assert one["remedy"].startswith("unset GLOO_SOCKET_IFNAME, or set it to one of ")


def test_a_rank_that_does_not_come(run: Run, free_port: int) -> None:
    start = time.monotonic()
    done = run("--json", "--timeout", "2", **by_hand(0, free_port))
    assert time.monotonic() - start < 40 * patience()
    assert done.returncode == 1
    document = json.loads(done.stdout)
    (one,) = worse(document, "communication")
    assert "the ranks cannot meet: rank 1 of 2 did not come within 2 s" in one["found"]
    assert one["remedy"] == "check that it was started, and what it printed"


# --- broken on purpose


def test_a_port_that_is_taken(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = run("--json", "--timeout", "2", **by_hand(0, port))
    assert done.returncode == 1
    (one,) = worse(json.loads(done.stdout), "port")
    assert f"port {port} of 127.0.0.1, where rank 0 is to listen, is in use by pid {os.getpid()}," in one["found"]
    assert "MASTER_PORT" in one["remedy"]


def test_a_master_that_does_not_resolve(run: Run, free_port: int) -> None:
    done = run("--json", "--timeout", "1", **by_hand(1, free_port, "no-such-host.invalid"))
    assert done.returncode == 1
    document = json.loads(done.stdout)
    one = worse(document, "names")[-1]
    assert "no-such-host.invalid (environment variable MASTER_ADDR) does not resolve" in one["found"]
    assert one["remedy"].startswith("set MASTER_ADDR to a name or address of rank 0's host")
    assert "does not resolve" in worse(document, "communication")[0]["found"]


def test_half_a_launcher_and_a_wrong_setting(run: Run) -> None:
    done = run("--json", WORLD_SIZE="2", COMM_TIMEOUTS__COLLECTIVE_S="soon")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    document = json.loads(done.stdout)
    (launch,) = worse(document, "launch")
    assert "RANK is not set" in launch["found"]
    (configuration,) = worse(document, "configuration")
    assert "COMM_TIMEOUTS__COLLECTIVE_S" in configuration["found"]
    assert "not tried" in worse(document, "communication")[0]["found"]


def test_few_open_files(run: Run) -> None:
    done = run("--json", files=26)
    (one,) = worse(json.loads(done.stdout), "open_files")
    assert done.returncode == 1
    assert (one["level"], one["remedy"]) == ("problem", "ulimit -n 1024")
    assert re.search(
        r"26 open files allowed, .* and [0-9]+ are open; 1 rank cannot connect with less than", one["found"]
    )


def test_open_files_with_which_ranks_connect_are_no_problem(run: Run) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    limited = ("sh", "-c", 'ulimit -S -n 64 && exec "$@"', "sh")
    done = run("--json", by=(*torchrun, "--no-python", *limited, *DOCTOR))
    document = json.loads(done.stdout)
    found = worse(document, "open_files")
    assert [one["level"] for one in found] == ["warning"], done.stdout
    assert all("64 open files allowed" in one["found"] for one in found)
    assert all("2 ranks can connect" in one["found"] for one in found)
    assert {one["backend"] for one in document["collectives"] if not one["error"]} == {*USABLE}


NOISY = """
import os
from comm_orchestrator.tools.doctor import command

examine = command.examine
command.examine = lambda timeout_s: (os.write(1, b"noise"), print("noise"), examine(timeout_s))[-1]
raise SystemExit(command.run(20, True))
"""


def test_a_library_that_prints_does_not_spoil_the_document(run: Run) -> None:
    done = run(by=(sys.executable, "-u", "-c", NOISY))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["complete"]
    assert done.stderr.count("noise") == 2


# --- clocks


def measured(ahead_s: float) -> list[dist.clocks.Clock]:
    dist.init_distributed("gloo", verbose=False)
    offset_s = ahead_s if dist.get_rank() == 1 else 0.0
    found = clocks.measure(range(dist.get_world_size()), clock=lambda: time.time() + offset_s)
    took_s = trial.reduce_once(torch.device("cpu"))
    assert 0 < took_s < 10 * patience()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("ahead_s", [0.25, -3.0])
def test_a_clock_that_is_wrong(ahead_s: float, rank_environment: dict[str, Any]) -> None:
    found, others = run_ranks(measured, 2, ahead_s, env=rank_environment)
    assert others == []
    own, other = found
    assert (own.offset_s, other.rank) == (0.0, 1)
    assert abs(other.offset_s - ahead_s) <= other.uncertainty_s + 1e-3
    (one,) = clocks.judge(found)
    assert one.level == "warning"
    assert f"rank {1 if ahead_s > 0 else 0} is ahead of rank {0 if ahead_s > 0 else 1}" in one.found


# --- what it costs those who do not use it


def test_import_brings_none_of_it() -> None:
    program = "import sys, comm_orchestrator; print(*[n for n in sys.modules if 'doctor' in n])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []
