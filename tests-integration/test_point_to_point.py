"""Which receive gets which message: tags, any source, and what becomes of messages that no receive asks for."""

from __future__ import annotations

import gc
import importlib
import io
import logging
import os
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as c10d

import comm_orchestrator as dist
from comm_utils.testing import RankPool, run_ranks, run_ranks_outcomes

Pools: TypeAlias = Callable[[int], RankPool]

CCL = dist.available_backends()["ccl"]
needs_ccl = pytest.mark.skipif(not CCL.usable, reason=CCL.reason)

SHARED, ONECCL = {"CCL_SHARED_MEMORY": "1"}, {"CCL_SHARED_MEMORY": "0"}
ENGINES = [pytest.param(SHARED, id="shared-memory"), pytest.param(ONECCL, id="oneccl")]

# Within a slot of shared memory, and in many; in one value of a store, and in several.
SIZES = [3, 600_000]


def run_tags(api: str, count: int) -> None:
    """Messages that are received in another order than they are sent in, by tag; those of one tag stay in order."""
    module: Any = dist if api == "ours" else c10d
    rank = dist.get_rank()
    if rank == 0:
        works = [
            module.isend(torch.full((count + tag,), 10.0 * tag + turn), 1, tag=tag)
            for turn in range(3)
            for tag in range(4)
        ]
        for work in works:
            work.wait()
    else:
        for tag in (3, 0, 2, 1):
            for turn in range(3):
                received = torch.zeros(count + tag)
                if turn == 1:
                    module.irecv(received, 0, tag=tag).wait()
                else:
                    assert module.recv(received, 0, tag=tag) == 0
                assert received.unique().tolist() == [10.0 * tag + turn], (tag, turn)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("api", ["ours", "torch"])
def test_messages_with_tags(pools: Pools, api: str, count: int) -> None:
    pools(2).run(run_tags, api, count)


def run_any_source(api: str, count: int) -> None:
    """Each message once; the receive, or its handle, says whose it was."""
    module: Any = dist if api == "ours" else c10d
    swapped = dist.new_group([2, 0, 1], sort_ranks=False)
    for group, tag in ((None, 0), (None, 7), (swapped, 3)):
        if dist.get_rank():
            for turn in range(4):
                module.send(torch.full((count,), 10.0 * dist.get_rank() + turn), 0, group, tag)
            continue
        found: Counter[int] = Counter()
        for turn in range(8):
            received = torch.zeros(count)
            if turn % 2:
                source = module.recv(received, None, group, tag)
            else:
                work = module.irecv(received, None, group, tag)
                work.wait()
                source = dist.get_global_rank(group, work._source_rank()) if group else work._source_rank()
            assert received.unique().tolist() == [10.0 * source + found[source]], (turn, source)
            found[source] += 1
        assert found == {1: 4, 2: 4}
    dist.destroy_process_group(swapped)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("api", ["ours", "torch"])
def test_messages_from_any_source(pools: Pools, api: str, count: int) -> None:
    pools(3).run(run_any_source, api, count)


def run_batch() -> None:
    """A handle for each message, whatever memory it is in, and of each receive the sender within the group."""
    group = dist.new_group([2, 0, 1], sort_ranks=False)
    position = dist.get_rank(group)
    after, before = (position + 1) % 3, (position - 1) % 3
    received = [torch.zeros(4, 3), torch.zeros(3, 4).t()]  # the second one is dense, but not contiguous
    makes = [
        *(dist.P2POp(dist.irecv, one, group=group, group_peer=before) for one in received),
        *(dist.P2POp(dist.isend, torch.full((4, 3), 10.0 * position + turn), None, group, 0, after) for turn in (0, 1)),
    ]
    works = dist.batch_isend_irecv(makes)
    assert len(works) == 4
    for work, one in zip(works, makes, strict=True):
        work.wait()
        assert work.result() is one.tensor
    for turn, one in enumerate(received):
        assert one.unique().tolist() == [10.0 * before + turn]
        assert works[turn].source_rank() == works[turn]._source_rank() == before  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="operation that is no receive"):
        works[2].source_rank()
    dist.destroy_process_group(group)


def test_messages_in_a_batch(pools: Pools) -> None:
    pools(3).run(run_batch)


