"""Tests of torch's test class for ``torch.distributed``, many of them on ranks that stay."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import tempfile
import time
import traceback
import unittest
import warnings
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d

import comm_orchestrator
from comm_utils.testing import patience

__all__ = ["run_tests"]

RANKS = 3

# torch's module reads these when it is imported. As ccl is asked for what gloo can do, that is what it reads.
_ENVIRONMENT = {"BACKEND": "gloo", "INIT_METHOD": "", "TEMP_DIR": tempfile.gettempdir(), "WORLD_SIZE": str(RANKS)}
os.environ.update(_ENVIRONMENT)

from torch.testing._internal import common_utils  # noqa: E402
from torch.testing._internal.common_distributed import TEST_SKIPS  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

# These make their model according to the name of the backend, and know torch's own names alone.
_ASKS_FOR_GLOO = "test_accumulate_gradients_no_sync"
_ARRIVAL_S = 20.0
# For one test. After it the ranks end, with the stacks of all threads on stderr.
_TEST_S = 60.0
# In which the other ranks fail as well, so that the next test can have the same processes.
_AGREEMENT_S = 3.0
_NAP_S = 0.002


class _Meeting:
    """What the ranks tell each other without the library under test."""

    def __init__(self, store: c10d.Store) -> None:
        self._store = store

    def arrived(self, place: str, come: bool = False) -> int:
        return self._store.add(place, int(come))

    def meet(self, place: str, seconds: float, unless: str = "") -> bool:
        """Return whether every rank came within so long, and none had come to ``unless``."""
        self.arrived(place, come=True)
        end = time.monotonic() + seconds * patience()
        while self.arrived(place) < RANKS:
            if time.monotonic() > end or (unless and self.arrived(unless)):
                return False
            time.sleep(_NAP_S)
        return True


def run_tests(
    names: Sequence[str], backend: str, through_ours: bool, folder: str, port: int, unprofiled: Sequence[str]
) -> None:
    """Run tests on this rank, a world for each, and write a line about each into ``folder``.

    A line of ``rank-R`` has the test's name, "passed", "skipped" or "failed", and the reason. After a test that has
    failed on some ranks and ended on no other, the ranks end, as the others may wait for them for long.

    Args:
        through_ours: the tests call ``comm_orchestrator`` instead of ``torch.distributed``.
        folder: an empty one that the ranks share.
        port: of a store on this host that outlives the ranks.
        unprofiled: tests that do not look for what the profiler shows of each call.

    Raises:
        RuntimeError: this rank has failed a test that did not end on every other.
    """
    module: Any = distributed_test
    rank = int(os.environ["RANK"])
    warnings.simplefilter("ignore")
    if through_ours:
        module.dist = comm_orchestrator
    if backend == "ccl":
        importlib.import_module("comm_backend_ccl")  # registers it
    api: Any = module.dist
    store = c10d.PrefixStore(folder, c10d.TCPStore("localhost", port, timeout=timedelta(seconds=_ARRIVAL_S)))
    meeting = _Meeting(store)
    with Path(folder, f"rank-{rank}").open("a") as lines:
        for name in names:
            own_folder = f"{folder}/{name}"
            os.makedirs(f"{own_folder}/test_dir", exist_ok=True)
            os.environ.update(_ENVIRONMENT, BACKEND=backend, TEMP_DIR=own_folder)
            module.INIT_METHOD = f"file://{own_folder}/again"
            module.BACKEND = "gloo" if name.startswith(_ASKS_FOR_GLOO) else backend
            faulthandler.dump_traceback_later(_TEST_S * patience(), exit=True)
            state, reason = _outcome(name, api, backend, c10d.PrefixStore(name, store), meeting, name not in unprofiled)
            if state == "failed":
                meeting.arrived(f"failed/{name}", come=True)
            print(json.dumps([name, state, reason]), file=lines, flush=True)
            together = meeting.meet(f"ended/{name}", _TEST_S if state != "failed" else _AGREEMENT_S)
            _leave(api)
            faulthandler.cancel_dump_traceback_later()
            if not together or not meeting.meet(f"left/{name}", _ARRIVAL_S):
                raise RuntimeError(f"{name} did not end on every rank; it has {state} on this one")


def _outcome(
    name: str, api: Any, backend: str, store: c10d.Store, meeting: _Meeting, profiled: bool
) -> tuple[str, str]:
    module: Any = distributed_test
    rank = int(os.environ["RANK"])

    class Case(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc]
        calls = 0

        def _barrier(self, *_: Any, **__: Any) -> None:
            """Come together sooner than torch's own, which polls files."""
            self.calls += 1
            if not meeting.meet(f"{name}/{self.calls}", _ARRIVAL_S, unless=f"failed/{name}"):
                raise RuntimeError("barrier timeout")

        def call_dist_op(self, *args: Any, **kwargs: Any) -> None:
            super().call_dist_op(*args, **{**kwargs, **({} if profiled else {"expect_event": False})})

    try:
        timeout_s = module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout)
        timeout = timedelta(seconds=timeout_s)
        api.init_process_group(backend, store=store, world_size=RANKS, rank=rank, timeout=timeout)
        common_utils.set_rng_seed()
        case: Any = Case(name)
        case.rank, case.file_name = rank, f"{os.environ['TEMP_DIR']}/rendezvous"
        getattr(case, name)()
        case._barrier()
    except unittest.SkipTest as skipped:
        return "skipped", str(skipped) or "skipped"
    except SystemExit as left:
        reasons = [one.message for one in TEST_SKIPS.values() if one.exit_code == left.code]
        return ("skipped", reasons[0]) if reasons else ("failed", traceback.format_exc())
    except BaseException:
        return "failed", traceback.format_exc()
    return "passed", ""


def _leave(api: Any) -> None:
    """End the world, and what a test has changed for the whole process."""
    with suppress(Exception):
        if api.is_initialized():
            api.destroy_process_group()
    with suppress(Exception):
        if c10d.is_initialized():
            c10d.destroy_process_group()
    torch.set_default_dtype(torch.float32)
    gc.collect()
