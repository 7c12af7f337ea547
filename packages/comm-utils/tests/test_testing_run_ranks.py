"""run_ranks and run_ranks_outcomes: values, failures of every kind, deadlines."""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from comm_utils.testing import RankFailure, per_rank, run_ranks, run_ranks_outcomes


def my_rank() -> int:
    return int(os.environ["RANK"])


def rank_plus(offset: int, *, factor: int = 1) -> int:
    return (my_rank() + offset) * factor


def variables(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def raise_on(rank: int) -> str:
    if my_rank() == rank:
        raise ValueError(f"rank {rank} has a problem")
    return "fine"


def raise_everywhere() -> None:
    raise ValueError(f"rank {my_rank()} has a problem")


def compare(left: int, right: int) -> None:
    assert left == right


def hang_on(rank: int, seconds: float = 60.0) -> str:
    print(f"about to work on {my_rank()}")
    if my_rank() == rank:
        the_slow_part(seconds)
    return "done"


def the_slow_part(seconds: float) -> None:
    time.sleep(seconds)


def raise_and_hang() -> None:
    if my_rank() == 1:
        raise RuntimeError("first")
    the_slow_part(60)


def raise_late(seconds: float) -> None:
    time.sleep(seconds * my_rank())
    raise RuntimeError(f"report of rank {my_rank()}")


def hard_exit(code: int) -> None:
    print("leaving hard")
    os._exit(code)


def soft_exit(code: int) -> None:
    sys.exit(code)


def exit_at_exit(code: int) -> str:
    atexit.register(os._exit, code)
    return "returned all the same"


def hang_at_exit() -> str:
    threading.Thread(target=the_slow_part, args=(60,)).start()
    return "returned all the same"


def kill_self(signal_number: int) -> None:
    os.kill(os.getpid(), signal_number)
    time.sleep(60)


def stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def big(size_bytes: int) -> bytes:
    return bytes([my_rank()]) * size_bytes


def length(data: bytes) -> int:
    return len(data)


def unpicklable() -> object:
    return threading.Lock()


def speak() -> None:
    print("said on stdout")
    print("said on stderr", file=sys.stderr)
    os.write(1, "from below: \u00e4\n".encode())


def print_much() -> None:
    for line in range(1000):
        print(f"line {line}")
    raise RuntimeError("after much output")


def read_stdin() -> str:
    return sys.stdin.read()


def leave_a_note_at_exit(folder: Path) -> None:
    atexit.register((folder / f"{my_rank()}").write_text, "left")


def imported_modules() -> list[str]:
    return list(sys.modules)


class Pair:
    """A class that only this file defines."""

    def __init__(self, left: int, right: int) -> None:
        self.left = left
        self.right = right

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pair) and (self.left, self.right) == (other.left, other.right)

    __hash__ = None  # type: ignore[assignment]


class PairError(Exception):
    """Likewise."""