def run_posted_first(tag: int) -> None:
    """Receives that wait before anything is sent take messages in the order in which they were made."""
    dist.init_distributed("ccl", verbose=False)
    rank = dist.get_rank()
    if rank == 0:
        memory = torch.zeros(4, 2)
        works: list[Any] = [
            dist.irecv(memory[0], None, tag=tag),
            dist.irecv(memory[1], 1, tag=tag),
            dist.irecv(memory[2], 1),
            dist.irecv(memory[3], None, tag=tag),
        ]
        dist.barrier()
        for work in works[:2]:
            work.wait()
        dist.send(torch.zeros(1), 2)  # messages of two ranks keep no order
        for work in works[2:]:
            work.wait()
        assert memory[:, 0].tolist() == [1.0, 2.0, 4.0, 3.0]
        assert [work.source_rank() for work in works] == [1, 1, 1, 2]
    else:
        dist.barrier()
        if rank == 1:
            for value in (1.0, 2.0):
                dist.send(torch.full((2,), value), 0, tag=tag)
            dist.send(torch.full((2,), 4.0), 0)
        else:
            dist.recv(torch.zeros(1), 0)
            dist.send(torch.full((2,), 3.0), 0, tag=tag)


@needs_ccl  # gloo has an order of its own where some receives name their source and some do not
@pytest.mark.parametrize("tag", [0, 5])
@pytest.mark.parametrize("env", ENGINES)
def test_receives_take_messages_in_their_order(env: dict[str, Any], tag: int, rank_environment: dict[str, Any]) -> None:
    run_ranks(run_posted_first, 3, tag, timeout_s=60, env={**rank_environment, **env})


def run_named_and_any() -> None:
    """Two hundred messages, of which the receiver names the source of some; those of a rank stay in order."""
    dist.init_distributed("ccl", verbose=False)
    rank, each = dist.get_rank(), 100
    if rank:
        for turn in range(each):
            dist.send(torch.full((3 + 40_000 * (turn % 7 == 0),), 1000.0 * rank + turn), 0)
        return
    choose, found = random.Random(7), Counter[int]()
    while found.total() < 2 * each:
        named = choose.choice([None, *(one for one in (1, 2) if found[one] < each)])
        # Without the sender, its next size is known where both have one.
        sizes = {found[one] % 7 == 0 for one in (1, 2) if found[one] < each}
        if named is None and len(sizes) > 1:
            continue
        is_large = found[named] % 7 == 0 if named else sizes.pop()
        received = torch.zeros(3 + 40_000 * is_large)
        source = dist.recv(received, named)
        assert source == named or named is None
        assert received.unique().tolist() == [1000.0 * source + found[source]]
        found[source] += 1


@needs_ccl
@pytest.mark.parametrize("env", ENGINES)
def test_named_and_any_source_in_turn(env: dict[str, Any], rank_environment: dict[str, Any]) -> None:
    run_ranks(run_named_and_any, 3, timeout_s=60, env={**rank_environment, **env})


def run_shared_handle(second: str) -> None:
    """Two threads ask the handle of one message; on gloo, each wait takes one message."""
    rank = dist.get_rank()
    for _ in range(2):
        tensor = torch.zeros(4)
        if rank == 1:
            time.sleep(0.4)
            dist.send(torch.ones(4), 0)
        else:
            work = dist.irecv(tensor, 1)
            waiter = threading.Thread(target=work.wait)
            waiter.start()
            time.sleep(0.1)
            if second == "wait":
                work.wait(10)
            else:
                assert not work.is_completed()
                work.wait()
            waiter.join(10)
            assert not waiter.is_alive()
            assert tensor.tolist() == [1.0] * 4
            assert not any(one.name == "comm-p2p-wait" for one in threading.enumerate())
    dist.barrier()


@pytest.mark.parametrize("second", ["wait", "is_completed"])
def test_threads_share_the_handle_of_a_message(pools: Pools, second: str) -> None:
    pools(2).run(run_shared_handle, second)


def run_dropped(count: int) -> None:
    """Rank 0 keeps no handle; the others receive late, in another order than it sends in, and from two groups."""
    rank, pair = dist.get_rank(), dist.new_group([0, 1])
    dist.barrier()
    if rank == 0:
        for turn in range(3):
            for peer in (2, 1):
                dist.isend(torch.full((count,), 10.0 * peer + turn), peer)
        dist.isend(torch.full((count,), 7.0), 1, group=pair)
        dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.full((count,), 8.0), 1, pair)])
        gc.collect()
        time.sleep(0.5)
    else:
        time.sleep(0.3)
        got = torch.zeros(count)
        if rank == 1:
            for value in (7.0, 8.0):
                dist.recv(got, 0, group=pair)
                assert got.unique().tolist() == [value]
        for turn in range(3):
            dist.recv(got, 0)
            assert got.unique().tolist() == [10.0 * rank + turn], (rank, turn)
    dist.barrier()


