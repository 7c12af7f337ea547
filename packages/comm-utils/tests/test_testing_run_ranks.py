"""run_ranks and run_ranks_outcomes: values, failures of every kind, deadlines."""

from __future__ import annotations

import importlib.util
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from comm_utils.testing import RankFailure, RankPool, per_rank, run_ranks, run_ranks_outcomes

# Loaded by path, as test folders are no packages.
_spec = importlib.util.spec_from_file_location(f"{__name__}_targets", Path(__file__).with_name("testing_targets.py"))
assert _spec is not None
assert _spec.loader is not None
targets = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(targets)


def compare(left: int, right: int) -> None:
    assert left == right


def test_values_come_in_rank_order() -> None:
    assert run_ranks(targets.rank_plus, 3, 10, factor=2) == [20, 22, 24]


def test_per_rank_arguments() -> None:
    assert run_ranks(targets.rank_plus, 2, per_rank([100, 200]), factor=per_rank([1, -1])) == [100, -201]
    with pytest.raises(ValueError, match="3 values for 2 ranks"):
        run_ranks(targets.rank_plus, 2, per_rank([1, 2, 3]))


def test_world_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        run_ranks(targets.rank_plus, 0, 1)


def test_launcher_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PALS_RANKID")
    for name in outer:
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("RANK", "7")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")
    first, second = run_ranks(targets.variables, 2, *names, "MASTER_PORT", *outer)
    assert [first[name] for name in names] == ["0", "0", "2", "2", "0", "127.0.0.1", "1"]
    assert [second[name] for name in names] == ["1", "1", "2", "2", "0", "127.0.0.1", "1"]
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert [first[name] for name in outer] == [None] * len(outer)


def test_no_launcher_variables_and_own_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "7")
    monkeypatch.setenv("TO_GO", "x")
    env = {"SLURM_PROCID": per_rank(["0", "1"]), "SAME": "s", "TO_GO": None}
    found = run_ranks(
        targets.variables, 2, "RANK", "WORLD_SIZE", "SLURM_PROCID", "SAME", "TO_GO", env=env, launcher_env=False
    )
    nothing = {"RANK": None, "WORLD_SIZE": None, "TO_GO": None}
    assert found == [{**nothing, "SLURM_PROCID": "0", "SAME": "s"}, {**nothing, "SLURM_PROCID": "1", "SAME": "s"}]


def test_failure_names_rank_and_shows_traceback() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(targets.raise_on, 2, 1)
    text = str(failure.value)
    assert re.search(r"raise_on failed on 1 of 2 ranks \(rank 1; rank 1 first\)", text)
    assert "--- rank 0 returned, after" in text
    assert "[rank 1] Traceback (most recent call last):" in text
    assert "in raise_on" in text
    assert "[rank 1] ValueError: rank 1 has a problem" in text
    assert "worker.py" not in text
    assert isinstance(failure.value, AssertionError)
    assert isinstance(failure.value.__cause__, ValueError)
    assert not failure.value.timed_out


def test_every_rank_may_report_within_the_grace_period() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(targets.raise_late, 2, 0.2, grace_s=30)
    assert [outcome.message for outcome in failure.value.outcomes] == ["report of rank 0", "report of rank 1"]


def test_other_ranks_are_killed_soon_after_the_first_failure(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(targets.raise_and_hang, 2, tmp_path, grace_s=0.3)
    assert time.monotonic() - started < 30
    zero, one = failure.value.outcomes
    assert (zero.status, one.status) == ("killed", "raised")
    assert "the_slow_part" in zero.stacks
    assert isinstance(failure.value.__cause__, RuntimeError)


def test_deadline_shows_stacks() -> None:
    with RankPool(2) as pool:
        pool.run(targets.my_rank)
        with pytest.raises(RankFailure) as failure:
            pool.run(targets.hang_on, 1, timeout_s=1)
    text = str(failure.value)
    assert failure.value.timed_out
    assert "the deadline of 1 s passed" in text
    assert "--- rank 1 was killed by the runner, still running before the target returned" in text
    assert re.search(r"\[rank 1\].* in the_slow_part", text)
    assert "[rank 1] about to work on 1" in text
    assert failure.value.outcomes[0].ok


def test_a_stopped_rank_does_not_hold_the_runner() -> None:
    (outcome,) = run_ranks_outcomes(targets.stop_self, 1, timeout_s=0.8)
    assert outcome.status == "killed"


def test_a_rank_that_never_starts_does_not_hold_the_runner(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(60)")
    env = {"PYTHONPATH": str(tmp_path)}
    (outcome,) = run_ranks_outcomes(targets.length, 1, bytes(10 << 20), timeout_s=0.5, env=env)
    assert (outcome.status, outcome.exit_code, outcome.stacks) == ("killed", -signal.SIGKILL, "")


def test_a_rank_that_ends_while_starting(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; print('too early', flush=True); os._exit(8)")
    env = {"PYTHONPATH": str(tmp_path)}
    (outcome,) = run_ranks_outcomes(targets.length, 1, bytes(10 << 20), env=env)
    assert (outcome.status, outcome.exit_code, outcome.stdout) == ("died", 8, "too early\n")


def test_hard_exit() -> None:
    with pytest.raises(RankFailure, match="ended with exit code 3 before the target returned") as failure:
        run_ranks(targets.hard_exit, 1, 3)
    assert failure.value.outcomes[0].exit_code == 3
    assert "leaving hard" in str(failure.value)


def test_hard_exit_with_zero_is_a_failure_too() -> None:
    with pytest.raises(RankFailure, match="ended with exit code 0 before the target returned"):
        run_ranks(targets.hard_exit, 1, 0)


def test_sys_exit() -> None:
    (outcome,) = run_ranks_outcomes(targets.soft_exit, 1, 4)
    assert (outcome.status, outcome.exception_type, outcome.message, outcome.exit_code) == (
        "raised",
        "SystemExit",
        "4",
        4,
    )


def test_an_end_that_fails_after_the_return_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="ended with exit code 5 after the target had returned"):
        run_ranks(targets.exit_at_exit, 1, 5)


def test_an_end_that_hangs_after_the_return_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="after the target had returned") as failure:
        run_ranks(targets.hang_at_exit, 1, timeout_s=4)
    assert "the_slow_part" in failure.value.outcomes[0].stacks


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSEGV])
def test_death_by_signal(signal_number: signal.Signals) -> None:
    with pytest.raises(RankFailure, match=f"ended by {signal_number.name} ") as failure:
        run_ranks(targets.kill_self, 1, int(signal_number))
    assert failure.value.outcomes[0].exit_code == -signal_number
    if signal_number == signal.SIGSEGV:
        assert "in kill_self" in failure.value.outcomes[0].stderr


