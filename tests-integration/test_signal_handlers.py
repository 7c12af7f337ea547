"""Signal handlers of the program that raise while a call waits."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_collectives.compression.block_codecs import Integer
from comm_collectives.reduction import order
from comm_utils.errors import CommError
from comm_utils.testing import run_ranks

BACKENDS = pytest.mark.parametrize("backend", ["gloo", "ccl"])
TIMEOUT_S = 60


class Budget(Exception):
    """No error that a library raises."""


class Stop(RuntimeError):
    """One of the class that libraries raise."""


class Limit(BaseException):
    """One that no handler of ``Exception`` sees."""


ERRORS = {"Budget": Budget("used up"), "Stop": Stop("the step timed out"), "Limit": Limit("too long")}


def await_file(path: Path) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.005)


def interrupt_soon(error: BaseException, then: Path) -> None:
    """Let a handler raise ``error`` in the main thread in a moment, and create a file after the signal."""

    def handler(*_: object) -> None:
        raise error

    def send() -> None:
        os.kill(os.getpid(), signal.SIGALRM)
        then.touch()

    signal.signal(signal.SIGALRM, handler)
    threading.Timer(0.1, send).start()


def ended_by(call: Any) -> str:
    """Return the error of a call; empty where there is none."""
    try:
        call()
    except (CommError, Budget, Stop, Limit) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def leaves_a_call(name: str, is_checked: bool, folder: str) -> tuple[str, str, list[float]]:
    """Rank 0 leaves a call that waits for rank 1, and writes to its tensor; return two errors and the tensor."""
    dist.init_distributed("gloo", timeout=TIMEOUT_S, verbose=False)
    tensor, more = torch.ones(4), {"timeout": TIMEOUT_S / 2} if is_checked else {}
    dist.all_reduce(torch.ones(4))  # the next one is on the fast path
    first, has_left, has_ended = "", Path(folder) / "left", Path(folder) / "ended"
    if dist.get_rank() == 0:
        interrupt_soon(ERRORS[name], Path(folder) / "sent")
        first = ended_by(lambda: dist.all_reduce(tensor, **more))
        tensor.fill_(100.0)
        has_left.touch()
        await_file(has_ended)
    else:
        await_file(has_left)
        first = ended_by(lambda: dist.all_reduce(tensor, **more))
        has_ended.touch()
    return first, ended_by(lambda: dist.all_reduce(torch.ones(4))), tensor.tolist()


@pytest.mark.parametrize("is_checked", [False, True])
@pytest.mark.parametrize("name", ["Budget", "Stop"])
def test_a_handler_that_raises_in_a_call_breaks_its_group(tmp_path: Path, name: str, is_checked: bool) -> None:
    (raised, later, tensor), (of_peer, _, _) = run_ranks(
        leaves_a_call, 2, name, is_checked, str(tmp_path), timeout_s=2 * TIMEOUT_S
    )
    assert raised == f"{name}: {ERRORS[name]}"
    assert later.startswith("BrokenGroupError")
    assert of_peer.startswith("PeerLostError")
    for text in (later, of_peer):
        assert re.search(rf"rank 0 \(pid \d+ on \S+\) was interrupted \({name}\)", text), text
    assert tensor == [100.0] * 4


def leaves_between_exchanges(backend: str, name: str, is_compressed: bool, folder: str) -> tuple[str, str]:
    """Rank 1 leaves a call of several exchanges between two of them; return the errors of that call and the next."""
    dist.init_distributed(backend, timeout=TIMEOUT_S, verbose=False)
    more: dict[str, Any] = {"compression": "int8"} if is_compressed else {}
    if not is_compressed:
        dist.set_deterministic_reductions()
    place: Any = Integer if is_compressed else order
    attribute = "encode" if is_compressed else "fold"
    real = getattr(place, attribute)

    def handler(*_: object) -> None:
        raise ERRORS[name]

    def interrupted(*args: Any, **given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGALRM)
        return real(*args, **given)

    def call() -> None:
        dist.all_reduce(torch.ones(900_000, dtype=torch.bfloat16), **more)

    call()
    has_ended = Path(folder) / "ended"
    if dist.get_rank() == 1:
        signal.signal(signal.SIGALRM, handler)
        setattr(place, attribute, interrupted)
        errors = ended_by(call), ended_by(call)
        await_file(has_ended)
    else:
        errors = ended_by(call), ended_by(call)
        has_ended.touch()
    return errors


@pytest.mark.parametrize(("backend", "is_compressed"), [("gloo", False), ("gloo", True), ("ccl", True)])
@pytest.mark.parametrize("name", ["Budget", "Limit"])
def test_a_handler_that_raises_between_two_exchanges_of_a_call_breaks_its_group(
    tmp_path: Path, backend: str, name: str, is_compressed: bool
) -> None:
    of_peer, raised = run_ranks(
        leaves_between_exchanges, 2, backend, name, is_compressed, str(tmp_path), timeout_s=2 * TIMEOUT_S
    )
    cause = rf"rank 1 \(pid \d+ on \S+\) was interrupted \({name}\) in all_reduce"
    assert raised[0] == f"{name}: {ERRORS[name]}"
    assert of_peer[0].startswith("PeerLostError")
    for text in (of_peer[0], raised[1]):
        assert re.search(cause, text), text
    for text in (of_peer[1], raised[1]):
        assert text.startswith("BrokenGroupError"), text


def is_left_as_it_ends(backend: str, folder: str) -> str:
    """A handler of rank 0 raises while a call ends well; return the error of the call."""
    dist.init_distributed(backend, timeout=TIMEOUT_S, verbose=False)
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 0:
        interrupt_soon(ERRORS["Stop"], Path(folder) / "sent")
    else:
        await_file(Path(folder) / "sent")
    return ended_by(lambda: dist.all_reduce(torch.ones(4)))


@BACKENDS
def test_what_a_handler_raises_while_a_call_ends_well_comes_through(backend: str, tmp_path: Path) -> None:
    assert (
        run_ranks(is_left_as_it_ends, 2, backend, str(tmp_path), timeout_s=TIMEOUT_S)[0] == "Stop: the step timed out"
    )


def leaves_the_wait_for_a_handle(backend: str, limit_s: float | None, folder: str) -> tuple[str, list[list[float]]]:
    """Rank 0 leaves the wait for a handle, and waits again; return the first error, and two results."""
    dist.init_distributed(backend, timeout=TIMEOUT_S, verbose=False)
    first, tensor, has_left = "", torch.ones(4), Path(folder) / "left"
    if dist.get_rank() == 0:
        interrupt_soon(ERRORS["Stop"], Path(folder) / "sent")
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        first = ended_by(lambda: work.wait(limit_s))
        has_left.touch()
        work.wait()
    else:
        await_file(has_left)
        dist.all_reduce(tensor)
    dist.all_reduce(again := torch.ones(4))
    return first, [tensor.tolist(), again.tolist()]


@pytest.mark.parametrize("limit_s", [None, 1.0])
@BACKENDS
def test_a_handle_may_be_waited_for_again_after_a_handler_has_raised(
    backend: str, limit_s: float | None, tmp_path: Path
) -> None:
    found = run_ranks(leaves_the_wait_for_a_handle, 2, backend, limit_s, str(tmp_path), timeout_s=2 * TIMEOUT_S)
    assert found[0][0] == "Stop: the step timed out"
    assert [results for _, results in found] == [[[2.0] * 4] * 2] * 2
