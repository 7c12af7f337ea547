"""The harness of the fault matrix judges rightly: it plays what it says, and what falls short is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from faults import model, page
from faults.cells import BACKENDS, MOMENTS, Cell, cells_to_run, every_cell, parse, tenth
from faults.expected import Expected, right
from faults.host import Host
from faults.job import run_cell, run_job
from faults.judge import shortfalls
from faults.record import Record
from faults.scene import Spec
from faults.schedule import make_schedule
from faults.schedules import differences
from faults.table import FAULTS


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


@pytest.fixture(scope="module")
def killed(host: Host) -> Record:
    return run_cell(KILLED, [host])


KILLED = Cell("sigkill", "during", "gloo")
LOST = Expected(("PeerLostError",), ("all_reduce",))


def test_every_combination_is_run_or_says_why() -> None:
    assert {(cell.fault, cell.moment, cell.backend) for cell in every_cell()} == {
        (fault, moment, backend) for fault in FAULTS for moment in MOMENTS for backend in BACKENDS
    }
    for cell in every_cell():
        text = cell.reason or cell.what
        assert text.endswith("."), cell
        assert len(text) > 30, cell


def test_ten_seeds_in_a_row_run_every_cell_once() -> None:
    found = [cell for seed in range(1234, 1244) for cell in tenth(seed)]
    left_out = [cell for cell in cells_to_run() if cell.row.hosts > 1 and cell.backend == "oneccl"]
    assert sorted(map(str, (*found, *left_out))) == sorted(map(str, cells_to_run()))
    assert tenth(3) == tenth(13) != tenth(4)


def test_a_tenth_has_every_backend_and_moment() -> None:
    for seed in range(10):
        assert {cell.backend for cell in tenth(seed)} == set(BACKENDS)
        assert {cell.moment for cell in tenth(seed)} == set(MOMENTS)


def test_cells_have_names() -> None:
    assert parse("wrong-op/after/gloo/strict") == Cell("wrong-op", "after", "gloo", strict=True)
    with pytest.raises(ValueError, match="expected FAULT/MOMENT/BACKEND"):
        parse("wrong-op/after")
    with pytest.raises(ValueError, match="not run: The port is bound at the start alone"):
        parse("port-taken/during/gloo")


def test_what_happened_is_recorded(killed: Record) -> None:
    assert [told.exit_code for told in killed.ranks] == [0, -9, 0]
    for told in (killed.ranks[0], killed.ranks[2]):
        assert told.error is not None
        assert told.error["kinds"][0] == "PeerLostError"
        assert 0 <= (killed.seconds_of(told) or 0) < 5
    assert shortfalls(KILLED, killed, LOST) == []


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        (dataclasses.replace(LOST, errors=("CommTimeoutError",)), "expected CommTimeoutError, got PeerLostError"),
        (dataclasses.replace(LOST, names=("rank 7",)), "names no rank 7"),
        (dataclasses.replace(LOST, latest_s=-5.0), "expected -5 s"),
        (dataclasses.replace(LOST, warning="smoke"), "nobody warned of 'smoke'"),
        (right(), "expected no error, got PeerLostError"),
    ],
)
def test_a_wrong_expectation_is_not_met(killed: Record, expected: Expected, text: str) -> None:
    assert any(text in problem for problem in shortfalls(KILLED, killed, expected))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hung": [2]}, "ranks [2] hang"),
        ({"processes": {"9": "python"}}, "processes are left"),
        ({"files": ["/dev/shm/comm-x"]}, "files are left: /dev/shm/comm-x"),
        ({"listening": [29500]}, "still listen at ports [29500]"),
        ({"ranks": []}, "the fault did not happen"),
    ],
)
def test_what_is_left_is_a_shortfall(killed: Record, changes: dict[str, object], text: str) -> None:
    found = dataclasses.replace(killed, **changes)  # type: ignore[arg-type]
    assert any(text in problem for problem in shortfalls(KILLED, found, LOST))


def test_a_wrong_result_is_a_shortfall(killed: Record) -> None:
    wrong = {"t": killed.fault_at, "event": "returned", "call": "all_reduce", "right": False}
    ranks = [dataclasses.replace(told, events=[*told.events, wrong]) for told in killed.ranks]
    found = dataclasses.replace(killed, ranks=ranks)
    assert "a wrong result was returned" in shortfalls(KILLED, found, LOST)


def test_leftovers_are_found(host: Host) -> None:
    found = host.ask("run", ["sh", "-c", "mkdir /dev/shm/comm-planted; touch /dev/shm/comm-planted/one"])
    assert found["code"] == 0
    try:
        assert "/dev/shm/comm-planted/one" in host.left()["files"]
    finally:
        host.ask("run", ["rm", "-r", "/dev/shm/comm-planted"])
    assert not [file for file in host.left()["files"] if "planted" in file]


def test_schedules_are_the_same_for_the_same_seed() -> None:
    assert make_schedule(5) == make_schedule(5)
    assert len({make_schedule(seed).steps for seed in range(100)}) > 90
    for seed in range(100):
        schedule = make_schedule(seed)
        assert schedule.culprit in schedule.groups[schedule.steps[schedule.at].group]
        predicted = model.predict(schedule)
        for rank in schedule.groups[0]:
            outcome = predicted[rank].get(schedule.at)
            assert outcome != {model.RIGHT}, (seed, rank)


def test_a_schedule_is_compared_with_the_model(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = make_schedule(0)
    assert (schedule.backend, schedule.fault) == ("gloo", "killed")
    survivors = [rank for rank in schedule.groups[0] if rank != schedule.culprit]
    spec = Spec("scheduled:play", "", "gloo", 0, 3, schedule.culprit, survivors, "", [], seed=0)
    record = run_job(spec, {}, [host])
    assert list(differences(schedule, record)) == []
    planted = {rank: dict.fromkeys(steps, frozenset({"TypeError"})) for rank, steps in model.predict(schedule).items()}
    monkeypatch.setattr("faults.schedules.predict", lambda _: planted)
    found = list(differences(schedule, record))
    assert sum("predicted TypeError" in one for one in found) == sum(map(len, planted.values()))


def test_the_page_has_a_row_for_each_fault_and_moment(killed: Record) -> None:
    text = page.table({KILLED: (killed, [])})
    (row,) = [line for line in text.splitlines() if line.startswith("| SIGKILL | during |")]
    assert "`PeerLostError`" in row
    assert text.startswith("1 of 1 cells meet the bar.")
    not_met = page.table({KILLED: (killed, ["something"])})
    assert "**not met**: `PeerLostError`" in not_met
