"""The watch names ranks that are missing, in warnings, errors, and when a signal ends a rank."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_utils.errors import CommError
from comm_utils.flight_recorder import RECORDER, open_ring, recorder, rings_in
from comm_utils.testing import patience, run_ranks, run_ranks_outcomes
from comm_utils.torch_support import group_state
from comm_utils.watch import WATCH, local_ranks

pytestmark = pytest.mark.slow

QUIET = {"CCL_SHARED_MEMORY_PROFILE": "0", "CUDA_VISIBLE_DEVICES": ""}
BACKENDS = pytest.mark.parametrize(
    ("backend", "env"),
    [("gloo", {}), ("ccl", {"CCL_SHARED_MEMORY": "0"}), ("ccl", {})],
    ids=["gloo", "oneccl", "shm"],
)


def _start(backend: str, timeout: float = 20) -> tuple[int, torch.Tensor]:
    dist.init_distributed(backend, timeout=timeout, verbose=False)
    tensor = torch.ones(100)
    for _ in range(3):
        dist.all_reduce(tensor)
    return dist.get_rank(), tensor


def _error(call: Any) -> tuple[str, str, float]:
    begin = time.monotonic()
    try:
        call()
    except CommError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


# --- warnings


def warned(backend: str) -> list[str]:
    seen: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    logging.getLogger("comm").addHandler(Keep(logging.WARNING))
    rank, tensor = _start(backend)
    if rank == 1:
        time.sleep(2.5)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return [text for text in seen if "so far" in text]


@BACKENDS
def test_a_slow_call_is_reported_once_and_names_the_missing_rank(backend: str, env: dict[str, str]) -> None:
    first, late, third = run_ranks(warned, 3, backend, env={**QUIET, **env, "COMM_CHECKS__WARN_AFTER_S": "1"})
    assert late == []
    for (text,) in (first, third):
        assert text.startswith("all_reduce on the group of ranks [0, 1, 2] has taken ")
        assert "rank 1 (pid " in text
        assert "has not called all_reduce, for which ranks 0 and 2 wait: it is in none of its calls, at " in text
        assert "test_watch.py" in text


def load_data() -> None:
    time.sleep(1)


def keeps_the_gil(backend: str) -> tuple[str, str, float]:
    rank, tensor = _start(backend)
    if rank == 1:
        load_data()  # whose stack the ring has
    for _ in range(3):
        dist.all_reduce(tensor)
    group = dist.new_group(timeout=2.5)
    if rank == 1:
        ctypes.PyDLL(None).usleep(3_500_000)
    found = _error(lambda: dist.all_reduce(tensor, group=group))
    dist.destroy_process_group()
    return found


@BACKENDS
def test_no_place_is_named_where_native_code_keeps_the_gil(backend: str, env: dict[str, str]) -> None:
    error, text, _ = run_ranks(keeps_the_gil, 2, backend, env={**QUIET, **env})[0]
    assert error == "CommTimeoutError"
    assert "has not called all_reduce, for which rank 0 waits: it is in none of its calls, and its watch has " in text
    assert "given no sign for " in text
    assert "load_data" not in text


# --- ranks that differ, lazily


def differ_in_an_object_call(backend: str) -> list[tuple[str, str, float]]:
    rank, tensor = _start(backend)

    def differing() -> None:
        if rank == 1:
            dist.all_gather_object([None, None], "text")
        else:
            dist.all_reduce(tensor)
        time.sleep(1)
        dist.all_reduce(tensor)

    found = [_error(differing)]
    dist.destroy_process_group()
    return found


def test_an_error_in_shared_memory_does_not_name_what_a_call_is_made_of() -> None:
    for ((error, text, _),) in run_ranks(differ_in_an_object_call, 2, "ccl", env=QUIET):
        assert error == "CollectiveMismatchError"
        assert "rank 1 calls all_gather_object(" in text
        assert "all_gather(" not in text


def differ(backend: str) -> list[tuple[str, str, float]]:
    rank, tensor = _start(backend)
    found = []
    group = dist.new_group([0, 1])
    begin = time.monotonic()

    def both() -> None:
        dist.all_reduce(tensor, "max" if rank else "sum", group)
        while time.monotonic() < begin + 3:
            time.sleep(0.05)
            dist.all_reduce(tensor, group=group)

    found.append(_error(both))
    dist.all_reduce(tensor)  # another group goes on
    dist.destroy_process_group()
    return found


@BACKENDS
def test_a_wrong_reduce_op_is_found_within_a_second(backend: str, env: dict[str, str]) -> None:
    for ((error, text, seconds),) in run_ranks(differ, 2, backend, env={**QUIET, **env}):
        assert error == "CollectiveMismatchError"
        assert "differ in the reduce op" in text
        assert "rank 0 calls all_reduce(100 elements of float32, op sum)" in text
        assert "rank 1 calls all_reduce(100 elements of float32, op max)" in text
        assert seconds < 1.5


def differ_at_last(what: str, pause_s: float) -> tuple[list[str], list[str]]:
    """Return what is raised or logged as an error before the end of the world, and until after it."""
    seen: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("comm").addHandler(handler)
    rank, tensor = _start("ccl")
    try:
        if what == "root":
            dist.broadcast(tensor, src=int(rank == 1))
        else:
            dist.all_reduce(tensor[: 90 if rank == 1 else 100], async_op=True)
    except dist.CollectiveMismatchError as error:  # of rank 2, where the watch was sooner than a late root
        seen.append(str(error))
    time.sleep(pause_s)
    before = list(seen)
    dist.destroy_process_group()
    return before, seen


def test_a_wrong_call_in_shared_memory_that_nothing_follows_is_reported_within_a_second() -> None:
    for rank, (before, seen) in enumerate(run_ranks(differ_at_last, 3, "root", 1.5, env=QUIET)):
        assert before == seen
        (text,) = seen
        assert rank == 2 or "belongs to a group whose ranks have made calls that differ" in text
        assert "ranks 0 and 2 call broadcast(100 elements of float32, root 0)" in text
        assert "rank 1 calls broadcast(100 elements of float32, root 1)" in text


@pytest.mark.parametrize("what", ["root", "async"])
def test_a_wrong_call_in_shared_memory_just_before_the_end_is_reported(what: str) -> None:
    ranks = run_ranks(differ_at_last, 3, what, 0.0, env=QUIET)
    texts = [text for _, seen in ranks for text in seen]
    assert texts
    assert all(("differ in the root" if what == "root" else "number of elements") in text for text in texts)


def message_differs() -> list[str]:
    """Return what ranks log of a message that is not of the type that its receiver expects."""
    seen: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("comm").addHandler(handler)
    rank, tensor = _start("ccl")
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        with pytest.raises(dist.CollectiveMismatchError):
            dist.recv(tensor.int(), 0)
    time.sleep(1.5)
    dist.destroy_process_group()
    return seen


def test_the_log_of_a_bystander_does_not_say_that_it_made_a_wrong_call() -> None:
    sender, receiver, bystander = run_ranks(message_differs, 3, env=QUIET)
    assert receiver == []
    for rank, seen in ((0, sender), (2, bystander)):
        (text,) = seen
        assert text.startswith(f"rank {rank} belongs to a group whose ranks have made calls that differ, so results of")
        assert "rank 1 and rank 0 disagree about how much the one sends to the other" in text


def differ_between_hosts(pause_s: float) -> tuple[str, str, float]:
    """The ranks take each other for ranks of other hosts, whose rings cannot be read."""
    rank = int(os.environ["RANK"])
    for module in (recorder, local_ranks):
        module.own_identity = lambda: f"host {rank}"  # type: ignore[attr-defined]
    dist.init_distributed("gloo", timeout=20, verbose=False)
    tensor = torch.ones(100)
    time.sleep(0.6)  # until which nobody asks other hosts
    begin = time.monotonic()

    def all_of_them() -> None:
        dist.all_reduce(tensor, "max" if rank else "sum")
        while time.monotonic() < begin + 6:
            dist.all_reduce(tensor)
            time.sleep(pause_s)

    found = _error(all_of_them)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("pause_s", [0.05, 0.0])
def test_a_wrong_reduce_op_is_found_between_hosts(pause_s: float) -> None:
    found = run_ranks(differ_between_hosts, 2, pause_s, env=QUIET)
    for error, text, seconds in found:
        assert error == "CollectiveMismatchError"
        assert "differ " in text
        assert seconds < 1.5 * patience()
    # Hundreds of calls later, what other hosts tell of the last ones does not reach back to the first that differs; nor
    # does a rank that has ended after it found that.
    assert not pause_s or any("differ in the reduce op: in call 1 of" in text for _, text, _ in found)


def unwatched() -> bool:
    rank, tensor = _start("gloo")
    dist.all_reduce(tensor, "max" if rank else "sum")
    time.sleep(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return True


def test_nothing_is_compared_where_checks_are_off() -> None:
    assert run_ranks(unwatched, 2, env={**QUIET, "COMM_CHECKS__MISMATCH": "off"}) == [True, True]


# --- two groups in different orders


def cross(backend: str, limited: bool) -> tuple[str, str, float]:
    rank, tensor = _start(backend)
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]

    def call() -> None:
        for group in groups if rank == 0 else reversed(groups):
            dist.all_reduce(tensor, group=group, timeout=2 if limited else None)

    found = _error(call)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return found


@BACKENDS
def test_groups_in_different_orders_are_found_before_the_timeout(backend: str, env: dict[str, str]) -> None:
    for error, text, seconds in run_ranks(cross, 2, backend, False, env={**QUIET, **env}):
        assert error == "CollectiveMismatchError"
        assert "ranks 0 and 1 use their groups in different orders and wait for each other" in text
        assert seconds < 2


def cross_behind_a_late_root(backend: str) -> float:
    """Rank 0 waits for the root, and rank 1 for rank 0: all go on once the root comes."""
    rank, tensor = _start(backend)
    pair, everyone = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    dist.barrier()
    if rank == 2:
        time.sleep(1.5)  # three looks of the watches
    if rank == 1:
        dist.all_reduce(tensor, group=pair)
    dist.broadcast(tensor, 2, group=everyone)
    if rank == 0:
        dist.all_reduce(tensor, group=pair)
    dist.barrier()
    dist.destroy_process_group()
    return float(tensor[0])


@pytest.mark.parametrize("backend", ["gloo", "ccl"])  # a broadcast of oneCCL's waits for all
def test_groups_in_different_orders_behind_a_late_root_go_on(backend: str) -> None:
    assert len(run_ranks(cross_behind_a_late_root, 3, backend, env=QUIET)) == 3


def wait_in_a_circle(backend: str, folder: str) -> tuple[str, str, float]:
    rank, tensor = _start(backend)
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
    found = _error(lambda: dist.all_reduce(tensor, group=groups[rank]))
    Path(folder, str(rank)).touch()
    while len(os.listdir(folder)) < 3:  # a call on the world would come before the call of a rank that still waits
        time.sleep(0.02)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return found


@BACKENDS
def test_groups_in_a_circle_are_found_before_the_timeout(backend: str, env: dict[str, str], tmp_path: Path) -> None:
    for error, text, seconds in run_ranks(wait_in_a_circle, 3, backend, str(tmp_path), env={**QUIET, **env}):
        assert error == "CollectiveMismatchError"
        assert "ranks 0, 1 and 2 use their groups in different orders and wait for each other: rank 0 is in " in text
        assert all(f"on the group of ranks {ranks}, named " in text for ranks in ("[0, 1]", "[1, 2]", "[0, 2]"))
        assert seconds < 4


def test_calls_with_a_timeout_of_their_own_are_left_to_it() -> None:
    for error, _, seconds in run_ranks(cross, 2, "gloo", True, env=QUIET):
        assert error in ("CommTimeoutError", "PeerLostError")
        assert 1.5 < seconds < 5


# --- ranks that end


def killed(backend: str) -> tuple[str, str, float]:
    rank, tensor = _start(backend)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    found = _error(lambda: dist.all_reduce(tensor))
    dist.destroy_process_group()
    return found


def raised(backend: str) -> tuple[str, str, float]:
    rank, tensor = _start(backend)
    if rank == 1:
        try:
            raise ValueError("out of flour")
        except ValueError:
            sys.excepthook(*sys.exc_info())  # as where nobody catches it
            os._exit(1)
    found = _error(lambda: dist.all_reduce(tensor))
    dist.destroy_process_group()
    return found


@BACKENDS
def test_a_killed_rank_is_named_with_its_process(backend: str, env: dict[str, str]) -> None:
    outcomes = run_ranks_outcomes(killed, 3, backend, env={**QUIET, **env})
    for rank in (0, 2):
        error, text, seconds = outcomes[rank].value
        assert error == "PeerLostError"
        assert "rank 1 (pid " in text
        assert "has ended" in text
        assert seconds < 5


def ended_by_an_exception(backend: str) -> tuple[str, str, float]:
    rank, tensor = _start(backend)
    with contextlib.suppress(ValueError):
        try:
            if rank == 1:
                raise ValueError("out of flour")
            return _error(lambda: dist.all_reduce(tensor))
        finally:
            dist.destroy_process_group()
    return "", "", 0.0


@BACKENDS
@pytest.mark.parametrize("target", [raised, ended_by_an_exception])
def test_the_exception_that_ended_a_rank_or_its_world_is_named(target: Any, backend: str, env: dict[str, str]) -> None:
    outcomes = run_ranks_outcomes(target, 3, backend, env={**QUIET, **env})
    for rank in (0, 2):
        error, text, seconds = outcomes[rank].value
        assert error == "PeerLostError"
        assert "rank 1 (pid " in text
        assert "with ValueError: out of flour" in text
        assert seconds < 5


def left_with_an_exit_code(code: int) -> bool:
    _start("gloo")
    try:
        sys.exit(code)
    except SystemExit:
        path = RECORDER.path
        dist.destroy_process_group()
    return path is not None and path.exists()


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_that_exits_with_an_error_keeps_its_ring(code: int) -> None:
    assert run_ranks(left_with_an_exit_code, 2, code, env=QUIET) == [bool(code)] * 2


# --- signals


def terminated(backend: str, log: str) -> None:
    """Rank 1 is killed, and a launcher ends the other one a moment later, as torchrun does."""
    rank, tensor = _start(backend)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    logger = logging.getLogger("comm")
    logger.addHandler(logging.FileHandler(log))
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    logger.warning(_error(lambda: dist.all_reduce(tensor))[1])  # where the error comes sooner
    time.sleep(10)


@BACKENDS
def test_a_launcher_that_ends_the_others_does_not_hide_who_was_killed(
    backend: str, env: dict[str, str], tmp_path: Path
) -> None:
    rings = {"COMM_FLIGHT_RECORDER__DIRECTORY": str(tmp_path / "rings")}
    run_ranks_outcomes(terminated, 2, backend, str(tmp_path / "log"), env={**QUIET, **env, **rings})
    (folder,) = (tmp_path / "rings").iterdir()
    signals = {}
    for path in rings_in(folder):
        reader = open_ring(path)
        signals[reader.header.rank] = reader.header.signal
        reader.close()
    assert signals == {0: signal.SIGTERM, 1: 0}
    said = (tmp_path / "log").read_text()
    assert "rank 1 (pid " in said
    assert "has ended" in said


def interrupted(backend: str) -> tuple[bool, float, str]:
    rank, tensor = _start(backend)
    begin, seen = time.monotonic(), ""
    if rank == 1:
        time.sleep(3.5)  # longer than a busy rank 0 takes to end what oneCCL would still finish
        error, seen, _ = _error(lambda: dist.all_reduce(tensor))
        dist.destroy_process_group()
        return bool(error), 0.0, seen
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        dist.all_reduce(tensor)
    seconds = time.monotonic() - begin
    dist.destroy_process_group()
    return True, seconds, ""


@BACKENDS
def test_ctrl_c_ends_a_call_that_waits(backend: str, env: dict[str, str]) -> None:
    (is_interrupted, seconds, _), (has_failed, _, text) = run_ranks(interrupted, 2, backend, env={**QUIET, **env})
    assert is_interrupted
    assert seconds < 2.5
    # In shared memory, what rank 0 gave before it was interrupted may be enough.
    assert "rank 0" in text if has_failed else "CCL_SHARED_MEMORY" not in env and backend == "ccl"


def interrupted_and_stays(backend: str, done: str) -> str:
    rank, tensor = _start(backend)
    seen = ""
    if rank == 1:
        time.sleep(2.5)
        _, seen, _ = _error(lambda: dist.all_reduce(tensor))
        Path(done).touch()
    else:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(tensor)
        end = time.monotonic() + 30
        while not Path(done).exists() and time.monotonic() < end:
            time.sleep(0.05)
    dist.destroy_process_group()
    return seen


def test_a_rank_that_goes_on_after_ctrl_c_is_named(tmp_path: Path) -> None:
    _, text = run_ranks(interrupted_and_stays, 2, "gloo", str(tmp_path / "done"), env=QUIET)
    assert re.search(r"rank 0 \(pid .*\) was interrupted \(SIGINT\) in a call", text)


# --- waits with a timeout of their own


def wait_for_a_moment(backend: str) -> tuple[list[tuple[str, str, float]], float]:
    rank, tensor = _start(backend)
    found = []
    if rank == 1:
        time.sleep(3)
    if rank == 0:
        received = dist.irecv(torch.zeros(3), 1)
        found.append(_error(lambda: received.wait(0.7)))
        received.wait()
    elif rank == 1:
        dist.send(torch.ones(3), 0)
        time.sleep(2)
    work = dist.all_reduce(tensor.fill_(1), async_op=True)
    if rank != 1:
        found.append(_error(lambda: work.wait(0.7)))
    work.wait()
    dist.all_reduce(tensor)  # the group goes on
    dist.destroy_process_group()
    return found, tensor[0].item()


@BACKENDS
def test_a_wait_that_times_out_names_the_call_and_the_missing_rank(backend: str, env: dict[str, str]) -> None:
    (first, _, third) = run_ranks(wait_for_a_moment, 3, backend, env={**QUIET, **env})
    assert {value for _, value in (first, third)} == {9.0}
    (of_message, of_call), (of_other,) = first[0], third[0]
    for name, missed, (error, text, _) in (
        ("irecv", "send", of_message),
        ("all_reduce", "all_reduce", of_call),
        ("all_reduce", "all_reduce", of_other),
    ):
        assert error == "CommTimeoutError"
        assert text.startswith(f"{name} on the group of ranks [0, 1, 2] did not finish within 0.7 s: rank 1 (pid ")
        assert f"has not called {missed}, for which " in text
        assert text.endswith("; it is still under way and may be waited for again")


# --- ranks that wait in a store


def _await_the_dead(call: Any, backend: str) -> tuple[str, str, float]:
    rank, _ = _start(backend)
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    found = _error(call)
    dist.destroy_process_group()
    return found


def make_group_with_the_dead(backend: str) -> tuple[str, str, float]:
    return _await_the_dead(lambda: dist.new_group([0, 1, 2]), backend)


def pass_barrier_with_the_dead(backend: str) -> tuple[str, str, float]:
    return _await_the_dead(lambda: dist.monitored_barrier(), backend)


def compress_with_the_dead(backend: str) -> tuple[str, str, float]:
    return _await_the_dead(lambda: dist.all_reduce(torch.ones(100000), async_op=True, compression="bf16"), backend)


@BACKENDS
@pytest.mark.parametrize(
    ("target", "call"),
    [
        (make_group_with_the_dead, "new_group"),
        (pass_barrier_with_the_dead, "monitored_barrier"),
        (compress_with_the_dead, "all_reduce"),
    ],
)
def test_a_rank_that_was_killed_is_named_by_those_that_wait_in_a_store(
    target: Any, call: str, backend: str, env: dict[str, str]
) -> None:
    outcomes = run_ranks_outcomes(target, 3, backend, env={**QUIET, **env})
    for rank in (0, 2):
        error, text, seconds = outcomes[rank].value
        assert error == "PeerLostError"
        assert text.startswith(f"{call} on the group of ranks [0, 1, 2] lost a peer, as seen by rank {rank}: rank 1 (")
        assert re.search(r"rank 1 \(pid \d+ on \S+\) has ended", text)
        assert seconds < 5 * patience()


def learn_by_the_end_of_the_store(backend: str) -> tuple[str, str, float]:
    if int(os.environ["RANK"]) == 2:  # as where the thread of its watch gets no core
        WATCH.trouble = lambda group: None  # type: ignore[method-assign]
    return pass_barrier_with_the_dead(backend)


def test_a_rank_that_was_killed_is_named_where_the_store_has_gone_because_of_it() -> None:
    outcomes = run_ranks_outcomes(learn_by_the_end_of_the_store, 3, "gloo", env=QUIET)
    error, text, _ = outcomes[2].value
    assert error == "PeerLostError"
    assert re.search(r"as seen by rank 2: rank 1 \(pid \d+ on \S+\) has ended by SIGKILL", text), text


def make_group_late(backend: str) -> tuple[list[str], str]:
    seen: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    logging.getLogger("comm").addHandler(Keep(logging.WARNING))
    rank, _ = _start(backend)
    text = ""
    if rank == 1:
        time.sleep(4)
    else:
        _, text, _ = _error(lambda: dist.new_group([0, 1], timeout=2.5))
    dist.destroy_process_group()
    return [one for one in seen if "so far" in one], text


@BACKENDS
def test_the_making_of_a_group_warns_and_times_out_like_a_call(backend: str, env: dict[str, str]) -> None:
    (warnings, text), _ = run_ranks(make_group_late, 2, backend, env={**QUIET, **env, "COMM_CHECKS__WARN_AFTER_S": "1"})
    (warning,) = warnings
    assert warning.startswith("new_group on the group of ranks [0, 1] has taken ")
    assert "rank 1 (pid " in warning
    assert "has not called new_group, for which rank 0 waits: it is in none of its calls, at " in warning
    assert text.startswith("new_group on rank 0: not every rank of [0, 1] came to make the group: [1] did not within ")
    assert "2.5 s (rank 1 (pid " in text
    assert "has not called new_group: it is in none of its calls, at " in text


def make_or_call(backend: str) -> tuple[str, str, float]:
    rank, tensor = _start(backend)
    time.sleep(0.1)
    found = _error(lambda: dist.new_group([0, 1]) if rank else dist.all_reduce(tensor))
    dist.destroy_process_group()
    return found


@BACKENDS
def test_a_group_that_one_rank_makes_while_the_other_calls(backend: str, env: dict[str, str]) -> None:
    found = run_ranks(make_or_call, 2, backend, env={**QUIET, **env})
    assert {error for error, _, _ in found} <= {"CollectiveMismatchError", "PeerLostError"}
    for _, text, seconds in found:
        assert "ranks 0 and 1 use their groups in different orders and wait for each other" in text
        assert seconds < 3 + patience()


def finish_late(backend: str, is_in_new_group: bool) -> float:
    rank, tensor = _start(backend)
    if rank == 0:
        create = group_state.create_group

        def finish(*arguments: Any) -> Any:
            made = create(*arguments)
            time.sleep(1.5)
            return made

        group_state.create_group = finish
    else:
        time.sleep(0.5)
    group = dist.new_group([0, 1])
    dist.all_reduce(tensor.fill_(1), group=group if is_in_new_group else None)
    dist.barrier()
    dist.destroy_process_group()
    return tensor[0].item()


@BACKENDS
@pytest.mark.parametrize("is_in_new_group", [True, False])
def test_a_rank_may_finish_the_making_of_a_group_late(backend: str, env: dict[str, str], is_in_new_group: bool) -> None:
    assert run_ranks(finish_late, 2, backend, is_in_new_group, env={**QUIET, **env}) == [2.0, 2.0]


# --- again in the same process


def again(backend: str) -> list[str]:
    found = []
    for number in range(2):
        rank, tensor = _start(backend, timeout=1)
        if rank == 0:
            found.append(_error(lambda tensor=tensor: dist.all_reduce(tensor))[0])  # type: ignore[misc]
        else:
            time.sleep(1.6)
        path = RECORDER.path
        assert path is not None
        assert path.exists()
        dist.destroy_process_group()
        assert RECORDER.path is None
        assert path.exists() == (rank == 0)  # it stays after a failure
        assert not WATCH.is_running
        assert not [one for one in threading.enumerate() if one.name == "comm-watch"]
        Path(path).unlink(missing_ok=True)
        found.append(str(number))
    return found


@BACKENDS
def test_a_world_after_a_failed_one_is_watched_like_the_first(backend: str, env: dict[str, str]) -> None:
    first, _ = run_ranks(again, 2, backend, env={**QUIET, **env})
    assert first == ["CommTimeoutError", "0", "CommTimeoutError", "1"]


def waits_beside_an_unawaited_call(folder: str) -> str:
    dist.init_distributed("gloo", verbose=False, timeout=4)
    rank, done = dist.get_rank(), Path(folder)
    unawaited = dist.all_reduce(torch.ones(4), async_op=True)
    said = ""
    if rank == 1:
        while len(list(done.iterdir())) < 2:
            time.sleep(0.05)
    else:
        with pytest.raises(dist.CommTimeoutError) as caught:
            dist.all_reduce(torch.ones(1000))
        said = str(caught.value)
        (done / str(rank)).touch()
    del unawaited
    return said


def test_a_call_that_nobody_waited_for_does_not_hide_who_is_missing(tmp_path: Path) -> None:
    """The error said only that a rank did not take part."""
    for message in (found := run_ranks(waits_beside_an_unawaited_call, 3, str(tmp_path)))[0], found[2]:
        assert "rank 1 (pid " in message, message
        assert " has not called all_reduce, for which ranks 0 and 2 wait" in message
