"""RankPool: many calls, set-up, and a fresh start after every failure."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comm_utils.testing import RankFailure, RankPool, per_rank

# Loaded by path, as test folders are no packages.
_spec = importlib.util.spec_from_file_location(f"{__name__}_targets", Path(__file__).with_name("testing_targets.py"))
assert _spec is not None
assert _spec.loader is not None
targets = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(targets)


def test_ranks_stay_between_calls() -> None:
    with RankPool(2) as pool:
        pids = pool.run(targets.pid)
        assert len(set(pids)) == 2
        for value in range(50):
            assert pool.run(targets.add, value, right=per_rank([1, 2])) == [value + 1, value + 2]
        assert pool.run(targets.pid) == pids


def test_setup_runs_once_in_every_rank() -> None:
    with RankPool(2, setup=targets.prepare, setup_args=("ready",)) as pool:
        assert pool.run(targets.state) == [["ready"], ["ready"]]
        assert pool.run(targets.state) == [["ready"], ["ready"]]


def test_failure_of_the_setup_is_reported_and_tried_again(tmp_path: Path) -> None:
    with RankPool(2, setup=targets.fail_once, setup_args=(tmp_path / "marker",)) as pool:
        with pytest.raises(RankFailure, match=r"the set-up .*fail_once failed on 1 of 2 ranks") as failure:
            pool.run(targets.pid)
        assert "RuntimeError: not prepared" in str(failure.value)
        assert len(pool.run(targets.pid)) == 2


def test_new_ranks_after_a_failure() -> None:
    with RankPool(2, setup=targets.prepare, setup_args=("ready",)) as pool:
        before = pool.run(targets.pid)
        with pytest.raises(RankFailure, match="failed on 1 of 2 ranks"):
            pool.run(targets.raise_if, per_rank([True, False]))
        after = pool.run(targets.pid)
        assert not set(before) & set(after)
        assert pool.run(targets.state) == [["ready"], ["ready"]]
        assert len(set(pool.run(targets.port))) == 1


def test_new_ranks_after_a_deadline() -> None:
    with RankPool(2) as pool:
        before = pool.run(targets.pid)
        with pytest.raises(RankFailure, match=r"deadline of 0\.5 s passed") as failure:
            pool.run(targets.sleep, per_rank([0, 60]), timeout_s=0.5)
        assert "in sleep" in failure.value.outcomes[1].stacks
        assert failure.value.outcomes[0].ok
        assert not set(before) & set(pool.run(targets.pid))


def test_new_ranks_after_a_death() -> None:
    with RankPool(2, grace_s=0.2) as pool:
        before = pool.run(targets.pid)
        with pytest.raises(RankFailure, match="ended with exit code 3"):
            pool.run(targets.hard_exit, 3)
        assert not set(before) & set(pool.run(targets.pid))


def test_a_death_between_calls_is_reported() -> None:
    with RankPool(1) as pool:
        (pid,) = pool.run(targets.exit_soon)
        while ") Z " not in Path(f"/proc/{pid}/stat").read_text():
            time.sleep(0.02)
        with pytest.raises(RankFailure, match=r"(?s)ended by themselves.*ended with exit code 9 after its last call"):
            pool.run(targets.pid)
        assert len(pool.run(targets.pid)) == 1


def test_outcomes_keep_ranks_that_answered() -> None:
    with RankPool(2) as pool:
        before = pool.run(targets.pid)
        zero, one = pool.run_outcomes(targets.raise_if, per_rank([True, False]))
        assert (zero.status, zero.message, zero.exit_code) == ("raised", "rank 0 refuses", None)
        assert (one.status, one.value) == ("returned", "fine")
        assert pool.run(targets.pid) == before
        outcomes = pool.run_outcomes(targets.hard_exit, 3)
        assert [outcome.status for outcome in outcomes] == ["died", "died"]
        assert not set(before) & set(pool.run(targets.pid))


def test_output_belongs_to_its_call() -> None:
    with RankPool(1, setup=targets.prepare, setup_args=("x",)) as pool:
        assert [pool.run_outcomes(targets.say, word)[0].stdout for word in ("one", "two")] == ["one\n", "two\n"]


def test_arguments_that_cannot_be_sent_do_not_cost_the_ranks() -> None:
    with RankPool(1) as pool:
        before = pool.run(targets.pid)
        with pytest.raises(TypeError, match="cannot be pickled"):
            pool.run(targets.say, lambda: None)
        assert pool.run(targets.pid) == before


def test_ranks_end_as_programs_end(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        pool.run(targets.leave_a_note_at_exit, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_a_bad_end_is_reported() -> None:
    pool = RankPool(1)
    with pytest.raises(RankFailure, match="did not end well"), pool:
        pool.run(targets.exit_badly_at_exit)


def test_an_error_in_the_block_is_not_covered_up() -> None:
    pool = RankPool(1)
    with pytest.raises(ZeroDivisionError), pool:
        pool.run(targets.exit_badly_at_exit)[0] / 0


def test_misuse() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RankPool(0)
    with pytest.raises(RuntimeError, match="not open"):
        RankPool(1).run(targets.pid)
    with RankPool(1) as pool, pytest.raises(TypeError, match="use run_ranks"):
        pool.run(__file__)


def test_an_unused_pool_starts_nothing() -> None:
    with RankPool(1000):
        pass


def test_hypothesis_shrinks_through_failures() -> None:
    with RankPool(2, grace_s=0.5) as pool:

        @settings(
            max_examples=10, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
        )
        @given(value=st.integers(0, 20))
        def check(value: int) -> None:
            assert pool.run(targets.below, value, 7) == [value, value]

        with pytest.raises(RankFailure, match="ValueError: 7 is not below 7"):
            check()
