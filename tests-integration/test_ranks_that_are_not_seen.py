"""Errors name processes and hosts of ranks whose rings lie in folders that others do not see."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_collectives.compression.block_codecs import Integer
from comm_collectives.failed_steps import breaking
from comm_orchestrator import selector
from comm_utils.active import active_backend
from comm_utils.errors import CommError
from comm_utils.rank_processes import PROCESSES
from comm_utils.testing import patience, run_ranks, run_ranks_outcomes

pytestmark = pytest.mark.slow


def _start(backend: str, folder: str, timeout: float = 20) -> int:
    """Begin with a ring in a folder of this rank alone, as in a container."""
    own = {"flight_recorder": {"directory": f"{folder}/{os.environ['RANK']}"}} if folder else {}
    dist.init_distributed(backend, timeout=timeout, verbose=False, config=own)
    return dist.get_rank()


def lose_rank(backend: str, folder: str, victim: int) -> None:
    rank = _start(backend, folder)
    dist.all_reduce(torch.ones(4))
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))


@pytest.mark.parametrize(
    ("backend", "victim"),
    [("gloo", 1), ("gloo", 0), ("ccl", 1)],
    ids=["gloo", "gloo, with the store", "oneccl"],
)
def test_a_rank_that_was_killed_is_named_with_its_process(tmp_path: Any, backend: str, victim: int) -> None:
    env = {"CCL_SHARED_MEMORY": "0", "CUDA_VISIBLE_DEVICES": ""}
    outcomes = run_ranks_outcomes(lose_rank, 3, backend, str(tmp_path), victim, env=env)
    for rank in {0, 1, 2} - {victim}:
        assert outcomes[rank].exception_type == "PeerLostError"
        assert re.search(rf"\b{victim} \(pid \d+ on {re.escape(os.uname().nodename)}", outcomes[rank].message)
    said = [outcomes[rank].message for rank in {0, 1, 2} - {victim}]
    assert any(re.search(rf"(its process|the process of rank {victim}) has ended", one) for one in said), said


class Leaving(Integer):
    """Raises on rank 2, at the second piece that it encodes: as Ctrl-C, or a codec that ends the program."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__(8)
        self._error, self._pieces = error, 0

    def encode(self, *args: Any, **kwargs: Any) -> None:
        self._pieces += 1
        if self._pieces == 2 and dist.get_rank() == 2:
            raise self._error
        super().encode(*args, **kwargs)


def leave_between_exchanges(error: type[BaseException], folder: str) -> str:
    rank, compression = _start("gloo", folder), dist.Compression("int8")
    compression.codec = Leaving(error)
    try:
        dist.all_reduce(torch.ones(3_000_000), compression=compression)
    except (CommError, error) as raised:
        (Path(folder) / f"raised {rank}").touch()
        end = time.monotonic() + 60 * patience()
        while len(list(Path(folder).glob("raised *"))) < 3 and time.monotonic() < end:  # its end would tell the others
            time.sleep(0.01)
        return f"{type(raised).__name__}: {raised}"
    return ""


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_rank_that_is_interrupted_between_exchanges_is_named_before_the_timeout(
    tmp_path: Any, error: type[BaseException]
) -> None:
    said = run_ranks(leave_between_exchanges, 3, error, str(tmp_path))
    by = "SIGINT" if error is KeyboardInterrupt else "SystemExit"
    for rank in (0, 1):
        assert said[rank].startswith("PeerLostError: all_reduce on the group of ranks [0, 1, 2] lost a peer"), said
        assert re.search(rf"rank 2 \(pid \d+ on .*\) was interrupted \({by}\) in all_reduce", said[rank]), said


def leave_the_next_call(folder: str) -> tuple[float, str]:
    """Rank 1 comes late to a call of which rank 2 does its part, before it is interrupted in the next one."""
    rank, group = _start("gloo", folder), dist.new_group([0, 1, 2])
    parts = [torch.zeros(4) for _ in range(3)] if rank == 0 else None
    if rank == 2:
        dist.gather(torch.ones(4), None, group=group)
        with pytest.raises(KeyboardInterrupt), breaking("all_reduce", active_backend(), group):
            raise KeyboardInterrupt
        (Path(folder) / "left").touch()
    elif rank == 1:
        while not (Path(folder) / "left").exists():
            time.sleep(0.01)
        time.sleep(3)  # rank 0 has heard of it, and waits for longer than a second
    if rank < 2:
        dist.gather(torch.ones(4), parts, group=group)
    said = ""
    if rank == 0:
        with pytest.raises(dist.PeerLostError) as caught:
            dist.all_reduce(torch.ones(4), group=group)
        said = str(caught.value)
        (Path(folder) / "heard").touch()
    end = time.monotonic() + 60 * patience()
    while not (Path(folder) / "heard").exists() and time.monotonic() < end:  # an end would tell as well
        time.sleep(0.01)
    return sum(part.sum().item() for part in parts or ()), said


