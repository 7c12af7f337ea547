"""What ends with a broken group of gloo, and what does not."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d as internals

from comm_backend_torch import provider
from comm_backend_torch.waits import how_to_wait
from comm_utils import PeerLostError, Setup
from comm_utils.errors import CollectiveMismatchError
from comm_utils.testing import run_ranks
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
    assert isinstance(backend._failure("all_reduce", None, caught.value), PeerLostError | CollectiveMismatchError)
    backend.destroy_process_group()
    return took_s


def test_a_call_of_a_broken_group_that_does_not_end_is_given_up() -> None:
    assert max(run_ranks(give_up, 1, timeout_s=60)) < 5