@pytest.mark.parametrize("count", SIZES)
def test_messages_whose_handles_nobody_keeps_arrive(pools: Pools, count: int) -> None:
    """gloo, with torch's own handles, cancels them."""
    pools(3).run(run_dropped, count)


def run_many_dropped() -> None:
    """A drop looks at a few of the operations that were dropped before it, and the drops together at all of them."""
    dist.init_distributed("ccl", verbose=False)
    count = 200
    if dist.get_rank() == 1:
        dist.barrier()
        for tag in range(2 * count):
            if tag == count:
                dist.barrier()
                dist.barrier()
            dist.send(torch.full((3,), float(tag)), 0, tag=tag)
        dist.destroy_process_group()
        return
    communicator = importlib.import_module("comm_backend_ccl.shared_communicator").SharedCommunicator
    is_complete, looks = communicator.is_complete, 0

    def counted(self: Any, handle: Any) -> bool:
        nonlocal looks
        looks += 1
        return bool(is_complete(self, handle))

    def drop(tags: range) -> list[torch.Tensor]:
        received = [torch.zeros(3) for _ in tags]
        for tag, one in zip(tags, received, strict=True):
            before = looks
            dist.irecv(one, 1, tag=tag)
            assert looks - before <= 10, (tag, looks - before)
        return received

    communicator.is_complete = counted
    try:
        received = drop(range(count))
        dist.barrier()
        dist.barrier()
        deadline = time.monotonic() + 60
        while received[-1][0] != count - 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [one[0].item() for one in received] == list(range(count))
        kept = [weakref.ref(one) for one in received]
        del received
        others = drop(range(count, 2 * count))
        assert [one() for one in kept] == [None] * count
        dist.barrier()
    finally:
        communicator.is_complete = is_complete
    while others[-1][0] != 2 * count - 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [one[0].item() for one in others] == list(range(count, 2 * count))
    dist.destroy_process_group()


def test_many_operations_whose_handles_nobody_keeps(rank_environment: dict[str, Any]) -> None:
    run_ranks(run_many_dropped, 2, env={**rank_environment, **SHARED})


def run_dropped_at_the_end(ends: str) -> tuple[str, float]:
    """Nobody receives what rank 0 sends, and it keeps no handle."""
    dist.init_distributed("gloo", timeout=60, verbose=False)
    rank, log = dist.get_rank(), io.StringIO()
    logging.getLogger("comm").addHandler(logging.StreamHandler(log))
    dist.barrier()
    if rank == 0:
        for _ in range(3):
            dist.isend(torch.ones(5), 1)
    dist.barrier()
    begin = time.monotonic()
    if ends == "destroy":
        dist.destroy_process_group()
        assert not any(name.startswith("comm-p2p") for name in (one.name for one in threading.enumerate()))
        dist.init_distributed("gloo", timeout=60, verbose=False)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2
        dist.destroy_process_group()
        # A thread looks for the cause of each before it says so.
        while rank == 0 and log.getvalue().count("was not received") < 3 and time.monotonic() - begin < 15:
            time.sleep(0.01)
    return log.getvalue(), time.monotonic() - begin


@pytest.mark.parametrize("ends", ["destroy", "exit"])
def test_a_message_that_nobody_receives_does_not_outlive_its_world(rank_environment: dict[str, Any], ends: str) -> None:
    env = {**rank_environment, "COMM_TESTS_FORK": "0"}
    outcomes = run_ranks_outcomes(run_dropped_at_the_end, 2, ends, env=env)
    assert [(one.status, one.exit_code, one.message) for one in outcomes] == [("returned", 0, "")] * 2
    if ends == "destroy":
        said, _ = outcomes[0].value
        assert said.count("a message whose handle was dropped was not received") == 3, said
        assert "new_group" not in said  # the world has ended, and with it all groups
        assert outcomes[1].value[0] == ""
        assert max(one.value[1] for one in outcomes) < 20