def test_a_call_is_completed_of_which_a_rank_had_done_its_part_before_it_was_interrupted(tmp_path: Any) -> None:
    found = run_ranks(leave_the_next_call, 3, str(tmp_path))
    assert found[0][0] == 12.0
    assert "was interrupted (SIGINT) in all_reduce" in found[0][1], found


def miss_group(folder: str) -> None:
    if _start("gloo", folder) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.new_group([0, 1], timeout=1)


def test_a_rank_that_does_not_make_a_group_is_named_with_its_process(tmp_path: Any) -> None:
    said = run_ranks_outcomes(miss_group, 2, str(tmp_path))[0].message
    assert re.search(r"rank 1 \(pid \d+ on .*\): it is not seen from here, and its process has ended", said), said


def stay_away_from_the_world(backend: str, absent: int) -> str:
    if int(os.environ["RANK"]) == absent:

        def fail(setup: Any) -> Any:
            time.sleep(4)
            raise CommError("this rank had something else to do")

        selector.activate = fail
    try:
        dist.init_distributed(backend, timeout=2, verbose=False, config={"timeouts": {"init_s": 60}})
    except CommError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_a_rank_that_does_not_come_to_make_the_world_is_named_with_its_process(backend: str) -> None:
    said, *_ = run_ranks(stay_away_from_the_world, 3, backend, 2, env={"CUDA_VISIBLE_DEVICES": ""})
    assert re.search(rf"rank 2 \(pid \d+ on {re.escape(os.uname().nodename)}\)", said), said


def wait_for_a_rank_that_waits(backend: str, folder: str, is_seen: bool) -> tuple[int, str]:
    """Rank 0 waits for rank 1, which waits for rank 2 in another group, which waits for rank 3 in a third one."""
    _start(backend, "" if is_seen else folder)
    rank, moment = dist.get_rank(), Path(folder, "rank 0 has given up")
    groups = [dist.new_group([one, one + 1]) for one in range(3)]
    said = ""
    if rank == 0:
        try:
            dist.all_reduce(torch.ones(4), group=groups[0], timeout=3)
        except CommError as error:
            said = str(error)
        moment.touch()
    if rank == 3:
        while not moment.exists():
            time.sleep(0.05)
    for first in (2, 1):
        if rank in (first, first + 1):
            dist.all_reduce(torch.ones(4), group=groups[first], timeout=60)
    dist.destroy_process_group()
    return os.getpid(), said


@pytest.mark.parametrize("is_seen", [True, False])
@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_who_is_late_as_it_waits_for_others_does_not_hide_the_cause(
    tmp_path: Path, backend: str, is_seen: bool
) -> None:
    ranks = run_ranks(wait_for_a_rank_that_waits, 4, backend, str(tmp_path), is_seen, env={"CUDA_VISIBLE_DEVICES": ""})
    (_, said), *others = ranks
    assert "rank 1 (pid " in said
    assert ". There, rank 2 (pid " in said
    cause = said.rpartition(". There, ")[2]
    assert cause.startswith(f"rank 3 (pid {others[-1][0]} on "), said
    assert "has not called all_reduce, for which rank 2 waits: it is in none of its calls" in cause
    assert [text for _, text in others] == [""] * 3


def adopt_another_world() -> tuple[int, int, int]:
    dist.init_distributed("gloo", verbose=False)
    known = len(PROCESSES)
    dist.destroy_process_group()
    after = len(PROCESSES)
    store = torch.distributed.FileStore(os.environ["STORE_FILE"], 2)
    torch.distributed.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    dist.init_distributed(verbose=False)
    adopted = len(PROCESSES)
    dist.destroy_process_group()
    return known, after, adopted


def test_processes_are_those_of_the_world(tmp_path: Any) -> None:
    found = run_ranks(adopt_another_world, 2, env={"STORE_FILE": str(tmp_path / "store")})
    assert found == [(2, 0, 0)] * 2
