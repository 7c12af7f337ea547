"""A rank that leaves its world while others wait for it, and wrong results after which no call comes."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import Store

import comm_orchestrator as dist
from comm_backend_ccl import member_records
from comm_orchestrator.rendezvous import started
from comm_utils.errors import CommError, CommTimeoutError
from comm_utils.flight_recorder import RECORDER
from comm_utils.flight_recorder.reader import RingReader
from comm_utils.process_state import is_alive
from comm_utils.testing import patience, run_ranks, run_ranks_outcomes
from comm_utils.threads import is_still_connecting
from comm_utils.torch_support import group_agreement, group_creation
from comm_utils.torch_support.connecting import Place
from comm_utils.torch_support.store_waits import StoreWait

BACKENDS = pytest.mark.parametrize("backend", ["gloo", "ccl"])
TIMEOUT_S = 30
NEEDS_CONNECTIONS = pytest.mark.skipif(
    not hasattr(Store, "clone"), reason="needs a second connection to the store, of torch 2.8"
)


def leaves(backend: str) -> tuple[str, str, float]:
    """Rank 1 destroys its world at once, and its process goes on."""
    dist.init_distributed(backend, timeout=TIMEOUT_S, verbose=False)
    rank, begin = dist.get_rank(), time.monotonic()
    try:
        if rank == 1:
            dist.destroy_process_group()
            time.sleep(3)
        else:
            dist.all_reduce(torch.ones(10))
    except CommError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return "", "", time.monotonic() - begin


@BACKENDS
def test_a_rank_that_leaves_its_world_is_named_long_before_the_timeout(backend: str) -> None:
    for rank, (error, text, seconds) in enumerate(run_ranks(leaves, 3, backend)):
        if rank == 1:
            continue
        assert error == "PeerLostError"
        assert "rank 1 (pid " in text, (rank, text)
        assert "has left the world or is ending" in text
        assert seconds < 4 * patience()


def is_terminated(backend: str) -> None:
    """Rank 0 is ended by SIGTERM while it waits for rank 1, as rank 2 does."""
    dist.init_distributed(backend, timeout=TIMEOUT_S, verbose=False)
    dist.barrier()
    rank = dist.get_rank()
    if rank == 0:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    if rank == 1:
        time.sleep(4)
    dist.all_reduce(torch.ones(10))


@BACKENDS
def test_a_rank_that_sigterm_ends_is_named_and_not_the_one_it_waited_for(backend: str) -> None:
    outcomes = run_ranks_outcomes(is_terminated, 3, backend)
    for rank in (1, 2):
        if rank == 1 and outcomes[rank].exception_type is None:
            continue  # in shared memory, what rank 0 had sent is there
        assert outcomes[rank].exception_type == "PeerLostError"
        assert "rank 0 (pid " in outcomes[rank].message
        assert "has ended by SIGTERM in the course of all_reduce(10 elements" in outcomes[rank].message
        assert "has not called" not in outcomes[rank].message


def comes_late(backend: str) -> list[str]:
    """A group whose timeout is 2 s, to which rank 1 comes 1.5 s after rank 0 has given up; return rank 1's errors."""
    dist.init_distributed(backend, timeout=TIMEOUT_S, verbose=False)
    group = dist.new_group([0, 1], timeout=2)
    dist.barrier()
    errors = []
    if dist.get_rank() == 1:
        time.sleep(3.5)
    for _ in range(2):
        try:
            dist.all_reduce(torch.ones(10), group=group)
        except CommError as error:
            errors.append(f"{type(error).__name__}: {error}")
    dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()
    return errors


@pytest.mark.parametrize("backend", ["gloo", "oneCCL", "shared memory"])
def test_a_rank_that_comes_after_the_timeout_is_told_so(rank_environment: dict[str, Any], backend: str) -> None:
    env = {**rank_environment, "CCL_SHARED_MEMORY": "0" if backend == "oneCCL" else "1"}
    _, errors = run_ranks(comes_late, 2, "gloo" if backend == "gloo" else "ccl", env=env)
    assert errors[0].startswith("CommTimeoutError: ")
    assert "That is this rank, which came too late" in errors[0]
    assert "different orders" not in errors[0]


