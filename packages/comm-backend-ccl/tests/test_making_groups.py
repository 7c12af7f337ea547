"""Members that make a group through its store."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from datetime import timedelta

import pytest
import torch.distributed as c10d

from comm_backend_ccl import communicator_factory, shared_memory
from comm_utils.testing import run_ranks

pytestmark = pytest.mark.skipif(shared_memory.unavailable_reason() is not None, reason="no shared memory")


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
        made.close()
        output.seek(0)
        return output.read().decode()


def test_members_wait_without_warnings() -> None:
    assert run_ranks(run_slow_first_member, 2, env={"CCL_SHARED_MEMORY_PROFILE": "0"}) == ["", ""]
