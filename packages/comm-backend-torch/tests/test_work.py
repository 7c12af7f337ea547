import gc
import os
import re
import threading
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from comm_backend_torch import TorchBackend, provider
from comm_backend_torch.work import TorchWork, _held, have_ended, wait_and_check
from comm_utils import ArgumentTypeError, BrokenGroupError, CommTimeoutError, Setup
from comm_utils.flight_recorder import RECORDER, RingReader
from comm_utils.testing import patience, run_ranks

# With the orchestrator, and with this package alone.
AGAIN = (
    r"call destroy_process_group\(\),? and then (init_distributed\(\)|"
    r"pass what .*comm_backend_torch\.provider\.initialize\(setup\) returns to comm_utils\.activate\(\)) again"
)


def bring_up(timeout_s: float) -> TorchBackend:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, rank == 0, timedelta(seconds=30))
    return provider.initialize(Setup("gloo", rank, size, store, timedelta(seconds=timeout_s)))


def group_timeout() -> str:
    """Rank 1 never calls: the group's timeout breaks the group on rank 0, in whichever way it waits."""
    backend = bring_up(timeout_s=2)
    if backend.get_rank() == 1:
        time.sleep(4)
        return "absent"
    work: Any = backend.all_reduce(torch.ones(1), "sum", None, True)
    start = time.monotonic()
    text = r"^all_reduce on the group of ranks \[0, 1\] timed out after 2 s,"
    with pytest.raises(CommTimeoutError, match=text) as raised:
        work.wait()
    assert re.search(AGAIN, str(raised.value))
    assert "/gloo/" not in str(raised.value)
    assert "unbound_buffer" in str(raised.value.__cause__)
    assert time.monotonic() - start < 4 * patience()
    assert isinstance(work.exception(), CommTimeoutError)
    assert work.is_completed()
    with pytest.raises(CommTimeoutError) as again:
        work.wait(1)
    assert again.value is raised.value
    text = rf"failed earlier \(all_reduce: Timed out .*{AGAIN}"
    with pytest.raises(BrokenGroupError, match=text):
        backend.check_group()
    return "timed out"


def test_the_groups_timeout_breaks_the_group() -> None:
    assert run_ranks(group_timeout, 2, timeout_s=60) == ["timed out", "absent"]


def message_timeout() -> str:
    """The same for a message whose handle is asked, not waited for."""
    backend = bring_up(timeout_s=2)
    if backend.get_rank() == 1:
        time.sleep(4)
        return "absent"
    work: Any = backend.irecv(torch.ones(1), 1)
    assert work.exception() is None
    deadline = time.monotonic() + 4
    while not work.is_completed():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert isinstance(work.exception().__cause__, RuntimeError)
    assert isinstance(work.exception(), CommTimeoutError)
    with pytest.raises(CommTimeoutError):
        work.wait()
    with pytest.raises(CommTimeoutError):
        work.result()
    return "timed out"


def test_a_message_that_never_comes() -> None:
    assert run_ranks(message_timeout, 2, timeout_s=60) == ["timed out", "absent"]


def named() -> list[str]:
    """Failures under the name of the user's call, whichever operation it needs."""
    backend = bring_up(timeout_s=30)
    group: Any = backend.create_group([0, 1], "short", timedelta(seconds=0.5))
    if backend.get_rank() == 1:
        time.sleep(2)
        return []
    view = backend.during("allgather_object")
    assert view is backend.during("allgather_object")
    assert view.fast_paths is backend.fast_paths
    with pytest.raises(CommTimeoutError) as failed:
        view.broadcast(torch.ones(1), None, group, False, 1)
    with pytest.raises(BrokenGroupError) as broken:
        backend.check_group(group)
    backend.check_group()
    return [str(failed.value), str(broken.value)]


def test_failures_name_the_call_that_the_user_made() -> None:
    (failed, broken), _ = run_ranks(named, 2, timeout_s=60)
    assert failed.startswith("allgather_object on the group of ranks [0, 1] timed out after 0.5 s, as seen by rank 0: ")
    assert "(allgather_object: Timed out waiting 500ms" in broken
    for text in (failed, broken):
        assert "go on with destroy_process_group(group) and a new one from new_group()" in text