def exits(backend: str) -> None:
    dist.init_distributed(backend, timeout=TIMEOUT_S, verbose=False)
    dist.barrier()
    if dist.get_rank() == 1:
        raise SystemExit(0)
    dist.all_reduce(torch.ones(10))


@BACKENDS
def test_a_rank_that_ends_right_after_the_start_is_named_with_its_process(backend: str) -> None:
    outcomes = run_ranks_outcomes(exits, 3, backend)
    for rank in (0, 2):
        assert outcomes[rank].exception_type == "PeerLostError"
        assert "rank 1 (pid " in outcomes[rank].message
        assert "not seen from here" not in outcomes[rank].message


def ends_after_its_part(folder: str) -> list[float]:
    """Rank 1 has done its part in two calls and ends, before rank 2 comes to the first; rank 0 waits for the second."""
    dist.init_distributed("ccl", timeout=TIMEOUT_S, verbose=False)
    rank, pids = dist.get_rank(), torch.zeros(3, dtype=torch.int64)
    dist.all_gather_into_tensor(pids, torch.tensor([os.getpid()]))
    if rank == 2 and not await_files(folder, "0"):
        return []
    summed, sent = torch.ones(4), torch.full((4,), float(rank))
    first = dist.reduce(summed, 0, async_op=True)
    second = dist.broadcast(sent, 1, async_op=True)
    if rank == 0:
        while is_alive(int(pids[1])):
            time.sleep(0.02)
        with pytest.raises(CommTimeoutError):  # and nothing that would break the group
            second.wait(timeout=1.5)
        (Path(folder) / "0").touch()
    second.wait()
    first.wait()
    return [*summed.tolist(), *sent.tolist()]


def test_a_rank_that_ends_after_its_part_in_several_calls_is_not_missed(tmp_path: Path) -> None:
    found = run_ranks(ends_after_its_part, 3, str(tmp_path), timeout_s=4 * TIMEOUT_S)
    assert found == [[3.0] * 4 + [1.0] * 4, [1.0] * 8, [1.0] * 8]


def waits_for_a_lost_rank_beside_one_that_is_done(folder: str) -> None:
    """Rank 1 has done its part and ends; rank 2 is killed before it comes."""
    dist.init_distributed("ccl", timeout=TIMEOUT_S, verbose=False)
    rank, pids = dist.get_rank(), torch.zeros(3, dtype=torch.int64)
    dist.all_gather_into_tensor(pids, torch.tensor([os.getpid()]))
    if rank == 0:
        while is_alive(int(pids[1])):
            time.sleep(0.02)
        (Path(folder) / "0").touch()
    if rank == 2:
        await_files(folder, "0")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.reduce(torch.ones(4), 0)


def test_a_rank_that_ended_after_its_part_is_not_named_as_lost(tmp_path: Path) -> None:
    outcomes = run_ranks_outcomes(
        waits_for_a_lost_rank_beside_one_that_is_done, 3, str(tmp_path), timeout_s=4 * TIMEOUT_S, grace_s=TIMEOUT_S
    )
    assert outcomes[0].exception_type == "PeerLostError"
    assert re.search(r"rank 2 \(pid \d+ .*\) (has )?ended", outcomes[0].message), outcomes[0].message
    assert "rank 1 (" not in outcomes[0].message


def replaces_its_program(backend: str) -> None:
    dist.init_distributed(backend, timeout=TIMEOUT_S, verbose=False)
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == 1:
        os.execvp("sleep", ["sleep", "10"])
    dist.all_reduce(torch.ones(10))


@pytest.mark.parametrize("backend", ["gloo", "oneCCL", "shared memory"])
def test_a_rank_that_replaces_its_program_is_named_while_that_runs(
    rank_environment: dict[str, Any], backend: str
) -> None:
    env = {**rank_environment, "CCL_SHARED_MEMORY": "0" if backend == "oneCCL" else "1"}
    outcomes = run_ranks_outcomes(replaces_its_program, 3, "gloo" if backend == "gloo" else "ccl", env=env)
    for rank in (0, 2):
        assert outcomes[rank].exception_type == "PeerLostError"
        assert "rank 1 (pid " in outcomes[rank].message
        assert "has replaced its program (exec) after all_reduce(10 elements" in outcomes[rank].message


