"""Without the orchestrator, errors send users to what this package and a backend have."""

import importlib.util
import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as c10d

import comm_collectives as comm
from comm_backend_torch import provider
from comm_utils import BrokenGroupError, CommTimeoutError, NotInitializedError, PeerLostError, Setup, activate
from comm_utils.testing import run_ranks, run_ranks_outcomes
from comm_utils.watch import WATCH, WatchSettings

START = r"pass what comm_backend_\w+\.provider\.initialize\(setup\) .*returns to comm_utils\.activate\(\)"
AGAIN = rf": on every rank, call destroy_process_group\(\), and then {START} again"


def bring_up(watch: bool) -> c10d.Store:
    # Where all packages are installed, this one is alone all the same.
    sys.path[:] = [path for path in sys.path if not (Path(path) / "comm_orchestrator").is_dir()]
    assert importlib.util.find_spec("comm_orchestrator") is None
    WATCH.settings = WatchSettings(enabled=watch)
    store: c10d.Store
    store, rank, world_size = next(c10d.rendezvous("env://"))
    with pytest.raises(NotInitializedError, match=f"all_reduce: .*; {START} first"):
        comm.all_reduce(torch.ones(3))
    activate(provider.initialize(Setup("gloo", rank, world_size, store, timedelta(seconds=2))))
    comm.all_reduce(torch.ones(3))
    return store


def check_text(error: BaseException) -> None:
    assert "init_distributed" not in str(error)
    assert "dist." not in str(error)


def time_out(watch: bool) -> None:
    store = bring_up(watch)
    if comm.get_rank() == 1:
        store.set_timeout(timedelta(seconds=60))
        store.wait(["rank 0 has timed out"])
        return
    with pytest.raises(CommTimeoutError, match=AGAIN) as caught:
        comm.all_reduce(torch.ones(3))
    check_text(caught.value)
    if not watch:
        assert "a monitored_barrier() before the call" in str(caught.value)
        assert "timeout= of comm_utils.Setup() and new_group() sets the limit" in str(caught.value)
    with pytest.raises(BrokenGroupError, match=AGAIN.lstrip(":")) as later:
        comm.all_reduce(torch.ones(3))
    check_text(later.value)
    store.set("rank 0 has timed out", "")


@pytest.mark.parametrize("watch", [True, False])
def test_the_error_of_a_timeout_names_what_is_installed(watch: bool) -> None:
    run_ranks(time_out, 2, watch, timeout_s=60)


def lose_a_peer() -> None:
    bring_up(watch=True)
    if comm.get_rank() == 1:
        os._exit(3)
    with pytest.raises(PeerLostError, match=AGAIN) as caught:
        comm.all_reduce(torch.ones(3))
    check_text(caught.value)


def test_the_error_about_a_rank_that_died_names_what_is_installed() -> None:
    survivor, victim = run_ranks_outcomes(lose_a_peer, 2, timeout_s=60)
    assert (survivor.status, victim.exit_code) == ("returned", 3), survivor
