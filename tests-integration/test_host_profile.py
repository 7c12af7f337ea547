"""The first group on a host measures it; later ones start from what it found."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_backend_ccl import host_profile, shared_communicator, tuning
from comm_utils.testing import per_rank, run_ranks, run_ranks_outcomes

_FOUND = dist.available_backends()["ccl"]
pytestmark = pytest.mark.skipif(
    "profile of transfers" not in _FOUND.details, reason=_FOUND.details.get("shared memory", _FOUND.reason)
)
# Of float32: the least size that is measured.
ELEMENTS = 1 << 14


@pytest.fixture
def environment(rank_environment: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The profile in a folder of this test. Ranks with another cache folder would have to be fresh interpreters."""
    return {**rank_environment, "CCL_SHARED_MEMORY_PROFILE": str(tmp_path / "comm-backend-ccl" / "profile.json")}


@pytest.fixture
def cache_folder(rank_environment: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    return {**rank_environment, "CCL_SHARED_MEMORY_PROFILE": None, "XDG_CACHE_HOME": str(tmp_path)}


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("comm-backend-ccl/*"))


def run_reductions(calls: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what the world knows of methods at first, and of all_reduce after so many calls."""
    dist.init_distributed("ccl", verbose=False)
    (world,) = shared_communicator.open_groups()
    at_first = world.methods()
    for step in range(calls):
        dist.all_reduce(tensor := torch.full((ELEMENTS,), float(step)))
        assert tensor.min() == tensor.max() == step * dist.get_world_size()
    known = [row for row in world.methods() if row["operation"] == "all_reduce"]
    dist.destroy_process_group()
    return at_first, known


def measure_one_size() -> None:
    """Keep the first size that a first group measures, also where the machine is too busy for its limit."""
    dist.init_distributed("ccl", verbose=False)
    (world,) = shared_communicator.open_groups()
    quick = tuning.quick(world.size)
    assert tuning.measure(world, quick._replace(sizes_bytes=quick.sizes_bytes[:1], limit_s=100.0))
    if world.rank == 0:
        host_profile.store(world.size, host_profile.rows_of(world.methods()), host_profile.FIRST_GROUP)
    dist.destroy_process_group()


def measure(environment: dict[str, Any], folder: Path, ranks: int = 2) -> dict[str, Any]:
    """Return the content of a profile of one size."""
    run_ranks(measure_one_size, ranks, env=environment, timeout_s=150)
    (file,) = files(folder)
    content: dict[str, Any] = json.loads(file.read_text())
    assert content["ranks"][str(ranks)]["whole"]
    return content


def test_the_first_group_measures_and_later_ones_start_from_it(cache_folder: dict[str, Any], tmp_path: Path) -> None:
    environment = cache_folder
    (measured, _), (same, _) = run_ranks(run_reductions, 2, 0, env=environment)
    assert measured == same
    (file,) = files(tmp_path)
    first = json.loads(file.read_text())["ranks"]["2"]
    assert first["whole"] or first["tries"] == 1  # as a busy machine does not come far
    content = measure(environment, tmp_path)
    assert list(content["ranks"]) == ["2"]
    kinds = {"all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all_v"}
    assert {row[0] for row in content["ranks"]["2"]["rows"]} == kinds
    before = file.read_bytes()

    for at_first, known in run_ranks(run_reductions, 2, 40, env=environment):
        assert at_first == []
        (row,) = known
        assert row["settled"]
        stored = {one[4]: one[5] for one in content["ranks"]["2"]["rows"] if one[:2] == ["all_reduce", 4 * ELEMENTS]}
        untried = [method for method in stored if method != row["method"]]
        assert untried
        assert all(row["typical_ns"][method] == stored[method] for method in untried)
    assert file.read_bytes() == before


def test_more_ranks_measure_what_they_do_in_one_step_too(environment: dict[str, Any], tmp_path: Path) -> None:
    content = measure(environment, tmp_path, 4)
    in_one_step = {row[0] for row in content["ranks"]["4"]["rows"] if row[3]}
    assert in_one_step >= {"all_reduce", "broadcast", "all_gather"}


def run_broadcasts() -> list[dict[str, Any]]:
    """Return what the world knows after its first broadcasts of two dtypes."""
    dist.init_distributed("ccl", verbose=False)
    (world,) = shared_communicator.open_groups()
    dist.barrier()
    for dtype in (torch.float32, torch.bfloat16):
        for _ in range(40):
            dist.broadcast(torch.ones(4 * ELEMENTS // dtype.itemsize, dtype=dtype), 0)
    known = [row for row in world.methods() if row["operation"] == "broadcast" and row["settled"]]
    dist.destroy_process_group()
    return known


def test_what_only_moves_data_has_one_choice_for_all_dtypes(environment: dict[str, Any], tmp_path: Path) -> None:
    write_profile(environment, tmp_path, "streamed")
    for known in run_ranks(run_broadcasts, 2, env=environment | {"CCL_SHARED_MEMORY_LEARNING": "0"}):
        assert [(row["narrow"], row["method"]) for row in known] == [(False, "streamed")]


def write_profile(environment: dict[str, Any], folder: Path, fastest: str) -> None:
    """A profile of this machine that has one method as a thousand times as fast as the others."""
    content = measure(environment, folder)
    (file,) = files(folder)
    for one in content["ranks"]["2"]["rows"]:
        one[5] = 10 if one[4] == fastest else 10_000
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("fastest", ["streamed", "cached"])
def test_without_learning_the_profile_decides(environment: dict[str, Any], tmp_path: Path, fastest: str) -> None:
    write_profile(environment, tmp_path, fastest)
    for _, known in run_ranks(run_reductions, 2, 40, env=environment | {"CCL_SHARED_MEMORY_LEARNING": "0"}):
        assert [row["method"] for row in known] == [fastest]


def test_a_wrong_profile_is_corrected(environment: dict[str, Any], tmp_path: Path) -> None:
    write_profile(environment, tmp_path, "streamed")
    for _, (row,) in run_ranks(run_reductions, 2, 6000, env=environment, timeout_s=120):
        assert min(row["typical_ns"].values()) > 1000, "the lie is gone"


@pytest.mark.parametrize("variable", ["CCL_SHARED_MEMORY_LEARNING", "CCL_SHARED_MEMORY_TRANSFER"])
def test_nothing_is_measured_where_nothing_is_chosen(
    environment: dict[str, Any], tmp_path: Path, variable: str
) -> None:
    value = {"CCL_SHARED_MEMORY_LEARNING": "0", "CCL_SHARED_MEMORY_TRANSFER": "cached"}[variable]
    for at_first, _ in run_ranks(run_reductions, 2, 1, env=environment | {variable: value}):
        assert at_first == []
    assert files(tmp_path) == []


def run_on_one_core() -> tuple[list[dict[str, Any]], str]:
    """Return what the world of ranks that share a core knows at first, and what measured its profile."""
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    dist.init_distributed("ccl", verbose=False)
    (world,) = shared_communicator.open_groups()
    assert world.oversubscribed
    found = world.methods(), world.profile_by
    dist.destroy_process_group()
    return found


def test_ranks_that_share_cores_measure_nothing_and_use_what_is_known(
    environment: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_ranks(run_on_one_core, 2, env=environment) == [([], "")] * 2
    assert files(tmp_path) == []
    monkeypatch.setenv(host_profile.VARIABLE, environment[host_profile.VARIABLE])
    row = host_profile.Row("all_reduce", 4 * ELEMENTS, False, True, "cached", 5000)
    host_profile.store(2, [row], host_profile.FIRST_GROUP, is_whole=False)
    assert run_ranks(run_on_one_core, 2, env=environment) == [([], host_profile.FIRST_GROUP)] * 2


def measure_within(limit_s: float) -> tuple[bool, int]:
    """Return whether all was measured, and of how many sizes and operations the world then knows."""
    dist.init_distributed("ccl", verbose=False, timeout=60)
    (world,) = shared_communicator.open_groups()
    effort = tuning.Effort((1 << 16,), (torch.float32,), limit_s)
    found = tuning.measure(world, effort), len(world.methods())
    dist.destroy_process_group()
    return found


def test_the_first_ranks_clock_ends_the_measurement_of_all(environment: dict[str, Any]) -> None:
    environment = environment | {"CCL_SHARED_MEMORY_PROFILE": "0"}
    assert run_ranks(measure_within, 2, per_rank([0.0, 1000.0]), env=environment) == [(False, 0)] * 2
    first, second = run_ranks(measure_within, 2, per_rank([1000.0, 0.0]), env=environment, timeout_s=120)
    assert first == second
    assert first[0]
    assert first[1] >= 6


def test_a_group_starts_without_what_another_one_measures(
    environment: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(host_profile.VARIABLE, environment[host_profile.VARIABLE])
    with host_profile.sole_measurement() as is_alone:
        assert is_alone
        assert run_ranks(run_reductions, 2, 0, env=environment) == [([], [])] * 2
    assert files(tmp_path) == []


def test_nothing_is_measured_by_one_rank(environment: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(run_reductions, 1, 1, env=environment)
    assert files(tmp_path) == []


def run_and_end() -> None:
    if os.environ["RANK"] == "1":
        from comm_backend_ccl import tuning

        def end(*_: object) -> None:
            os._exit(7)

        tuning.measure = end  # type: ignore[assignment]
    dist.init_distributed("ccl", verbose=False)


def test_a_rank_that_ends_while_the_host_is_measured_is_named(environment: dict[str, Any], tmp_path: Path) -> None:
    first, _ = run_ranks_outcomes(run_and_end, 2, env=environment)
    assert "PeerLostError" in str(first)
    assert "rank 1" in str(first)
    assert files(tmp_path) == []


def tune(environment: dict[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    command = [sys.executable, "-m", "comm_orchestrator", "tune", *options]
    return subprocess.run(
        command, capture_output=True, text=True, env={**variables, "COLUMNS": "80"}, timeout=280, check=False
    )


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"CCL_SHARED_MEMORY_PROFILE": "0"}, "got CCL_SHARED_MEMORY_PROFILE=0"),
        ({"CCL_SHARED_MEMORY": "0"}, "shared memory is turned off by CCL_SHARED_MEMORY=0"),
    ],
)
def test_tuning_says_why_it_cannot(environment: dict[str, Any], variables: dict[str, str], said: str) -> None:
    done = tune(environment | variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_known_is_shown_without_measuring(environment: dict[str, Any], tmp_path: Path) -> None:
    assert "nothing was measured yet" in tune(environment, "--show").stdout
    assert files(tmp_path) == []
    measure(environment, tmp_path)
    shown = tune(environment, "--show")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    table = next(number for number, line in enumerate(lines) if line.startswith("2 ranks, measured"))
    assert "by its first group" in lines[table]
    assert all(len(line) <= 80 for line in lines[table:])
    assert lines[table + 1].split("  ")[0] == "operation"
    assert " ".join(lines[table + 1].split()) == "operation from size fastest time, µs others, µs"
    as_json = json.loads(tune(environment, "--show", "--json").stdout)
    assert as_json["unavailable_reason"] == ""
    rows = as_json["ranks"]["2"]["rows"]
    assert {row["operation"] for row in rows} >= {"all_reduce", "broadcast"}
    (line,) = (line for line in lines if line.startswith("all_reduce") and "64 KiB" in line)
    times = {
        row["method"]: row["ns"] / 1000
        for row in rows
        if row["operation"] == "all_reduce" and row["least_bytes"] == 1 << 16 and not row["narrow"]
    }
    method = min(times, key=times.__getitem__)
    assert line.split()[3].rstrip(",") == method.split(",")[0]
    assert f"{times[method]:.3g}" in line.split()


def test_texts_of_a_profile_are_no_markup(environment: dict[str, Any], tmp_path: Path) -> None:
    measure(environment, tmp_path)
    (file,) = files(tmp_path)
    content = json.loads(file.read_text())
    content["ranks"]["2"]["by"] = "[/x]"
    content["ranks"]["2"]["rows"][0][0] = "[/nonsense]"
    file.write_text(json.dumps(content))
    shown = tune(environment, "--show")
    assert shown.returncode == 0, shown.stderr
    assert "by [/x]" in shown.stdout
    assert "[/nonsense]" in shown.stdout


def test_tuning_measures_nothing_that_it_could_not_keep(environment: dict[str, Any], tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("print()")
    done = tune(environment | {"CCL_SHARED_MEMORY_PROFILE": str(program)}, "--ranks", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"could not be kept: {program} is not a profile, and is not replaced" in done.stderr
    assert program.read_text() == "print()"


@pytest.mark.slow
def test_tuning_measures_more_and_keeps_it(environment: dict[str, Any], tmp_path: Path) -> None:
    done = tune(environment, "--ranks", "2")
    assert done.returncode == 0, done.stderr
    (file,) = files(tmp_path)
    found = json.loads(file.read_text())["ranks"]["2"]
    assert found["by"] == "commctl tune"
    kinds = {(one[0], one[1], one[2]) for one in found["rows"]}
    assert ("all_reduce", 64 << 20, False) in kinds
    assert ("all_reduce", 64 << 20, True) in kinds
    assert "2 ranks, 16-bit floats, measured" in done.stdout


def first_log_line() -> str:
    """Return what rank 0 logs first, with its level."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("comm")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        dist.init_distributed("ccl")
        dist.destroy_process_group()
    finally:
        logger.removeHandler(handler)
    return lines[0] if lines else ""


def test_the_first_log_line_names_the_profile(environment: dict[str, Any], tmp_path: Path) -> None:
    def shown(**more: str) -> str:
        return str(run_ranks(first_log_line, 2, env={**environment, **more})[0])

    assert shown(CCL_SHARED_MEMORY_PROFILE="0") == "initialised: ccl, 2 ranks, no profile"
    assert shown(CCL_SHARED_MEMORY_TRANSFER="cached") == "initialised: ccl, 2 ranks, no profile"
    measure(environment, tmp_path)
    assert shown() == "initialised: ccl, 2 ranks, quick profile"
    assert "profile" not in shown(CCL_SHARED_MEMORY="0")
    (file,) = files(tmp_path)
    content = json.loads(file.read_text())
    content["ranks"]["2"]["by"] = "commctl tune"
    file.write_text(json.dumps(content))
    assert shown() == "initialised: ccl, 2 ranks, tuned profile"


def with_another_transfer(variable: str, values: list[str]) -> str:
    os.environ[variable] = values[int(os.environ["RANK"])]
    try:
        dist.init_distributed("ccl", verbose=False, timeout=60)
        dist.all_reduce(torch.ones(ELEMENTS))
        dist.destroy_process_group()
    except dist.ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("variable", "values", "differs"),
    [
        ("CCL_SHARED_MEMORY_TRANSFER", ["streamed", "cached"], True),
        ("CCL_SHARED_MEMORY_LEARNING", ["", "0"], True),
        ("CCL_SHARED_MEMORY_LEARNING", ["", "1"], False),
    ],
)
def test_ranks_with_different_settings(
    environment: dict[str, Any], variable: str, values: list[str], differs: bool
) -> None:
    text = f"{variable} differs between the ranks of a group; give all the same (rank 0: {values[0]!r}, rank 1: "
    for found in run_ranks(with_another_transfer, 2, variable, values, env=environment):
        assert (text in found) is differs
        assert bool(found) is differs