def differs_without_another_call(ending: str) -> list[str]:
    """Return the errors in this rank's log."""
    logged: list[str] = []
    has_come = threading.Event()

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())
            has_come.set()

    logging.getLogger("comm").addHandler(Keep(logging.ERROR))
    dist.init_distributed("gloo", timeout=TIMEOUT_S, verbose=False)
    dist.all_reduce(torch.ones(10))
    time.sleep(0.5)  # after which the watch looks less often, so that the call ends before it looks
    try:
        dist.all_reduce(torch.ones(10), "max" if dist.get_rank() else "sum")
    except CommError:
        return ["raised"]
    if ending == "later":
        has_come.wait(10)
    dist.destroy_process_group()
    return logged


@pytest.mark.parametrize(
    ("ending", "text"),
    [("later", "so results of these calls may be wrong"), ("at once", "so their results may be wrong")],
)
def test_a_wrong_result_is_logged_where_no_call_follows(ending: str, text: str) -> None:
    for _ in range(5):  # the watch may look in the course of the call, which raises then
        of_ranks = run_ranks(differs_without_another_call, 2, ending)
        if ["raised"] not in of_ranks:
            break
    for logged in of_ranks:
        assert len(logged) == 1
        assert text in logged[0]
        assert "differ in the reduce op" in logged[0]


def loses_the_other_in_a_message(backend: str, lost: str, handles: bool) -> tuple[str, str, float]:
    """The receiver, rank 1, kills one of the two as soon as it has got the first bytes of a message."""
    dist.init_distributed(backend, timeout=TIMEOUT_S, verbose=False)
    rank = dist.get_rank()
    message = torch.full((64_000_000,), float(1 - rank))
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    begin = time.monotonic()
    if rank == 1:
        threading.Thread(target=kill_in_a_message, args=(message, pids[0 if lost == "sender" else 1])).start()
    try:
        if handles:
            (dist.irecv(message, 0) if rank else dist.isend(message, 1)).wait()
        elif rank:
            dist.recv(message, 0)
        else:
            dist.send(message, 1)
    except CommError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    finally:
        dist.destroy_process_group()
    return "", "", time.monotonic() - begin


def kill_in_a_message(message: torch.Tensor, pid: int) -> None:
    while not message[0]:
        pass
    os.kill(pid, signal.SIGKILL)


@BACKENDS
@pytest.mark.parametrize("handles", [False, True])
@pytest.mark.parametrize("lost", ["sender", "receiver"])
def test_a_peer_lost_within_a_message_is_named_long_before_the_timeout(backend: str, lost: str, handles: bool) -> None:
    outcomes = run_ranks_outcomes(loses_the_other_in_a_message, 2, backend, lost, handles, timeout_s=2 * TIMEOUT_S)
    gone = 0 if lost == "sender" else 1
    error, text, seconds = outcomes[1 - gone].value
    assert error == "PeerLostError"
    assert f"rank {gone} (pid " in text, text
    assert seconds < 6 * patience()


def loses_the_receiver_of_two_messages(polled: bool) -> tuple[list[str], float]:
    """Rank 1 is killed when it has got the first bytes of a message; rank 0 waits for both, one after the other."""
    dist.init_distributed("gloo", timeout=TIMEOUT_S, verbose=False)
    rank = dist.get_rank()
    messages = [torch.full((64_000_000,), float(1 - rank)) for _ in range(2)]
    begin, found = time.monotonic(), []
    if rank == 1:
        threading.Thread(target=kill_in_a_message, args=(messages[0], os.getpid())).start()
        for message in messages:
            dist.recv(message, 0)
    for work in [dist.isend(message, 1) for message in messages]:
        while polled and not work.is_completed():
            time.sleep(0.01)
        try:
            work.wait()
        except CommError as error:
            found.append(type(error).__name__)
    dist.destroy_process_group()
    return found, time.monotonic() - begin


