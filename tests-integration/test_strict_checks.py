"""Calls that differ between ranks raise one error on every rank before any data moves, on every backend alike."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import comm_orchestrator as dist
from comm_collectives import receive_turns
from comm_collectives.checked import CheckingBackend
from comm_utils.errors import BrokenGroupError, CollectiveMismatchError, CommTimeoutError
from comm_utils.testing import run_ranks

pytestmark = pytest.mark.slow

STRICT = {"COMM_CHECKS__MISMATCH": "strict", "CCL_SHARED_MEMORY_PROFILE": "0", "CUDA_VISIBLE_DEVICES": ""}
BACKENDS = {
    "gloo": ("gloo", {}),
    "oneccl": ("ccl", {"CCL_SHARED_MEMORY": "0"}),
    "shm": ("ccl", {}),
}
W, ELEMENTS = 3, 6

Call = Callable[[Any], object]


def _ones(elements: int = ELEMENTS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(elements, dtype=dtype)


def _calls(elements: int, dtype: torch.dtype, root: int, op: str) -> dict[str, Call]:
    """Each operation with these arguments, by name; what an operation does not have is left out."""
    part, whole = _ones(elements, dtype), _ones(W * elements, dtype)
    mine = dist.get_rank() == root
    return {
        "all_reduce": lambda group: dist.all_reduce(part, op, group),
        "reduce": lambda group: dist.reduce(part, root, op, group),
        "broadcast": lambda group: dist.broadcast(part, root, group),
        "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(whole, part, group),
        "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(part, whole, op, group),
        "all_to_all_single": lambda group: dist.all_to_all_single(whole, whole.clone(), group=group),
        "gather": lambda group: dist.gather(part, list(whole.chunk(W)) if mine else None, root, group),
        "scatter": lambda group: dist.scatter(part, list(whole.chunk(W)) if mine else None, root, group),
        "barrier": lambda group: dist.barrier(group),
    }


def wrong_calls(culprit: int) -> dict[str, Call]:
    """More than a hundred calls of which that of rank ``culprit`` differs."""
    odd = dist.get_rank() == culprit
    usual = _calls(ELEMENTS, torch.float32, 0, "sum")
    found: dict[str, Call] = {}
    for one in usual:
        for other in usual:
            if one != other:
                found[f"{one} against {other}"] = usual[other] if odd else usual[one]
    with_data = [one for one in usual if one != "barrier"]
    variants: dict[str, tuple[dict[str, Call], list[str]]] = {
        "elements": (_calls(ELEMENTS + 1, torch.float32, 0, "sum"), with_data),
        "dtype": (_calls(ELEMENTS, torch.int64, 0, "sum"), with_data),
        "same bytes": (_calls(ELEMENTS // 2, torch.float64, 0, "sum"), with_data),
        "root": (_calls(ELEMENTS, torch.float32, 2, "sum"), ["reduce", "broadcast", "gather", "scatter"]),
        "op": (_calls(ELEMENTS, torch.float32, 0, "max"), ["all_reduce", "reduce", "reduce_scatter_tensor"]),
    }
    for name, (changed, operations) in variants.items():
        for one in operations:
            found[f"{one}: {name}"] = changed[one] if odd else usual[one]
    rows = [1, 2, 3] if odd else [2, 2, 2]
    exchanged = torch.ones(6)
    found["all_to_all_single: split sizes"] = lambda group: dist.all_to_all_single(
        exchanged, exchanged.clone(), [2, 2, 2], rows, group
    )
    return found


def try_all(backend: str) -> list[tuple[str, str, list[int], str]]:
    """Make every wrong call on a group of its own; return its name, its error and the ranks that are set apart."""
    dist.init_distributed(backend, timeout=20, verbose=False)
    found = []
    for label, call in wrong_calls(1).items():
        group = dist.new_group(list(range(W)))
        try:
            call(group)
            dist.barrier(group)  # a root that only sends may return before the others come, in shared memory
            found.append((label, "nothing", [], ""))
        except Exception as error:
            found.append((label, type(error).__name__, _culprits(str(error)), str(error)))
            with pytest.raises(BrokenGroupError):
                dist.barrier(group)
        dist.destroy_process_group(group)
    total = _ones()
    dist.all_reduce(total)  # the world goes on
    assert torch.equal(total, _ones() * W)
    dist.destroy_process_group()
    return found


def _culprits(text: str) -> list[int]:
    """Ranks whose call is said to be another than that of most."""
    if "split sizes" in text:
        sent = re.search(r"rank (\d+) sends (\d+) elements to rank (\d+)", text)
        return sorted({int(sent[1]), int(sent[3])}) if sent else []
    pair = re.search(r"rank (\d+) and rank (\d+) disagree about how much", text)  # in shared memory
    if pair:
        return sorted({int(pair[1]), int(pair[2])})
    groups = re.findall(r"ranks? ([\d, and]+?) calls? \w", text)
    return sorted(int(rank) for ranks in groups[1:] for rank in re.findall(r"\d+", ranks))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[list[tuple[str, str, list[int], str]]]]:
    return {
        name: run_ranks(try_all, W, backend, env={**STRICT, **env}, timeout_s=280)
        for name, (backend, env) in BACKENDS.items()
    }


def test_a_hundred_wrong_calls_raise_the_same_on_every_backend(
    outcomes: dict[str, list[list[tuple[str, str, list[int], str]]]],
) -> None:
    assert len(outcomes["gloo"][0]) >= 100
    wrong = []
    for name, ranks in outcomes.items():
        for rank, rows in enumerate(ranks):
            for label, error, culprits, text in rows:
                # In shared memory, a rank that comes when two others have found the difference has begun nothing.
                expected = (
                    culprits
                    if "split sizes" in label or "disagree" in text or (name == "shm" and culprits == [2])
                    else [1]
                )
                if "rank 1" not in text or (error, culprits) != ("CollectiveMismatchError", expected):
                    wrong.append(f"{label}: rank {rank} on {name}: {error} of {culprits}: {text}")
    assert not wrong, "\n".join(wrong)
    split = {name: [rows[-1][2] for rows in ranks] for name, ranks in outcomes.items()}
    assert all(1 in ranks for rows in split.values() for ranks in rows)


def _messages() -> list[str]:
    dist.init_distributed("gloo", timeout=20, verbose=False)
    rank, found = dist.get_rank(), []
    right = torch.arange(4.0)
    if rank == 0:
        dist.send(right, 1)
        dist.isend(right, 1, tag=3).wait()
    else:
        got = torch.zeros(4)
        assert dist.recv(got, 0) == 0
        assert torch.equal(got, right)
        handle = dist.irecv(got.zero_(), None, tag=3)
        assert handle.wait()
        assert torch.equal(got, right)
        assert handle.is_completed()
    group = dist.new_group([0, 1])
    try:
        if rank == 0:
            dist.send(torch.ones(5), 1, group)
        else:
            dist.recv(torch.ones(4), 0, group)
    except CollectiveMismatchError as error:
        found.append(str(error))
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_a_message_of_another_size_is_refused_by_its_receiver() -> None:
    sender, receiver = run_ranks(_messages, 2, env=STRICT, timeout_s=60)
    (text,) = receiver
    expected = "rank 0 sends 5 elements of float32, rank 1 expects 4 elements of float32"
    assert expected in text
    assert all(expected in one for one in sender)  # which may have sent it before it hears


def exchange_large_messages() -> list[bool]:
    """What works without checks: messages that are under way while ranks wait for something else."""
    dist.init_distributed(os.environ["EXCHANGE_ON"], timeout=20, verbose=False)
    rank, elements, found = dist.get_rank(), 1_000_000, []
    other = 1 - rank
    ours, theirs = torch.full((elements,), float(rank)), torch.empty(elements)

    sent, received = dist.isend(ours, other), dist.irecv(theirs, other)
    sent.wait()
    received.wait()
    found.append(bool((theirs == other).all()))

    if rank == 0:
        received = dist.irecv(theirs.zero_(), other)
        dist.barrier()
        received.wait()
    else:
        dist.send(ours, other)
        dist.barrier()
    found.append(bool((theirs == other).all()))

    first, second = torch.empty(elements), torch.empty(elements)
    works = [dist.irecv(first, other, tag=1), dist.irecv(second, other, tag=2)]
    for tag in (2, 1):
        dist.isend(ours + tag, other, tag=tag).wait()
    for work in works:
        work.wait()
    found += [bool((first == other + 1).all()), bool((second == other + 2).all())]
    dist.barrier()  # on oneCCL, messages with tags are in the store, which ends with rank 0
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("name", ["gloo", "oneccl"])
def test_messages_may_be_under_way_while_ranks_wait_for_something_else(name: str) -> None:
    backend, env = BACKENDS[name]
    found = run_ranks(exchange_large_messages, 2, env={**STRICT, **env, "EXCHANGE_ON": backend}, timeout_s=90)
    assert found == [[True] * 4] * 2


def receive_several() -> dict[str, list[float]]:
    """Have several receives from one rank under way, which strict checks take one by one."""
    dist.init_distributed(os.environ["EXCHANGE_ON"], timeout=20, verbose=False)
    rank, found = dist.get_rank(), {}
    other = 1 - rank

    def ours() -> list[torch.Tensor]:
        # Nine numbers of int64 look like a description.
        return [torch.full((40,), 1.0 + rank), torch.full((7,), 3.0 + rank), torch.full((9,), 5 + rank)]

    def theirs() -> list[torch.Tensor]:
        return [torch.empty_like(one) for one in ours()]

    def exchange(name: str, start: Callable[[list[torch.Tensor]], list[Any]]) -> None:
        received = theirs()
        for work in start(received):
            work.wait()
        found[name] = [float(one[-1]) for one in received]

    exchange(
        "handles",
        lambda received: [*(dist.isend(one, other) for one in ours()), *(dist.irecv(one, other) for one in received)],
    )
    exchange(
        "batch",
        lambda received: dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, one, other) for one in ours()]
            + [dist.P2POp(dist.irecv, one, other) for one in received]
        ),
    )

    # The last one in the calling thread, while the receives before it are under way.
    def last_one_waits(received: list[torch.Tensor]) -> list[Any]:
        works = [dist.isend(one, other) for one in ours()]
        works += [dist.irecv(one, other) for one in received[:-1]]
        dist.recv(received[-1], other)
        return works

    exchange("recv", last_one_waits)
    keys, values = ours()[:2]
    found["ring"] = [float(one[-1]) for one in dist.hooks.ring_exchange([keys, values]).wait()]
    waited = torch.empty(2)
    work = dist.irecv(waited, other)
    with pytest.raises(CommTimeoutError):
        work.wait(0)
    with pytest.raises(CommTimeoutError, match=rf"^recv on rank {rank} timed out after 0\.2 s: .* from rank {other} "):
        dist.recv(torch.empty(2), other, timeout=0.2)
    with pytest.raises(CommTimeoutError, match=rf"^irecv on rank {rank} timed out after 0\.1 s"):
        dist.irecv(torch.empty(2), other, timeout=0.1).wait()
    # What gave up takes no message of those that go on.
    last = torch.empty(2)
    later = dist.irecv(last, other)
    dist.barrier()
    for value in (1.0, 2.0):
        dist.isend(torch.full((2,), value), other).wait()
    assert work.wait(20)
    assert later.wait(20)
    assert [float(waited[0]), float(last[0])] == [1.0, 2.0]
    assert work.wait(0)
    assert work.wait(-1)
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("name", ["gloo", "oneccl"])
def test_several_receives_from_one_rank_are_in_order(name: str) -> None:
    backend, env = BACKENDS[name]
    found = run_ranks(receive_several, 2, env={**STRICT, **env, "EXCHANGE_ON": backend}, timeout_s=90)
    for rank, one in enumerate(found):
        expected = [1.0 + 1 - rank, 3.0 + 1 - rank, 5.0 + 1 - rank]
        assert one == {"handles": expected, "batch": expected, "recv": expected, "ring": expected[:2]}


def receive_from_any_and_from_one() -> list[float]:
    dist.init_distributed("gloo", timeout=20, verbose=False)
    rank, found = dist.get_rank(), []
    if rank == 0:
        one, any_, later = (torch.zeros(40) for _ in range(3))
        works = [dist.irecv(one, 1), dist.irecv(any_), dist.irecv(later, 1)]
        dist.barrier()
        for work in works:
            work.wait()
        found = [float(one[0]), float(any_[0]), float(later[0])]
    else:
        dist.barrier()
        for number in range(3):
            if rank == 1:
                dist.send(torch.full((40,), float(number)), 0)
    dist.barrier()
    return found


def test_receives_from_any_rank_keep_their_place() -> None:
    found = run_ranks(receive_from_any_and_from_one, 3, env=STRICT, timeout_s=60)
    assert found[0] == [0.0, 1.0, 2.0]


def lines_of_receives() -> list[str]:
    dist.init_distributed("gloo", timeout=20, verbose=False)
    found, compare = [], CheckingBackend._compare_message

    def noted(*given: Any) -> None:
        found.extend(one.name for one in traceback.extract_stack() if one.filename == __file__)
        compare(*given)

    with mock.patch.object(CheckingBackend, "_compare_message", noted):
        for tag in range(2):
            if dist.get_rank() == 0:
                dist.send(torch.ones(3), 1, tag=tag)
            else:
                dist.irecv(torch.ones(3), 0, tag=tag).wait()
    assert not any(receive_turns._turns.values())  # of the tags that were used
    return found


def test_a_receive_is_made_at_the_line_of_the_program() -> None:
    assert run_ranks(lines_of_receives, 2, env=STRICT, timeout_s=60) == [[], ["lines_of_receives", "noted"] * 2]
