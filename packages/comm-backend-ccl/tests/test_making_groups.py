"""Members that make a group through its store."""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import os
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.distributed as c10d

from comm_backend_ccl import communicator_factory, oneccl_library, shared_memory
from comm_backend_ccl.communicator import Communicator
from comm_backend_ccl.shared_tensors import empty_shared
from comm_utils.errors import BackendUnavailableError
from comm_utils.testing import run_ranks

pytestmark = pytest.mark.skipif(shared_memory.unavailable_reason() is not None, reason="no shared memory")

PACKAGE = str(Path(communicator_factory.__file__).parent)


def end(made: Communicator, store: c10d.Store) -> None:
    """End a group; the process that holds the store stays until all have made theirs."""
    store.set(f"made/{made.rank}", "")
    if made.rank == 0:
        store.wait([f"made/{one}" for one in range(made.size)], timedelta(seconds=60))
    made.close()


def run_slow_first_member() -> str:
    """Return what a member prints while it waits for the first one."""
    store, rank, size = next(c10d.rendezvous("env://"))
    store.set(f"here/{rank}", "")
    store.wait([f"here/{one}" for one in range(size)], timedelta(seconds=60))
    if rank == 0:
        create = shared_memory.create

        def create_late(ranks: int) -> tuple[int, int]:
            time.sleep(1)
            return create(ranks)

        communicator_factory.shared_memory.create = create_late
    with tempfile.TemporaryFile() as output:
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(output.fileno(), 2)
        try:
            made = communicator_factory.make_communicator(store, rank, size, timedelta(seconds=60))
        finally:
            os.dup2(stderr, 2)
        end(made, store)
        output.seek(0)
        return output.read().decode()


def test_members_wait_without_warnings() -> None:
    assert run_ranks(run_slow_first_member, 2, env={"CCL_SHARED_MEMORY_PROFILE": "0"}) == ["", ""]


class CountingStore(c10d.TCPStore):
    """Counts the single values that are asked for."""

    gets = 0

    def get(self, key: str) -> bytes:
        self.gets += 1
        return super().get(key)


def run_counted(ranks: int) -> int:
    rank = int(os.environ["RANK"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = CountingStore(address, port, ranks, rank == 0, timedelta(seconds=60))
    made = communicator_factory.make_communicator(store, rank, ranks, timedelta(seconds=60))
    end(made, store)
    return store.gets


def test_members_do_not_ask_for_the_records_of_others_one_by_one() -> None:
    assert run_ranks(run_counted, 3, 3, env={"CCL_SHARED_MEMORY_PROFILE": "0"}) == [0, 0, 0]


def run_connected_wrongly() -> str:
    """Return the error of a member whose number is another one to oneCCL."""
    create = oneccl_library.create
    oneccl_library.create = lambda size, rank, get, put: create(size, (rank + 1) % size, get, put)
    store, rank, size = next(c10d.rendezvous("env://"))
    with pytest.raises(BackendUnavailableError) as caught:
        communicator_factory.make_communicator(store, rank, size, timedelta(seconds=60))
    return str(caught.value)


@pytest.mark.skipif(oneccl_library.unavailable_reason() is not None, reason="no oneCCL")
def test_ranks_that_oneccl_connects_wrongly_raise() -> None:
    found = run_ranks(run_connected_wrongly, 3, env={"CCL_SHARED_MEMORY": "0"})
    for message in found:
        assert " of the group of ranks [0, 1, 2] with ranks [2, 0, 1]; use dist_backend='gloo'" in message, message


def forbid_memory_files() -> None:
    """Let the kernel refuse ``memfd_create`` from here on, as a container's seccomp profile does."""
    number = 319  # on x86-64, on which oneCCL runs
    load, equal, end = 0x20, 0x15, 0x06  # BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ | BPF_K, BPF_RET | BPF_K
    refused, allowed = 0x00050000 | errno.EPERM, 0x7FFF0000  # SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW
    lines = [(load, 0, 0, 0), (equal, 0, 1, number), (end, 0, 0, refused), (end, 0, 0, allowed)]
    held = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    filter_ = struct.pack("@HP", len(lines), ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, mode_filter, ctypes.create_string_buffer(filter_), 0, 0) == 0


def run_without_memory_files() -> tuple[list[str], list[str], str]:
    """Return the engines of two groups, the warnings about them, and the error of ``empty_shared``."""
    forbid_memory_files()
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("comm").addHandler(handler)
    store, rank, size = next(c10d.rendezvous("env://"))
    engines = []
    for name in ("first", "second"):
        own = c10d.PrefixStore(name, store)
        made = communicator_factory.make_communicator(own, rank, size, timedelta(seconds=60))
        engines.append(made.engine)
        end(made, own)
    with pytest.raises(BackendUnavailableError) as caught:
        empty_shared((3,), torch.float32)
    return engines, warnings, str(caught.value)


@pytest.mark.skipif(oneccl_library.unavailable_reason() is not None, reason="no oneCCL")
def test_ranks_that_may_make_no_memory_use_oneccl_and_say_so_once() -> None:
    found = run_ranks(run_without_memory_files, 2)
    for rank, (engines, warnings, error) in enumerate(found):
        assert engines == ["oneCCL"] * 2
        assert len(warnings) == (rank == 0), warnings
        for text in (*warnings, error):
            assert "the system refuses memfd_create (Operation not permitted); allow it in the seccomp profile" in text


def run_interrupted_at_each_call() -> tuple[int, list[str]]:
    """Interrupt the making of a group of one at each call of this package; return their number, and what is left."""
    making = communicator_factory._Factory._in_shared_memory.__code__
    before = descriptors()
    nth, left = 0, []
    while True:
        calls = count()

        def interrupt(frame: FrameType, event: str, _: object, calls: Iterator[int] = calls, nth: int = nth) -> None:
            is_made_there = event == "call" and frame.f_back is not None and frame.f_back.f_code is making
            if is_made_there and frame.f_code.co_filename.startswith(PACKAGE) and next(calls) == nth:
                sys.setprofile(None)
                raise KeyboardInterrupt  # as a handler of signals does there

        made = None
        sys.setprofile(interrupt)
        with suppress(KeyboardInterrupt):
            made = communicator_factory.make_communicator(c10d.HashStore(), 0, 1, timedelta(seconds=60))
        sys.setprofile(None)
        if made is not None:
            made.close()
            return nth, left
        gc.collect()
        left += [f"interrupt {nth} left {one}" for one in descriptors() if one not in before]
        nth += 1


def descriptors() -> list[str]:
    """Return what the descriptors of this process lead to."""
    found = [f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd")]
    return [os.readlink(one) for one in found if os.path.islink(one)]


def test_an_interrupt_at_any_call_leaves_no_descriptor() -> None:
    interrupts, left = run_ranks(run_interrupted_at_each_call, 1, env={"CCL_SHARED_MEMORY_PROFILE": "0"})[0]
    assert interrupts > 5
    assert left == []