@pytest.mark.parametrize("polled", [False, True])
def test_every_wait_for_a_message_to_a_lost_peer_ends_long_before_the_timeout(polled: bool) -> None:
    outcomes = run_ranks_outcomes(loses_the_receiver_of_two_messages, 2, polled, timeout_s=2 * TIMEOUT_S)
    found, seconds = outcomes[0].value
    assert found == ["PeerLostError"] * 2
    assert seconds < 7 * patience()


def is_interrupted_and_goes_on(call: str) -> tuple[list[str], list[str]]:
    """Rank 1 is interrupted while it waits for rank 2; return the errors of two calls, and what it noted for others."""
    dist.init_distributed("gloo", timeout=60, verbose=False)
    tensor = torch.ones(10)
    for _ in range(3):  # the later ones on the fast path
        dist.all_reduce(tensor)
    rank, found = dist.get_rank(), []
    if rank != 1:
        time.sleep(4)
        return [], []
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    for _ in range(2):
        try:
            dist.recv(tensor, 2) if call == "recv" else dist.all_reduce(tensor)
            found.append("")
        except (KeyboardInterrupt, CommError) as error:
            found.append(f"{type(error).__name__}: {error}")
    ring = RingReader(RECORDER.memory.memory)
    return found, [failure.text for failure in ring.failures]


@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_a_rank_that_was_interrupted_notes_it_and_refuses_further_calls(call: str) -> None:
    (first, second), noted = run_ranks(is_interrupted_and_goes_on, 3, call)[1]
    assert first.startswith("KeyboardInterrupt")
    assert second.startswith("BrokenGroupError")
    assert re.search(r"rank 1 \(pid \d+ on \S+\) was interrupted \(SIGINT\)", second)
    assert any(re.search(r"rank 1 \(pid \d+ on \S+\) was interrupted \(SIGINT\)", text) for text in noted), noted


def is_interrupted_in_the_wait_for_a_message(batch: bool) -> list[str]:
    """Return what the waits for a message say of which the first one is interrupted."""
    dist.init_distributed("gloo", timeout=60, verbose=False)
    if dist.get_rank() == 0:
        time.sleep(4)
        return []
    tensor, found = torch.zeros(4), []
    if batch:
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, 0)])
    else:
        work = dist.irecv(tensor, 0)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    for _ in range(2):
        try:
            found.append(f"True: {work.wait()}")
        except (KeyboardInterrupt, CommError) as error:
            found.append(f"{type(error).__name__}: {error}")
    found.append(f"{work.is_completed()} {work.is_success()} {type(work.exception()).__name__}")
    return found


@pytest.mark.parametrize("batch", [False, True])
def test_a_message_whose_wait_was_interrupted_has_not_arrived(batch: bool) -> None:
    first, second, asked = run_ranks(is_interrupted_in_the_wait_for_a_message, 2, batch)[1]
    assert first.startswith("KeyboardInterrupt")
    assert second.startswith("BrokenGroupError")
    assert re.search(r"rank 1 \(pid \d+ on \S+\) was interrupted \(SIGINT\)", second)
    assert asked == "True False BrokenGroupError"


class Alarm(Exception):
    """Raised by a program's own handler of SIGALRM."""


def has_an_alarm_in_a_message_that_times_out() -> str:
    """Rank 1 has a signal in a message; gloo lets the handler run when the call has failed. Return the next error."""
    dist.init_distributed("gloo", timeout=5, verbose=False, config={"timeouts": {"init_s": TIMEOUT_S}})
    rank = dist.get_rank()
    if rank == 1:

        def handler(*_: object) -> None:
            raise Alarm

        signal.signal(signal.SIGALRM, handler)
        signal.alarm(1)
        with pytest.raises(Alarm):
            dist.recv(torch.ones(10), 0)
    with pytest.raises(CommError) as raised:
        dist.all_reduce(torch.ones(10)) if rank == 1 else dist.recv(torch.ones(10), 1, timeout=2 * TIMEOUT_S)
    return f"{raised.typename}: {raised.value}"


def test_a_handler_that_raises_in_a_message_that_timed_out_is_named() -> None:
    found = run_ranks(has_an_alarm_in_a_message_that_times_out, 2, timeout_s=4 * TIMEOUT_S)
    assert found[0].startswith("PeerLostError"), found
    assert found[1].startswith("BrokenGroupError"), found
    for text in found:
        assert re.search(r"rank 1 \(pid .*\) was interrupted \(Alarm, after Timed out waiting ", text), found