def run_without_a_profile() -> float:
    begun = time.monotonic()
    dist.init_distributed("ccl", verbose=False, timeout=60)
    dist.all_reduce(torch.ones(ELEMENTS))
    dist.destroy_process_group()
    return time.monotonic() - begun


def test_a_place_that_cannot_be_looked_at(environment: dict[str, Any], tmp_path: Path) -> None:
    """What the first rank meets there ends neither the start nor the others' patience."""
    deep = "/".join(["x" * 200] * 30)  # too long a name for the system
    for place in (str(tmp_path / "file" / "profile.json"), f"/{deep}/profile.json"):
        (tmp_path / "file").write_text("")
        times = run_ranks(
            run_without_a_profile, 2, timeout_s=50, env={**environment, "CCL_SHARED_MEMORY_PROFILE": place}
        )
        assert max(times) < 30


@pytest.mark.parametrize("variables", [{"CCL_SHARED_MEMORY_LEARNING": "0"}, {"CCL_SHARED_MEMORY_TRANSFER": "cached"}])
def test_what_is_fixed_is_not_tuned(environment: dict[str, Any], variables: dict[str, str]) -> None:
    done = tune(environment | variables, "--ranks", "2")
    assert done.returncode == 1
    assert "fix how data is moved; unset them to measure it" in done.stderr