def attributes() -> None:
    backend = bring_up(timeout_s=30)
    work: Any = backend.all_reduce(torch.ones(1), "sum", None, True)
    for wrong in ("a", [1]):
        with pytest.raises(ArgumentTypeError, match=r"wait: timeout: got .*; expected seconds or a timedelta"):
            work.wait(wrong)
    work.get_future().wait()  # c10d's own, for whoever needs it
    with pytest.raises(AttributeError):
        work.no_such_attribute  # noqa: B018
    work.wait()


def test_what_c10d_has_besides_can_be_reached() -> None:
    run_ranks(attributes, 1)


def dropped() -> None:
    backend = bring_up(timeout_s=30)
    reader = RingReader(RECORDER.memory.memory)
    for _ in range(12):
        backend.all_reduce(torch.ones(1), "sum", None, True)  # whose handle goes away at once
    future = backend.all_reduce(torch.ones(1), "sum", None, True).get_future()
    future.wait()
    backend.all_reduce(torch.ones(1))
    for _ in range(20):
        time.sleep(0.01)
        work: Any = backend.all_reduce(torch.ones(1), "sum", None, True)
        work.wait()
    reader.refresh()
    assert len(reader.calls()) == 34
    assert reader.open_calls() == []
    assert not any(one.failed for one in reader.calls())


def test_a_handle_that_is_dropped_ends_its_record() -> None:
    run_ranks(dropped, 2)


def batches() -> list[float]:
    backend = bring_up(timeout_s=30)
    rank = backend.get_rank()
    received = torch.zeros(2)
    ops = [
        torch.distributed.P2POp(torch.distributed.isend, torch.full((2,), float(rank)), 1 - rank),
        torch.distributed.P2POp(torch.distributed.irecv, received, 1 - rank),
    ]
    for work in backend.batch_isend_irecv(ops):
        work.wait()
    return received.tolist()


def test_batches() -> None:
    assert run_ranks(batches, 2) == [[1.0, 1.0], [0.0, 0.0]]


def ask_until_completed() -> str:
    """Return what the process writes to standard error while handles are asked."""
    backend = bring_up(timeout_s=30)
    reading, writing = os.pipe()
    before = os.dup(2)
    os.dup2(writing, 2)
    for _ in range(2):
        work: Any = backend.all_reduce(torch.ones(1), "sum", None, True)
        end = time.monotonic() + 30
        while not work.is_completed():
            assert time.monotonic() < end
            time.sleep(0.001)
        work.wait()
    os.dup2(before, 2)
    os.close(writing)
    with os.fdopen(reading) as said:
        return said.read()


def test_asking_a_handle_prints_nothing() -> None:
    assert run_ranks(ask_until_completed, 2, timeout_s=60) == ["", ""]


class EndsAfterItsTimeout:
    """A handle of c10d whose operation ends just after the time of a wait."""

    def __init__(self, work: Any, is_due: Any) -> None:
        self._work, self._is_due = work, is_due

    def wait(self, *limit: timedelta) -> bool:
        try:
            return bool(self._work.wait(*limit))
        except RuntimeError:
            self._is_due()
            self._work.wait()
            raise

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def ends_just_after_a_timeout() -> list[float]:
    backend = bring_up(timeout_s=60)
    store, tensor = backend.get_store(), torch.ones(1)
    if backend.get_rank() == 1:
        store.get("due")
        backend.all_reduce(tensor)
    else:
        work: Any = backend.all_reduce(tensor, "sum", None, True)
        work._work = EndsAfterItsTimeout(work._work, lambda: store.set("due", "1"))
        assert work.wait(0.1)
        assert work.exception() is None
    backend.all_reduce(tensor)
    return tensor.tolist()


def test_an_operation_that_ends_just_after_a_timeout_has_ended_well() -> None:
    assert run_ranks(ends_just_after_a_timeout, 2, timeout_s=60) == [[4.0]] * 2


