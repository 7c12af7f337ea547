import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from comm_backend_torch import TorchBackend, provider
from comm_utils import BrokenGroupError, CommTimeoutError, Setup
from comm_utils.testing import run_ranks


def bring_up(timeout_s: float) -> TorchBackend:
    import os

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
    with pytest.raises(CommTimeoutError, match=r"all_reduce on the group of ranks \[0, 1\] failed on rank 0"):
        work.wait()
    assert time.monotonic() - start < 4
    assert isinstance(work.exception(), CommTimeoutError)
    assert work.is_completed()
    with pytest.raises(CommTimeoutError):
        work.wait(1)
    with pytest.raises(BrokenGroupError, match="failed earlier"):
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
    assert isinstance(work.exception(), CommTimeoutError)
    with pytest.raises(CommTimeoutError):
        work.wait()
    with pytest.raises(CommTimeoutError):
        work.result()
    return "timed out"


def test_a_message_that_never_comes() -> None:
    assert run_ranks(message_timeout, 2, timeout_s=60) == ["timed out", "absent"]


def attributes() -> None:
    backend = bring_up(timeout_s=30)
    work: Any = backend.all_reduce(torch.ones(1), "sum", None, True)
    work.get_future().wait()  # c10d's own, for whoever needs it
    with pytest.raises(AttributeError):
        work.no_such_attribute  # noqa: B018
    work.wait()


def test_what_c10d_has_besides_can_be_reached() -> None:
    run_ranks(attributes, 1)


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
