"""What ends with a broken group of gloo, and what does not."""

from __future__ import annotations

import gc
import socket
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d as internals

from comm_backend_torch import provider
from comm_backend_torch.message_waits import _aborts
from comm_backend_torch.waits import how_to_wait
from comm_utils import PeerLostError, Setup
from comm_utils.errors import CollectiveMismatchError, CommError
from comm_utils.testing import patience, run_ranks
from comm_utils.torch_support.gloo_connections import end_connections, opening_connections
from comm_utils.torch_support.group_state import GroupState
from comm_utils.watch.trouble import Trouble


def _initialize() -> Any:
    store, rank, world_size = next(torch.distributed.rendezvous("env://"))
    return provider.initialize(Setup("gloo", rank, world_size, store, timedelta(seconds=60)))


def connected(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection over TCP, as an HTTP client and its server have it."""
    client = socket.create_connection(server.getsockname())
    return client, server.accept()[0]


def connections_of_others() -> tuple[int, set[bytes]]:
    backend = _initialize()
    # Two threads that accept from one server may get each other's connection.
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    clients, stop = [], threading.Event()
    while_created = threading.Event()

    def connect_all_the_time() -> None:
        while not stop.is_set():
            clients.append(connected(servers[0]))
            while_created.set()
            time.sleep(0.001)

    thread = threading.Thread(target=connect_all_the_time)
    thread.start()
    while_created.wait()
    with opening_connections() as opened:
        group = internals._new_process_group_helper(
            2,
            backend.get_rank(),
            [0, 1],
            internals.Backend("gloo"),
            backend.get_store(),
            "observed",
            timeout=timedelta(seconds=60),
        )[0]
        clients.append(connected(servers[1]))
    opened.belong_to(group)
    stop.set()
    thread.join()
    backend.barrier()  # the other rank is done as well
    ended = end_connections(group)  # 0 where the other rank's were ended, and gloo has closed these since
    found = []
    for client, accepted in clients:
        client.sendall(b"x")
        found.append(accepted.recv(1))
        client.close()
        accepted.close()
    for server in servers:
        server.close()
    with pytest.raises(RuntimeError, match=r"[Cc]losed|reset"):
        group.allreduce([torch.ones(1)]).wait()
    backend.barrier()  # the world goes on
    backend.destroy_process_group()
    return ended, set(found)


def test_connections_of_other_threads_stay() -> None:
    ended, found = zip(*run_ranks(connections_of_others, 2, timeout_s=60), strict=True)
    assert found == ({b"x"}, {b"x"})
    assert max(ended) >= 1


class NeverEnds:
    """A work whose thread misses that its connections have ended."""

    def wait(self, timeout: timedelta) -> None:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


class EndsAfterTheSlice:
    """A work that ends well between the end of a slice and the question whether it has ended."""

    waits = 0

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return True


def end_after_the_slice() -> int:
    backend = _initialize()
    wait, work = how_to_wait(backend._state(None), "cpu"), EndsAfterTheSlice()
    assert wait is not None
    wait(work)
    backend.destroy_process_group()
    return work.waits


def test_a_call_that_ends_just_after_a_slice_has_not_timed_out() -> None:
    assert run_ranks(end_after_the_slice, 1, timeout_s=60) == [2]


def give_up() -> float:
    backend = _initialize()
    state: GroupState = backend._state(None)
    wait = how_to_wait(state, "cpu")
    assert wait is not None
    threading.Timer(0.2, state.fall_into, [Trouble(CollectiveMismatchError, "the ranks' calls differ")]).start()
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="Connection closed by peer") as caught:
        wait(NeverEnds())
    took_s = time.monotonic() - begin
    assert isinstance(backend._failure("all_reduce", state, caught.value), PeerLostError | CollectiveMismatchError)
    backend.destroy_process_group()
    return took_s


def test_a_call_of_a_broken_group_that_does_not_end_is_given_up() -> None:
    assert max(run_ranks(give_up, 1, timeout_s=60)) < 5


def drop_a_group_within_a_transfer() -> float:
    """Return how long it takes to end a world, and to drop a broken group of it of which a part is still to be sent."""
    backend = _initialize()
    group = backend.create_group([0, 1], "broken")
    got, sent = torch.zeros(64_000_000), torch.ones(64_000_000)
    backend.barrier()
    work: Any = backend.all_to_all_single(got, sent, None, None, group, True)
    while not got[:32_000_000].any() and not got[32_000_000:].any():
        pass
    end_connections(group)  # what is half sent stays so: gloo does not wake the thread that waits for the rest
    backend.mark_broken(group, "its ranks gave up")
    begin = time.monotonic()
    backend.destroy_process_group()
    del work, group
    gc.collect()
    return time.monotonic() - begin


def test_a_group_that_gloo_does_not_let_go_is_dropped_at_once() -> None:
    assert max(run_ranks(drop_a_group_within_a_transfer, 2, timeout_s=90)) < 10 * patience()


def wake_who_waits_for_a_message(handle: bool) -> float:
    backend = _initialize()
    backend.barrier()
    begin = time.monotonic()
    if backend.get_rank() == 0:
        state: GroupState = backend._state(None)

        def fall_into_trouble() -> None:
            state.fall_into(Trouble(CollectiveMismatchError, "the ranks' calls differ"))
            backend._wake(state)

        threading.Timer(0.2, fall_into_trouble).start()
        receive = backend.irecv(torch.ones(1), 1).wait if handle else partial(backend.recv, torch.ones(1), 1)
        with pytest.raises(CommError, match=r"^recv on the group of ranks \[0, 1\]"):
            receive()
    else:
        time.sleep(2)
    took_s = time.monotonic() - begin
    backend.destroy_process_group()
    return took_s


@pytest.mark.parametrize("handle", [False, True])
def test_who_waits_for_a_message_of_a_broken_group_is_woken(handle: bool) -> None:
    assert run_ranks(wake_who_waits_for_a_message, 2, handle, timeout_s=60)[0] < 5 * patience()


def test_this_torch_lets_messages_be_aborted() -> None:
    assert len(_aborts()) == 2