def await_files(folder: str, names: str) -> bool:
    """Return whether ranks have made their files, for which it waits."""
    end = time.monotonic() + 2 * TIMEOUT_S
    while not all((Path(folder) / name).exists() for name in names):
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)
    return True


def waits_for_the_peer_of_an_interrupted_rank(folder: str) -> str:
    """Rank 1 is interrupted while it and rank 0 wait for rank 2, which comes when rank 0 has an error."""
    dist.init_distributed("gloo", timeout=10 * TIMEOUT_S, verbose=False)
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    rank, found = dist.get_rank(), ""
    if rank == 1:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    if rank == 2 and not await_files(folder, "0"):
        return "rank 0 waits all the time"
    try:
        dist.all_reduce(tensor)
    except (KeyboardInterrupt, CommError) as error:
        found = f"{type(error).__name__}: {error}"
    (Path(folder) / str(rank)).touch()
    await_files(folder, "012")
    return found


def test_a_rank_that_was_interrupted_is_named_while_others_wait_for_its_peer(tmp_path: Path) -> None:
    found = run_ranks(waits_for_the_peer_of_an_interrupted_rank, 3, str(tmp_path), timeout_s=4 * TIMEOUT_S)
    assert found[1].startswith("KeyboardInterrupt")
    for text in (found[0], found[2]):
        assert text.startswith("PeerLostError"), found
        assert re.search(r"rank 1 \(pid .*\) was interrupted \(SIGINT\) in ", text), found


def is_interrupted_in_new_group(backend: str, folder: str) -> tuple[str, float]:
    """Rank 1 is interrupted in new_group() before rank 2 comes; return the error, and a sum on the group made then."""
    dist.init_distributed(backend, timeout=TIMEOUT_S, verbose=False)
    dist.barrier()
    rank, found = dist.get_rank(), ""
    if rank == 1:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    if rank == 2:
        await_files(folder, "1")
    try:
        dist.new_group([0, 1, 2])
    except (KeyboardInterrupt, CommError) as error:
        found = f"{type(error).__name__}: {error}"
    (Path(folder) / str(rank)).touch()
    await_files(folder, "012")
    tensor = torch.ones(10)
    dist.all_reduce(tensor, group=dist.new_group([0, 1, 2]))
    return found, float(tensor[0])


@BACKENDS
def test_a_rank_that_was_interrupted_in_new_group_is_named_and_may_make_it_again(tmp_path: Path, backend: str) -> None:
    found = run_ranks(is_interrupted_in_new_group, 3, backend, str(tmp_path), timeout_s=4 * TIMEOUT_S)
    assert found[1][0].startswith("KeyboardInterrupt")
    for text in (found[0][0], found[2][0]):
        assert text.startswith("PeerLostError"), found
        assert "rank 1 was interrupted in new_group" in text, found
    assert [one for _, one in found] == [3.0] * 3