class StubbornError(Exception):
    """Cannot be rebuilt from what it keeps."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")


def swap(pair: Pair) -> Pair:
    return Pair(pair.right, pair.left)


def raise_pair_error() -> None:
    raise PairError("mine")


def raise_stubborn() -> None:
    raise StubbornError(1, 2)


def test_values_come_in_rank_order() -> None:
    assert run_ranks(rank_plus, 3, 10, factor=2) == [20, 22, 24]


def test_per_rank_arguments() -> None:
    assert run_ranks(rank_plus, 2, per_rank([100, 200]), factor=per_rank([1, -1])) == [100, -201]
    with pytest.raises(ValueError, match="3 values for 2 ranks"):
        run_ranks(rank_plus, 2, per_rank([1, 2, 3]))


def test_world_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        run_ranks(rank_plus, 0, 1)


def test_launcher_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "outer")
    monkeypatch.setenv("RANK", "7")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")
    first, second = run_ranks(variables, 2, *names, "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    assert [first[name] for name in names] == ["0", "0", "2", "2", "0", "127.0.0.1", "1"]
    assert [second[name] for name in names] == ["1", "1", "2", "2", "0", "127.0.0.1", "1"]
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert first["TORCHELASTIC_RUN_ID"] is None


def test_no_launcher_variables_and_own_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "7")
    monkeypatch.setenv("TO_GO", "x")
    env = {"SLURM_PROCID": per_rank(["0", "1"]), "SAME": "s", "TO_GO": None}
    found = run_ranks(
        variables, 2, "RANK", "WORLD_SIZE", "SLURM_PROCID", "SAME", "TO_GO", env=env, launcher_env=False
    )
    nothing = {"RANK": None, "WORLD_SIZE": None, "TO_GO": None}
    assert found == [{**nothing, "SLURM_PROCID": "0", "SAME": "s"}, {**nothing, "SLURM_PROCID": "1", "SAME": "s"}]


def test_failure_names_rank_and_shows_traceback() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(raise_on, 2, 1)
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
        run_ranks(raise_late, 2, 0.3, grace_s=30)
    assert [outcome.message for outcome in failure.value.outcomes] == ["report of rank 0", "report of rank 1"]


def test_other_ranks_are_killed_soon_after_the_first_failure() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(raise_and_hang, 2, timeout_s=60, grace_s=0.3)
    assert time.monotonic() - started < 30
    zero, one = failure.value.outcomes
    assert (zero.status, one.status) == ("killed", "raised")
    assert "the_slow_part" in zero.stacks
    assert "RuntimeError: first" in str(failure.value.__cause__.__class__.__name__) + ": " + str(
        failure.value.__cause__
    )


def test_deadline_shows_stacks() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(hang_on, 2, 1, timeout_s=3)
    text = str(failure.value)
    assert failure.value.timed_out
    assert "the deadline of 3 s passed" in text
    assert "--- rank 1 was killed by the runner, still running before the target returned" in text
    assert re.search(r"\[rank 1\].* in the_slow_part", text)
    assert "[rank 1] about to work on 1" in text
    assert failure.value.outcomes[0].ok


def test_a_stopped_rank_does_not_hold_the_runner() -> None:
    (outcome,) = run_ranks_outcomes(stop_self, 1, timeout_s=1.5)
    assert outcome.status == "killed"


def test_hard_exit() -> None:
    with pytest.raises(RankFailure, match="ended with exit code 3 before the target returned") as failure:
        run_ranks(hard_exit, 2, 3)
    assert failure.value.outcomes[0].exit_code == 3
    assert "leaving hard" in str(failure.value)


def test_hard_exit_with_zero_is_a_failure_too() -> None:
    with pytest.raises(RankFailure, match="ended with exit code 0 before the target returned"):
        run_ranks(hard_exit, 1, 0)


def test_sys_exit() -> None:
    (outcome,) = run_ranks_outcomes(soft_exit, 1, 4)
    assert (outcome.status, outcome.exception_type, outcome.message, outcome.exit_code) == (
        "raised",
        "SystemExit",
        "4",
        4,
    )


def test_an_end_that_fails_after_the_return_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="ended with exit code 5 after the target had returned"):
        run_ranks(exit_at_exit, 1, 5)


def test_an_end_that_hangs_after_the_return_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="still running after the target had returned") as failure:
        run_ranks(hang_at_exit, 1, timeout_s=2)
    assert "the_slow_part" in failure.value.outcomes[0].stacks


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSEGV])
def test_death_by_signal(signal_number: signal.Signals) -> None:
    with pytest.raises(RankFailure, match=f"ended by {signal_number.name} ") as failure:
        run_ranks(kill_self, 1, int(signal_number))
    assert failure.value.outcomes[0].exit_code == -signal_number
    if signal_number == signal.SIGSEGV:
        assert "in kill_self" in failure.value.outcomes[0].stderr


def test_outcomes_do_not_raise() -> None:
    zero, one = run_ranks_outcomes(raise_on, 2, 0)
    assert (zero.status, zero.exception_type, zero.message) == ("raised", "ValueError", "rank 0 has a problem")
    assert "in raise_on" in zero.traceback
    assert isinstance(zero.exception, ValueError)
    assert (zero.exit_code, zero.ok) == (1, False)
    assert (one.status, one.value, one.exit_code, one.ok) == ("returned", "fine", 0, True)
    assert one.duration_s >= 0


def test_outcomes_leave_the_others_time_until_the_deadline() -> None:
    outcomes = run_ranks_outcomes(raise_late, 2, 2.5)
    assert [outcome.status for outcome in outcomes] == ["raised", "raised"]


def test_assert_shows_its_values() -> None:
    with pytest.raises(RankFailure, match=r"AssertionError: assert 1 == 2"):
        run_ranks(compare, 1, 1, 2)


def test_big_arguments_and_results() -> None:
    size_bytes = 10 << 20
    assert run_ranks(length, 2, bytes(size_bytes)) == [size_bytes, size_bytes]
    zero, one = run_ranks(big, 2, size_bytes)
    assert zero == bytes(size_bytes)
    assert one == b"\x01" * size_bytes


def test_a_result_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(RankFailure, match=r"unpicklable returned a lock that cannot be pickled"):
        run_ranks(unpicklable, 1)


def test_an_argument_that_cannot_be_pickled_is_refused_before_anything_starts() -> None:
    with pytest.raises(TypeError, match="arguments for the ranks cannot be pickled"):
        run_ranks(length, 1, threading.Lock())


def test_classes_of_a_test_file_travel_both_ways() -> None:
    assert run_ranks(swap, 1, Pair(1, 2)) == [Pair(2, 1)]
    (outcome,) = run_ranks_outcomes(raise_pair_error, 1)
    assert isinstance(outcome.exception, PairError)


def test_an_exception_that_cannot_be_rebuilt_is_still_shown() -> None:
    with pytest.raises(RankFailure, match="StubbornError: 1 and 2") as failure:
        run_ranks(raise_stubborn, 1)
    assert failure.value.__cause__ is None


def test_output_is_captured() -> None:
    (outcome,) = run_ranks_outcomes(speak, 1)
    assert outcome.stdout == "said on stdout\nfrom below: \u00e4\n"
    assert "said on stderr" in outcome.stderr


def test_only_the_tail_of_long_output_is_shown() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(print_much, 1)
    assert "[rank 0] stdout, last 60 of 1000 lines:" in str(failure.value)
    assert "[rank 0] line 999" in str(failure.value)
    assert "[rank 0] line 900" not in str(failure.value)
    assert failure.value.outcomes[0].stdout.startswith("line 0\n")


def test_stdin_is_empty() -> None:
    assert run_ranks(read_stdin, 1) == [""]


def test_ranks_end_as_programs_end(tmp_path: Path) -> None:
    run_ranks(leave_a_note_at_exit, 2, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_the_runner_needs_no_torch() -> None:
    (modules,) = run_ranks("test_the_runner:modules".replace("test_the_runner:modules", "builtins:dir"), 1, {})
    assert modules
    assert "torch" not in run_ranks(imported_modules, 1)[0]