def run_dropped_to_the_dead(sent: Path) -> str:
    dist.init_distributed("gloo", timeout=60, verbose=False)
    log = io.StringIO()
    logging.getLogger("comm").addHandler(logging.StreamHandler(log))
    dist.barrier()
    end = time.monotonic() + 20
    if dist.get_rank() == 1:
        while not sent.exists() and time.monotonic() < end:
            time.sleep(0.01)
        os._exit(0)
    dist.isend(torch.ones(5), 1)
    sent.touch()
    while "was not received" not in log.getvalue() and time.monotonic() < end:
        time.sleep(0.05)
    with pytest.raises(dist.BrokenGroupError):
        dist.barrier()
    return log.getvalue()


def test_a_message_to_a_rank_that_ends_is_said_to_be_lost(rank_environment: dict[str, Any], tmp_path: Path) -> None:
    (said, *_) = run_ranks_outcomes(run_dropped_to_the_dead, 2, tmp_path / "sent", env=rank_environment)
    assert said.status == "returned", said
    assert "was not received: isend on the group of ranks [0, 1] lost a peer" in said.value, said.value
    assert "rank 1" in said.value


def run_peers_of_messages() -> None:
    """As of torch's own class, the group and both names of the other rank are there, whichever was given."""
    rank = dist.get_rank()
    group = dist.new_group([2, 1])
    tensor = torch.ones(2)
    if rank:
        other = 3 - rank
        for module in (dist, c10d):
            position = c10d.get_group_rank(group, other)
            for given in ({"peer": other}, {"group_peer": position}):
                message = module.P2POp(c10d.isend, tensor, group=group, **given)
                assert (message.peer, message.group_peer) == (other, position), (module.__name__, given)
        moved = dist.P2POp(dist.isend if rank == 1 else dist.irecv, tensor * rank, 0, group)
        assert (moved.peer, moved.group_peer) == (0, None)
        moved.peer = other
        (work,) = dist.batch_isend_irecv([moved])
        work.wait()
        assert moved.tensor.tolist() == [1.0, 1.0]
    for module in (dist, c10d):
        assert module.P2POp(c10d.isend, tensor, 0).group is c10d.GroupMember.WORLD
    with pytest.raises(ValueError, match=r"^batch_isend_irecv: got both peer=1 and group_peer=1"):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 1, group_peer=1)])
    dist.barrier()


def test_a_message_knows_both_names_of_the_other_rank(pools: Pools) -> None:
    pools(3).run(run_peers_of_messages)


def run_progress_elsewhere() -> None:
    """The receiver waits in another group's call; its receives find their messages meanwhile."""
    dist.init_distributed("ccl", verbose=False)
    group = dist.new_group()
    received = torch.zeros(2, 1_000_000)
    if dist.get_rank() == 0:
        works: list[Any] = [dist.irecv(one) for one in received]
        dist.barrier(group)
        assert sorted(work.source_rank() for work in works) == [1, 2]  # which asks nobody
        for work in works:
            work.wait()
        assert received.sum() == 3 * 1_000_000
    else:
        dist.send(torch.full((1_000_000,), float(dist.get_rank())), 0)
        time.sleep(0.3)
        dist.barrier(group)


@needs_ccl
def test_a_receive_goes_on_while_its_rank_waits_elsewhere(rank_environment: dict[str, Any]) -> None:
    run_ranks(run_progress_elsewhere, 3, timeout_s=60, env=rank_environment | ONECCL)


def run_without_the_store(rendezvous: str) -> str:
    """A receive from any source is refused where nobody can count messages; named sources go on."""
    rank = int(os.environ["RANK"])
    if rendezvous == "gone":
        dist.init_distributed("ccl", verbose=False, timeout=30)
    else:
        importlib.import_module("comm_backend_ccl")
        c10d.init_process_group("ccl", init_method=rendezvous, rank=rank, world_size=3)
    group = dist.new_group([1, 2]) if rendezvous == "gone" else None
    received = torch.zeros(3)
    if rank == 0:
        if rendezvous == "gone":
            dist.recv(received, 1)
            os._exit(0)
        return ""
    if rank == 1:
        if rendezvous == "gone":
            dist.send(received, 0)
        for turn in range(200):  # until the connection is known to be gone
            c10d.send(torch.full((3,), float(turn)), 2, group)
            time.sleep(0.005)
        if rendezvous == "gone":
            c10d.recv(received, 2, group)
        return ""
    for turn in range(200):
        c10d.recv(received, 1, group)
        assert received.tolist() == [turn] * 3
    if rendezvous == "gone":
        c10d.send(received, 1, group)
    with pytest.raises((ValueError, dist.CommError)) as raised:
        c10d.recv(received, None, group)
    time.sleep(1)  # the sender may still wait for the acknowledgement of what arrived
    return str(raised.value)