def is_killed_while_a_group_is_connected(backend: str, folder: str) -> tuple[str, float]:
    """Rank 2 is killed when all ranks have come to make a group, before it has connected any of them."""
    dist.init_distributed(backend, timeout=TIMEOUT_S, verbose=False)
    dist.barrier()
    rank = dist.get_rank()
    agree = group_creation.agree

    def agree_and_end(*args: Any) -> Any:
        agree(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 2:
        group_agreement.agree = group_creation.agree = agree_and_end
    begin = time.monotonic()
    with pytest.raises(CommError) as caught:
        dist.new_group([0, 1, 2], timeout=600)
    seconds = time.monotonic() - begin
    (Path(folder) / str(rank)).touch()
    await_files(folder, "01")  # rank 0 has the store
    return str(caught.value), seconds


@pytest.mark.parametrize("forked", ["0", "1"])
@BACKENDS
def test_a_rank_that_is_killed_while_a_group_is_connected_is_named_long_before_the_timeout(
    tmp_path: Path, backend: str, forked: str
) -> None:
    outcomes = run_ranks_outcomes(
        is_killed_while_a_group_is_connected, 3, backend, str(tmp_path), timeout_s=90, env={"COMM_TESTS_FORK": forked}
    )
    for outcome in outcomes[:2]:
        assert outcome.value, outcome
        text, seconds = outcome.value
        ended = r"rank 2 \(pid \d+ on \S+\) has ended( by SIGKILL)? in the course of new_group"
        assert re.search(f"lost a peer.*{ended}", text), text
        assert seconds < 4 * patience()


def gives_up_while_a_group_is_connected(
    error: BaseException, handled: bool, hosts: bool, folder: str
) -> tuple[str, float]:
    """Rank 2 raises when all ranks have come to make a group; return the error, and a sum on the group made then."""
    dist.init_distributed("gloo", timeout=TIMEOUT_S, verbose=False)
    dist.barrier()
    rank, agree = dist.get_rank(), group_agreement.agree
    if hosts:
        here = Place(f"machine {rank}", f"host {rank}", "")
        Place.of_this_process = staticmethod(lambda address: replace(here, address=address))  # type: ignore[method-assign]

    def agree_and_raise(*args: Any) -> Any:
        places = agree(*args)
        if rank == 1:
            await_files(folder, "2")
            return places
        if not handled:
            raise error
        signal.signal(signal.SIGALRM, raise_it)
        StoreWait.look = lambda _: signal.raise_signal(signal.SIGALRM)  # type: ignore[method-assign]
        return places

    def raise_it(*_: object) -> None:
        StoreWait.look = look  # type: ignore[method-assign]
        raise error

    look = StoreWait.look
    if rank == 2 or (rank == 1 and handled):  # gloo waits for rank 1 while the signal comes
        group_agreement.agree = agree_and_raise
    with pytest.raises((CommError, type(error))) as caught:
        dist.new_group([0, 1, 2], timeout=600)
    group_agreement.agree = agree
    (Path(folder) / str(rank)).touch()
    await_files(folder, "012")
    tensor = torch.ones(10)
    dist.all_reduce(tensor, group=dist.new_group([0, 1, 2], timeout=TIMEOUT_S))
    return f"{type(caught.value).__name__}: {caught.value}", float(tensor[0])


def agree_and_raise(*args: Any, agree: Callable[..., Any] = group_agreement.agree) -> Any:
    """Give up when all ranks have come to make a group."""
    agree(*args)
    raise RuntimeError("out of luck")


def ends_after_a_group_was_given_up(folder: str) -> tuple[bool, float]:
    """Rank 1 gives up when gloo connects rank 0; return whether gloo waits on, and the seconds that the end took."""
    dist.init_distributed("gloo", timeout=TIMEOUT_S, verbose=False)
    started._LIMIT_S = 60.0  # of the wait for ranks that have not started
    rank = dist.get_rank()
    if rank == 1:
        group_agreement.agree = agree_and_raise
    with pytest.raises((CommError, RuntimeError)):
        dist.new_group()
    (Path(folder) / str(rank)).touch()
    await_files(folder, "01")
    waits_on, begin = is_still_connecting("gloo"), time.monotonic()
    dist.destroy_process_group()
    return waits_on, time.monotonic() - begin


@NEEDS_CONNECTIONS
def test_the_end_of_a_young_world_does_not_wait_for_a_group_that_was_given_up(tmp_path: Path) -> None:
    found = run_ranks(ends_after_a_group_was_given_up, 2, str(tmp_path))
    assert found[0][0], found
    assert all(seconds < 20 for _, seconds in found), found


@NEEDS_CONNECTIONS
@pytest.mark.parametrize(
    ("error", "handled", "hosts"),
    [
        pytest.param(RuntimeError("out of luck"), False, False, id="one host"),
        pytest.param(RuntimeError("out of luck"), False, True, id="several hosts"),
        pytest.param(KeyboardInterrupt("out of luck"), False, False, id="KeyboardInterrupt on one host"),
        pytest.param(KeyboardInterrupt("out of luck"), False, True, id="KeyboardInterrupt on several hosts"),
        pytest.param(TimeoutError("the step timed out"), False, False, id="TimeoutError on one host"),
        pytest.param(TimeoutError("the step timed out"), True, True, id="TimeoutError of a handler on several hosts"),
    ],
)
def test_a_rank_that_gives_up_while_a_group_is_connected_is_named_and_the_world_can_be_used(
    tmp_path: Path, error: BaseException, handled: bool, hosts: bool
) -> None:
    found = run_ranks(gives_up_while_a_group_is_connected, 3, error, handled, hosts, str(tmp_path), timeout_s=90)
    text = f"{type(error).__name__}: {error}"
    assert found[2] == (text, 3.0)
    said = f"rank 2 gave up: {text} [reported by rank 2]"
    for rank in (0, 1):
        assert found[rank] == (f"PeerLostError: new_group on rank {rank}: {said}", 3.0)


def makes_groups_beside_an_abandoned_one(folder: str) -> tuple[int, int]:
    """Rank 1 raises when both have come; return what five groups more cost, and five after that, in descriptors."""
    dist.init_distributed("gloo", timeout=TIMEOUT_S, verbose=False)
    first = dist.new_group([0, 1])
    rank, agree = dist.get_rank(), group_agreement.agree
    if rank == 1:
        group_agreement.agree = agree_and_raise
    with pytest.raises(RuntimeError):
        dist.new_group([0, 1], timeout=600)
    group_agreement.agree = agree
    (Path(folder) / str(rank)).touch()
    await_files(folder, "01")
    counts = [len(os.listdir("/proc/self/fd"))]
    for _ in range(2):
        groups = [dist.new_group([0, 1], timeout=TIMEOUT_S) for _ in range(5)]
        counts.append(len(os.listdir("/proc/self/fd")))
    dist.monitored_barrier(group=first)
    dist.monitored_barrier(group=groups[0])
    return counts[1] - counts[0], counts[2] - counts[1]


@NEEDS_CONNECTIONS
def test_groups_made_beside_an_abandoned_one_cost_no_more_connections_than_on_other_ranks(tmp_path: Path) -> None:
    of_waiting, of_raising = run_ranks(makes_groups_beside_an_abandoned_one, 2, str(tmp_path), timeout_s=90)
    assert of_waiting[0] <= of_raising[0] + 1
    assert of_waiting[1] == of_raising[1]


def gives_up_before_the_memory_of_a_group(error: BaseException, one: int, folder: str) -> tuple[str, float]:
    """Rank ``one`` raises when shared memory is being set up; return the error, and a sum on the group made then."""
    dist.init_distributed("ccl", timeout=TIMEOUT_S, verbose=False)
    dist.barrier()
    rank, member = dist.get_rank(), member_records.member

    def raise_it(*_: object) -> None:
        raise error

    if rank == one:
        member_records.member = raise_it  # type: ignore[assignment]
    with pytest.raises((CommError, type(error))) as caught:
        dist.new_group([0, 1], timeout=600)
    member_records.member = member
    (Path(folder) / str(rank)).touch()
    await_files(folder, "01")
    tensor = torch.ones(10)
    dist.all_reduce(tensor, group=dist.new_group([0, 1], timeout=TIMEOUT_S))
    return f"{type(caught.value).__name__}: {caught.value}", float(tensor[0])


@pytest.mark.parametrize(
    ("error", "one"),
    [
        pytest.param(KeyboardInterrupt("stop"), 0, id="KeyboardInterrupt of the rank that has the memory"),
        pytest.param(TimeoutError("the step timed out"), 1, id="TimeoutError of another rank"),
    ],
)
def test_a_rank_that_gives_up_while_memory_is_set_up_is_named_and_the_world_can_be_used(
    tmp_path: Path, error: BaseException, one: int
) -> None:
    found = run_ranks(gives_up_before_the_memory_of_a_group, 2, error, one, str(tmp_path), timeout_s=90)
    text = f"{type(error).__name__}: {error}"
    assert found[one] == (text, 2.0)
    other = 1 - one
    said = f"the making of the group of ranks [0, 1], on rank {other}: rank {one} gave up: {text}"
    assert found[other] == (f"PeerLostError: {said} [reported by rank {one}]", 2.0)