def test_outcomes_do_not_raise() -> None:
    zero, one = run_ranks_outcomes(targets.raise_on, 2, 0)
    assert (zero.status, zero.exception_type, zero.message) == ("raised", "ValueError", "rank 0 has a problem")
    assert "in raise_on" in zero.traceback
    assert isinstance(zero.exception, ValueError)
    assert (zero.exit_code, zero.ok) == (1, False)
    assert (one.status, one.value, one.exit_code, one.ok) == ("returned", "fine", 0, True)
    assert one.duration_s >= 0


def test_outcomes_leave_the_others_time_until_the_deadline() -> None:
    outcomes = run_ranks_outcomes(targets.raise_late, 2, 2.2)
    assert [outcome.status for outcome in outcomes] == ["raised", "raised"]


def test_assert_shows_its_values() -> None:
    with pytest.raises(RankFailure, match=r"AssertionError: assert 1 == 2"):
        run_ranks(compare, 1, 1, 2)


def test_big_arguments_and_results() -> None:
    size_bytes = 10 << 20
    assert run_ranks(targets.length, 2, bytes(size_bytes)) == [size_bytes, size_bytes]
    zero, one = run_ranks(targets.big, 2, size_bytes)
    assert zero == bytes(size_bytes)
    assert one == b"\x01" * size_bytes


def test_an_argument_that_cannot_be_pickled_is_refused_before_anything_starts() -> None:
    with pytest.raises(TypeError, match="arguments for the ranks cannot be pickled"):
        run_ranks(targets.length, 1, threading.Lock())


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """One rank for what needs no fresh one."""
    with RankPool(1) as pool:
        yield pool


def test_a_result_that_cannot_be_pickled_is_named(pool: RankPool) -> None:
    (outcome,) = pool.run_outcomes(targets.unpicklable)
    assert outcome.exception_type == "TypeError"
    assert "unpicklable returned a lock that cannot be pickled" in outcome.message


def test_a_result_that_cannot_be_unpickled_here_is_named(pool: RankPool) -> None:
    (outcome,) = pool.run_outcomes(targets.stubborn)
    assert not outcome.ok
    assert outcome.message.startswith("the target returned, but its value cannot be unpickled here: ")


def test_classes_of_a_test_file_travel_both_ways(pool: RankPool) -> None:
    assert pool.run(targets.swap, targets.Pair(1, 2)) == [targets.Pair(2, 1)]
    (outcome,) = pool.run_outcomes(targets.raise_pair_error)
    assert isinstance(outcome.exception, targets.PairError)


def test_an_exception_that_cannot_be_rebuilt_is_still_shown(pool: RankPool) -> None:
    (outcome,) = pool.run_outcomes(targets.raise_stubborn)
    assert (outcome.exception_type, outcome.message, outcome.exception) == ("StubbornError", "1 and 2", None)
    assert "StubbornError: 1 and 2" in outcome.report()


def test_an_exception_without_a_working_str(pool: RankPool) -> None:
    (outcome,) = pool.run_outcomes(targets.raise_mute)
    assert (outcome.exception_type, outcome.message) == ("MuteError", "<str() of it raised ZeroDivisionError>")


def test_output_is_captured(pool: RankPool) -> None:
    (outcome,) = pool.run_outcomes(targets.speak)
    assert outcome.stdout == "said on stdout\nfrom below: \u00e4\n"
    assert outcome.stderr == "said on stderr\n"


def test_only_the_tail_of_long_output_is_shown(pool: RankPool) -> None:
    (outcome,) = pool.run_outcomes(targets.print_much)
    assert "[rank 0] stdout, last 60 of 1000 lines:" in outcome.report()
    assert "[rank 0] line 999" in outcome.report()
    assert "[rank 0] line 900" not in outcome.report()
    assert outcome.stdout.startswith("line 0\n")


def test_stdin_is_empty(pool: RankPool) -> None:
    assert pool.run(targets.read_stdin) == [""]


def test_the_runner_needs_no_torch(pool: RankPool) -> None:
    assert "torch" not in pool.run(targets.imported_modules)[0]


def test_ranks_end_as_programs_end(tmp_path: Path) -> None:
    run_ranks(targets.leave_a_note_at_exit, 2, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