def run_until_the_store_goes() -> str:
    dist.init_distributed("ccl", verbose=False, timeout=30)
    if dist.get_rank() == 0:
        time.sleep(0.5)
        os._exit(0)
    with pytest.raises(dist.PeerLostError) as raised:
        dist.recv(torch.zeros(3))
    return str(raised.value)


@needs_ccl
def test_the_end_of_the_store_is_said(rank_environment: dict[str, Any]) -> None:
    for outcome in run_ranks_outcomes(run_until_the_store_goes, 3, timeout_s=60, env=rank_environment | ONECCL)[1:]:
        assert outcome.exit_code == 0, f"{outcome}\n{outcome.traceback}"
        assert "recv on the group of ranks [0, 1, 2]: the group's store has gone" in outcome.value


@needs_ccl
@pytest.mark.parametrize("rendezvous", ["file", "gone"])
def test_sends_do_not_need_the_store(rendezvous: str, rank_environment: dict[str, Any], tmp_path: Path) -> None:
    where = f"file://{tmp_path}/store" if rendezvous == "file" else rendezvous
    outcomes = run_ranks_outcomes(run_without_the_store, 3, where, timeout_s=60, env=rank_environment | ONECCL)
    for outcome in outcomes:
        assert outcome.exit_code == 0, f"{outcome}\n{outcome.traceback}"
    assert "a group whose store is a file or has gone cannot receive from any source without a tag" in outcomes[2].value


def run_ended_sender() -> None:
    """One that has sent its part may end; the receiver goes on with those that live."""
    dist.init_distributed("ccl", verbose=False, timeout=30)
    rank, received = dist.get_rank(), torch.zeros(1)
    if rank == 1:
        dist.send(torch.ones(1), 0, tag=3)
        os._exit(0)
    if rank == 2:
        dist.recv(received, 0)
        dist.send(torch.ones(1), 0, tag=3)
        os._exit(0)
    first = dist.irecv(received, tag=3)
    first.wait()
    with pytest.raises(dist.CommTimeoutError):
        dist.irecv(torch.zeros(1), tag=3).wait(1.0)  # rank 1 has ended, and rank 2 may still send
    second: Any = dist.irecv(received, tag=3)
    dist.send(torch.ones(1), 2)
    with pytest.raises(dist.PeerLostError, match=r"recv on .* lost a peer.*rank 1 \(pid .*rank 2 \(pid"):
        second.wait()  # the first of the two receives took the message


@needs_ccl
@pytest.mark.parametrize("env", ENGINES)
def test_a_receive_from_any_source_outlives_some_senders(env: dict[str, Any], rank_environment: dict[str, Any]) -> None:
    for outcome in run_ranks_outcomes(run_ended_sender, 3, timeout_s=60, env={**rank_environment, **env}):
        assert outcome.exit_code == 0, outcome


def run_nobody_sends(tag: int) -> str:
    dist.init_distributed("ccl", verbose=False)
    group = dist.new_group([0, 1, 2])
    text = ""
    if dist.get_rank() == 0:
        with pytest.raises(dist.CommTimeoutError) as raised:
            dist.recv(torch.zeros(1), group=group, tag=tag, timeout=0.3)
        text = str(raised.value)
    dist.barrier()
    dist.destroy_process_group()
    return text


@needs_ccl
def test_a_timeout_names_those_that_could_have_sent(rank_environment: dict[str, Any]) -> None:
    text = run_ranks(run_nobody_sends, 3, 4, timeout_s=60, env=rank_environment | SHARED)[0]
    assert "recv on the group of ranks [0, 1, 2] timed out after 0.3 s" in text
    assert "ranks [1, 2] of the group did not take part" in text


@needs_ccl
@pytest.mark.parametrize("tag", [0, 4])
def test_a_receive_from_any_source_ends_in_time_on_oneccl(tag: int, rank_environment: dict[str, Any]) -> None:
    text = run_ranks(run_nobody_sends, 3, tag, timeout_s=60, env=rank_environment | ONECCL)[0]
    assert "recv on the group of ranks [0, 1, 2] timed out after 0.3 s" in text