def leaves_before_a_message_is_waited_for(kind: str) -> list[float]:
    """Rank 0 leaves ``wait()`` before that of gloo, asks the handle, and waits again."""

    def interrupted(*_: Any) -> None:
        raise LookupError("of a signal handler")

    backend = bring_up(timeout_s=60)
    store, tensor = backend.get_store(), torch.full((4,), float(backend.get_rank()))
    if backend.get_rank() == 1:
        store.get("due")
        (backend.send if kind == "irecv" else backend.recv)(tensor, 0)
        return tensor.tolist()
    work: Any = getattr(backend, kind)(tensor, 1)
    own_wait, work._own_wait = work._own_wait, interrupted
    with pytest.raises(LookupError):
        work.wait()
    work._own_wait = own_wait
    if kind == "irecv":
        assert not work.is_completed()
    store.set("due", "1")
    assert work.wait()
    return tensor.tolist()


@pytest.mark.parametrize("kind", ["irecv", "isend"])
def test_a_message_whose_wait_was_left_before_it_began_is_under_way(kind: str) -> None:
    expected = [1.0 if kind == "irecv" else 0.0] * 4
    assert run_ranks(leaves_before_a_message_is_waited_for, 2, kind, timeout_s=60) == [expected] * 2


class InterruptedOnce(threading.Event):
    """An event that a signal handler keeps from being set once."""

    is_interrupted = False

    def set(self) -> None:
        if not self.is_interrupted:
            self.is_interrupted = True
            raise KeyboardInterrupt
        super().set()


def leaves_after_a_message_was_waited_for() -> list[float]:
    """Rank 0 is interrupted when gloo has the message, and waits again."""
    backend = bring_up(timeout_s=60)
    tensor = torch.full((4,), float(backend.get_rank()))
    if backend.get_rank() == 1:
        backend.send(tensor, 0)
    else:
        work: Any = backend.irecv(tensor, 1)
        work._done = InterruptedOnce()
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        assert work.wait(30)
        assert work.is_completed()
    return tensor.tolist()


def test_a_message_whose_wait_was_left_after_its_end_has_ended() -> None:
    assert run_ranks(leaves_after_a_message_was_waited_for, 2, timeout_s=120) == [[1.0] * 4] * 2


def ends_with_frozen_handles() -> list[bool]:
    backend = bring_up(timeout_s=60)
    store = backend.get_store()
    if backend.get_rank() == 1:
        store.get("due")
        backend.all_reduce(torch.ones(1))
        return []
    message, work = backend.irecv(torch.ones(1), 1), backend.all_reduce(torch.ones(1), "sum", None, True)
    gc.freeze()
    found = [have_ended(0.0)]
    store.set("due", "1")
    assert work is not None
    work.wait()
    found.append(have_ended(0.0))
    del work, message
    return [*found, bool(_held)]


def test_collectives_under_way_are_seen_whatever_the_collector_sees() -> None:
    assert run_ranks(ends_with_frozen_handles, 2, timeout_s=120) == [[False, True, False], []]


class AbortsAtALimit:
    """A handle of NCCL, whose wait with a limit that runs out takes the communicator with it."""

    def __init__(self, asked_before_it_ends: int) -> None:
        self._left = asked_before_it_ends
        self.waits = 0

    def is_completed(self) -> bool:
        self._left -= 1
        return self._left < 0

    def wait(self) -> bool:
        self.waits += 1
        return True


def test_a_limit_that_runs_out_leaves_an_operation_of_a_device_under_way() -> None:
    state: Any = SimpleNamespace(broken=None)
    for asked, is_over in ((10**9, True), (3, False)):
        inner = AbortsAtALimit(asked)
        work = TorchWork(inner, None, pytest.fail, own_wait=partial(wait_and_check, state))
        if is_over:
            with pytest.raises(CommTimeoutError, match="still under way"):
                work.wait(0.05)
            assert inner.waits == 0
            inner._left = 0
        assert work.wait(60)
        assert inner.waits == 1


def drops_a_receive() -> int:
    backend = bring_up(timeout_s=30)
    backend.irecv(torch.ones(1), 1 - backend.get_rank())  # whose handle goes away at once
    found = len(RingReader(RECORDER.memory.memory).open_calls())
    backend.barrier()  # a rank that has ended cannot be asked for a message
    return found


def test_a_receive_that_is_dropped_ends_its_record() -> None:
    assert run_ranks(drops_a_receive, 2) == [0, 0]
