"""RankPool: many calls, set-up, and a fresh start after every failure."""

from __future__ import annotations

import atexit
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comm_utils.testing import RankFailure, RankPool, per_rank

STATE: list[str] = []


def my_rank() -> int:
    return int(os.environ["RANK"])


def pid() -> int:
    return os.getpid()


def port() -> str:
    return os.environ["MASTER_PORT"]


def add(left: int, right: int) -> int:
    return left + right


def prepare(word: str) -> None:
    print("preparing")
    STATE.append(word)


def state() -> list[str]:
    return STATE


def fail_once(marker: Path) -> None:
    if my_rank() == 0 and not marker.exists():
        marker.touch()
        raise RuntimeError("not prepared")


def raise_if(condition: bool) -> str:
    if condition:
        raise ValueError(f"rank {my_rank()} refuses")
    return "fine"


def below(value: int, limit: int) -> int:
    assert value < limit
    return value


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def hard_exit() -> None:
    os._exit(3)


def exit_soon() -> None:
    import threading

    threading.Timer(0.05, os._exit, [9]).start()


def say(word: str) -> None:
    print(word)


def note_at_exit(folder: Path) -> None:
    atexit.register((folder / f"{my_rank()}").write_text, "left")


def exit_badly_at_exit() -> None:
    atexit.register(os._exit, 6)


def test_ranks_stay_between_calls() -> None:
    with RankPool(2) as pool:
        pids = pool.run(pid)
        assert len(set(pids)) == 2
        for value in range(50):
            assert pool.run(add, value, right=per_rank([1, 2])) == [value + 1, value + 2]
        assert pool.run(pid) == pids


def test_setup_runs_once_in_every_rank() -> None:
    with RankPool(2, setup=prepare, setup_args=("ready",)) as pool:
        assert pool.run(state) == [["ready"], ["ready"]]
        assert pool.run(state) == [["ready"], ["ready"]]


def test_failure_of_the_setup_is_reported_and_tried_again(tmp_path: Path) -> None:
    with RankPool(2, setup=fail_once, setup_args=(tmp_path / "marker",)) as pool:
        with pytest.raises(RankFailure, match="the set-up .*fail_once failed on 1 of 2 ranks") as failure:
            pool.run(pid)
        assert "RuntimeError: not prepared" in str(failure.value)
        assert len(pool.run(pid)) == 2


def test_new_ranks_after_a_failure() -> None:
    with RankPool(2, setup=prepare, setup_args=("ready",)) as pool:
        before, port_before = pool.run(pid), pool.run(port)
        with pytest.raises(RankFailure, match="failed on 1 of 2 ranks"):
            pool.run(raise_if, per_rank([True, False]))
        after = pool.run(pid)
        assert not set(before) & set(after)
        assert pool.run(state) == [["ready"], ["ready"]]
        assert len({*port_before, *pool.run(port)}) <= 2


def test_new_ranks_after_a_deadline() -> None:
    with RankPool(2) as pool:
        before = pool.run(pid)
        with pytest.raises(RankFailure, match=r"deadline of 0\.5 s passed") as failure:
            pool.run(sleep, per_rank([0, 60]), timeout_s=0.5)
        assert "in sleep" in failure.value.outcomes[1].stacks
        assert failure.value.outcomes[0].ok
        assert not set(before) & set(pool.run(pid))


def test_new_ranks_after_a_death() -> None:
    with RankPool(2, grace_s=0.2) as pool:
        before = pool.run(pid)
        with pytest.raises(RankFailure, match="ended with exit code 3"):
            pool.run(hard_exit)
        assert not set(before) & set(pool.run(pid))


def test_a_death_between_calls_is_reported() -> None:
    with RankPool(1) as pool:
        pool.run(exit_soon)
        time.sleep(1)
        with pytest.raises(RankFailure, match=r"(?s)ended by themselves.*ended with exit code 9 after its last call"):
            pool.run(pid)
        assert len(pool.run(pid)) == 1


def test_outcomes_keep_ranks_that_answered() -> None:
    with RankPool(2) as pool:
        before = pool.run(pid)
        zero, one = pool.run_outcomes(raise_if, per_rank([True, False]))
        assert (zero.status, zero.message, zero.exit_code) == ("raised", "rank 0 refuses", None)
        assert (one.status, one.value) == ("returned", "fine")
        assert pool.run(pid) == before
        outcomes = pool.run_outcomes(hard_exit)
        assert [outcome.status for outcome in outcomes] == ["died", "died"]
        assert not set(before) & set(pool.run(pid))


def test_output_belongs_to_its_call() -> None:
    with RankPool(1, setup=prepare, setup_args=("x",)) as pool:
        assert [pool.run_outcomes(say, word)[0].stdout for word in ("one", "two")] == ["one\n", "two\n"]


def test_arguments_that_cannot_be_sent_do_not_cost_the_ranks() -> None:
    with RankPool(1) as pool:
        before = pool.run(pid)
        with pytest.raises(TypeError, match="cannot be pickled"):
            pool.run(say, lambda: None)
        assert pool.run(pid) == before


def test_ranks_end_as_programs_end(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        pool.run(note_at_exit, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_a_bad_end_is_reported() -> None:
    pool = RankPool(1)
    with pytest.raises(RankFailure, match="did not end well"), pool:
        pool.run(exit_badly_at_exit)


def test_an_error_in_the_block_is_not_covered_up() -> None:
    pool = RankPool(1)
    with pytest.raises(KeyError), pool:
        pool.run(exit_badly_at_exit)
        raise KeyError("mine")


def test_misuse() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RankPool(0)
    with pytest.raises(RuntimeError, match="not open"):
        RankPool(1).run(pid)
    with RankPool(1) as pool, pytest.raises(TypeError, match="use run_ranks"):
        pool.run(__file__)


def test_an_unused_pool_starts_nothing() -> None:
    with RankPool(1000):
        pass


def test_hypothesis_shrinks_through_failures() -> None:
    with RankPool(2, grace_s=0.5) as pool:

        @settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(value=st.integers(0, 8))
        def check(value: int) -> None:
            assert pool.run(below, value, 7) == [value, value]

        with pytest.raises(AssertionError, match="assert 7 < 7"):
            check()