def run_different_sizes() -> str:
    dist.init_distributed("ccl", verbose=False)
    if dist.get_rank():
        for tag in (1, 2):
            dist.isend(torch.ones(3), 0, tag=tag)
        with pytest.raises(dist.CollectiveMismatchError):
            dist.barrier()
        return ""
    dist.recv(torch.zeros(3), 1, tag=2)  # the other one is kept meanwhile
    with pytest.raises(dist.CollectiveMismatchError) as raised:
        dist.recv(torch.zeros(4), tag=1)
    return str(raised.value)


@needs_ccl
def test_sizes_of_messages_are_compared(rank_environment: dict[str, Any]) -> None:
    unwatched = {"COMM_CHECKS__ENABLED": "false"}  # the watch may find it sooner than the engine
    text = run_ranks(run_different_sizes, 2, timeout_s=60, env=rank_environment | SHARED | unwatched)[0]
    assert "rank 1 sends 3 x float32, and rank 0 expects 4 x float32" in text


def run_different_dtypes(sent: torch.dtype, expected: torch.dtype) -> str:
    dist.init_distributed("ccl", verbose=False)
    if dist.get_rank():
        dist.isend(torch.zeros(16, dtype=torch.uint8).view(sent), 0)
        with pytest.raises(dist.CollectiveMismatchError):
            dist.barrier()
        return ""
    with pytest.raises(dist.CollectiveMismatchError) as raised:
        dist.recv(torch.zeros(16, dtype=torch.uint8).view(expected), 1)
    return str(raised.value)


@needs_ccl
@pytest.mark.parametrize(
    ("sent", "expected", "text"),
    [
        (torch.complex64, torch.complex128, "16 bytes of complex64, and rank 0 expects 16 bytes of complex128"),
        (torch.float8_e4m3fn, torch.uint8, "16 bytes of float8_e4m3fn, and rank 0 expects 16 x uint8"),
        (torch.bool, torch.float8_e5m2, "16 x bool, and rank 0 expects 16 bytes of float8_e5m2"),
    ],
)
def test_dtypes_of_messages_are_compared(
    sent: torch.dtype, expected: torch.dtype, text: str, rank_environment: dict[str, Any]
) -> None:
    unwatched = {"COMM_CHECKS__ENABLED": "false"}  # the watch may find it sooner than the engine
    found = run_ranks(run_different_dtypes, 2, sent, expected, timeout_s=60, env=rank_environment | SHARED | unwatched)
    assert f"rank 1 sends {text}" in found[0]


def run_through_the_store() -> list[str]:
    """On oneCCL: what nobody receives is bounded, and refused before it is sent; sizes and dtypes are compared."""
    from comm_backend_ccl import store_messages

    dist.init_distributed("ccl", verbose=False)
    store_messages.MOST_BYTES = 4000
    dist.barrier()
    found = []
    if dist.get_rank():
        for _ in range(2):
            dist.send(torch.ones(500), 0, tag=1)
        with pytest.raises(ValueError, match="send: a message of") as raised:
            dist.send(torch.ones(500), 0, tag=1)
        found.append(str(raised.value))
        dist.send(torch.ones(5, dtype=torch.int16), 0)  # oneCCL's own, which goes on
    else:
        dist.recv(torch.zeros(5, dtype=torch.int16), 1)
        assert dist.recv(torch.zeros(500), tag=1) == 1
        with pytest.raises(dist.CommError) as failed:
            dist.recv(torch.zeros(500, dtype=torch.int32), 1, tag=1)
        found.append(str(failed.value))
    return found


@needs_ccl
def test_messages_with_tags_on_oneccl_are_bounded_and_compared(rank_environment: dict[str, Any]) -> None:
    (different,), (refused,) = run_ranks(run_through_the_store, 2, timeout_s=60, env=rank_environment | ONECCL)
    assert "send: a message of 2000 bytes with tag 1" in refused
    assert "receive earlier ones first, or send without a tag" in refused
    assert "rank 1 sends 2000 bytes of torch.float32 with tag 1" in different
    assert "rank 0 expects 2000 bytes of torch.int32" in different


def test_a_message_of_a_batch_shows_what_it_is() -> None:
    shown = repr(dist.P2POp(dist.isend, torch.ones(2, 3), 1, tag=4))
    assert shown == "P2POp(isend, (2, 3) torch.float32, peer=1, group=None, tag=4)"
    assert "group_peer=0" in repr(dist.P2POp(dist.irecv, torch.ones(1), group_peer=0))
