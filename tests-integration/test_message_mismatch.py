"""Messages that differ from what their receiver expects are reported on both ranks, also where nothing fails."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_utils.testing import patience, run_ranks

pytestmark = pytest.mark.cpu

BACKENDS = pytest.mark.parametrize(
    ("backend", "env"), [("gloo", {}), ("ccl", {"CCL_SHARED_MEMORY": "0"})], ids=["gloo", "oneccl"]
)
#: What rank 0 sends, and where rank 1 receives it.
WRONG = {
    "dtype": (torch.ones(10), torch.zeros(10, dtype=torch.int32)),
    "size": (torch.ones(10), torch.zeros(20)),
}


def exchange(sent: torch.Tensor, received: torch.Tensor, tag: int = 0) -> None:
    if dist.get_rank() == 0:
        dist.send(sent, 1, tag=tag)
    else:
        dist.recv(received, 0, tag=tag)


def mismatched(backend: str, which: str, at_the_end: bool) -> list[str]:
    seen: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    logging.getLogger("comm").addHandler(Keep(logging.ERROR))
    dist.init_distributed(backend, timeout=30, verbose=False)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    for size in (1, 4):
        exchange(torch.ones(size), torch.zeros(size))
    exchange(*WRONG[which])
    if not at_the_end:
        time.sleep(1.5 * patience())
        with pytest.raises(dist.CollectiveMismatchError) as caught:
            dist.all_reduce(tensor)
        seen = [str(caught.value)]
    dist.destroy_process_group()
    return seen


@BACKENDS
@pytest.mark.parametrize("at_the_end", [False, True], ids=["by the next call", "at the end"])
@pytest.mark.parametrize("which", WRONG)
def test_a_message_of_another_kind_is_reported(backend: str, env: dict[str, Any], which: str, at_the_end: bool) -> None:
    of_ranks = run_ranks(mismatched, 2, backend, which, at_the_end, timeout_s=90, env=env)
    for seen in [[text for texts in of_ranks for text in texts]] if at_the_end else of_ranks:
        assert any("message 3 from rank 0 to rank 1" in text for text in seen), of_ranks
        assert any("send(10 elements of float32" in text for text in seen), of_ranks


def matched(backend: str) -> None:
    """Messages that are right: of many sizes and tags, from any rank, in the background, and of objects."""
    dist.init_distributed(backend, timeout=30, verbose=False)
    rank = dist.get_rank()
    for number in range(1, 30):
        exchange(torch.ones(number), torch.zeros(number), tag=number % 3)
    works = [
        dist.isend(torch.ones(n), 1 - rank) if way == rank else dist.irecv(torch.zeros(n), 1 - rank)
        for n in (1, 5, 3)
        for way in (0, 1)
    ]
    for work in works:
        work.wait()
    for _ in range(2):  # one side has no fast path
        exchange(torch.ones(8)[::2], torch.zeros(4))
        exchange(torch.ones(4), torch.zeros(2, 2).t())
    exchange(torch.ones(0), torch.zeros(0))
    exchange(torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool))
    if rank == 0:
        dist.send_object_list([{"a": 1}, "text"], 1)
    else:
        dist.recv_object_list([None, None], 0)
    for size in (2, 7):
        if rank == 0:
            dist.send(torch.ones(size), 1)
        else:
            dist.recv(torch.zeros(size), None if size == 2 else 0)
    time.sleep(1)
    dist.barrier()
    dist.destroy_process_group()


@BACKENDS
def test_messages_that_are_right_are_not_reported(backend: str, env: dict[str, Any]) -> None:
    run_ranks(matched, 2, backend, timeout_s=90, env=env)
