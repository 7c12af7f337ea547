"""How groups in shared memory move data: the transfers, and the choice among them by measurement."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_backend_ccl import shared_communicator
from comm_utils.testing import run_ranks, run_ranks_outcomes

_FOUND = dist.available_backends()["ccl"]
_HERE = "between" in _FOUND.details.get("shared memory", "")
pytestmark = pytest.mark.skipif(not _HERE, reason=_FOUND.details.get("shared memory", _FOUND.reason))


def start() -> None:
    dist.init_distributed("ccl", verbose=False)


def forbid_reading_of_peers() -> None:
    """Let the kernel refuse ``process_vm_readv`` from here on, as a container's seccomp profile does."""
    number = {"x86_64": 310, "aarch64": 270}[platform.machine()]
    load, equal, end = 0x20, 0x15, 0x06  # BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ | BPF_K, BPF_RET | BPF_K
    refused, allowed = 0x00050000 | errno.EPERM, 0x7FFF0000  # SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW
    lines = [(load, 0, 0, 0), (equal, 0, 1, number), (end, 0, 0, refused), (end, 0, 0, allowed)]
    program = b"".join(struct.pack("=HBBI", *line) for line in lines)
    held = ctypes.create_string_buffer(program)
    filter_ = struct.pack("@HP", len(lines), ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, mode_filter, ctypes.create_string_buffer(filter_), 0, 0) == 0


def run_learning(may_read: bool) -> tuple[set[str], list[str]]:
    """Return the candidates of gathers and the methods in use, of results that were all right."""
    if not may_read and int(os.environ["RANK"]) == 1:
        forbid_reading_of_peers()
    start()
    me, size = dist.get_rank(), dist.get_world_size()
    output, own = torch.empty(size * 2**14), torch.empty(2**14)
    for step in range(200):
        own.fill_(100 * step + me)
        dist.all_gather_into_tensor(output, own)
        expected = [100 * step + one for one in range(size)]
        assert [*map(torch.Tensor.tolist, output.view(size, -1).aminmax(dim=1))] == [expected] * 2
    learned = [row for group in shared_communicator.open_groups() for row in group.methods()]
    dist.destroy_process_group()
    assert learned
    assert all(row["settled"] for row in learned)
    return {name for row in learned for name in row["typical_ns"]}, [row["method"] for row in learned]


def test_ranks_learn_alike_how_to_move_data(rank_environment: dict[str, Any]) -> None:
    (candidates, chosen), *others = run_ranks(run_learning, 2, True, env=rank_environment)
    assert {"cached", "streamed"} <= candidates
    assert all(found == (candidates, chosen) for found in others)


def test_no_single_copy_without_the_kernels_permission(rank_environment: dict[str, Any]) -> None:
    for candidates, _ in run_ranks(run_learning, 2, False, env=rank_environment):
        assert candidates == {"cached", "streamed", "cached, wide ring"}


def run_calls_of(size_bytes: int) -> list[dict[str, Any]]:
    """Return what the groups have learned from calls in which every rank has so much, and from no others."""
    start()
    W = dist.get_world_size()
    own, all_of_them = torch.ones(size_bytes // 4), torch.ones(W * size_bytes // 4)
    for _ in range(300):  # more than a comparison takes
        dist.all_reduce(own)
        dist.broadcast(own, 0)
        dist.all_gather_into_tensor(all_of_them, own)
        dist.reduce_scatter_tensor(own[: len(own) // W], own)
        dist.all_to_all_single(torch.empty_like(own), own)
    learned = [row for group in shared_communicator.open_groups() for row in group.methods()]
    dist.destroy_process_group()
    return learned


@pytest.mark.parametrize("size_bytes", [64, 4096, 8192])
def test_calls_of_up_to_8_kib_take_no_part_in_learning(size_bytes: int, rank_environment: dict[str, Any]) -> None:
    # A first group measures a host that has no profile, with larger calls.
    environment = rank_environment | {"CCL_SHARED_MEMORY_PROFILE": "0"}
    assert run_ranks(run_calls_of, 2, size_bytes, env=environment) == [[], []]


def test_larger_calls_take_part_in_learning(rank_environment: dict[str, Any]) -> None:
    environment = rank_environment | {"CCL_SHARED_MEMORY_PROFILE": "0"}
    for learned in run_ranks(run_calls_of, 2, 12288, env=environment):
        assert "all_reduce" in {row["operation"] for row in learned}


def run_forbidden() -> None:
    if os.environ["RANK"] == "1":
        forbid_reading_of_peers()
    run_many_kinds()


def test_a_single_copy_that_the_kernel_forbids_is_replaced_and_said(rank_environment: dict[str, Any]) -> None:
    wanted = rank_environment | {"CCL_SHARED_MEMORY_TRANSFER": " single_copy ", "CCL_SHARED_MEMORY_LEARNING": "0 "}
    allowed, forbidden = run_ranks_outcomes(run_forbidden, 2, env=wanted)
    for outcome in (allowed, forbidden):
        assert outcome.status == "returned", outcome.traceback
        assert "expected" not in outcome.stderr  # blanks around values
    assert "CCL_SHARED_MEMORY_TRANSFER=single_copy: the kernel forbids this process to read" in forbidden.stderr
    assert "the kernel forbids" not in allowed.stderr


@pytest.mark.parametrize("transfer", ["cached", "streamed", "single_copy"])
def test_transfers_give_the_same_results(rank_environment: dict[str, Any], transfer: str) -> None:
    run_ranks(run_many_kinds, 3, env=rank_environment | {"CCL_SHARED_MEMORY_TRANSFER": transfer})


def run_many_kinds() -> None:
    start()
    me, size = dist.get_rank(), dist.get_world_size()
    for length in (3000, 40_000, 400_000):
        for turn in range(20):
            one = torch.arange(length, dtype=torch.float64) + me + turn
            everyone = [torch.arange(length, dtype=torch.float64) + rank + turn for rank in range(size)]
            total = one.clone()
            dist.all_reduce(total)
            assert torch.equal(total, sum(everyone))
            gathered = torch.empty(size * length, dtype=torch.float64)
            dist.all_gather_into_tensor(gathered, one)
            assert torch.equal(gathered, torch.cat(everyone))
            exchanged = torch.empty(size * length, dtype=torch.float64)
            dist.all_to_all_single(exchanged, gathered + 1000 * me)
            assert torch.equal(exchanged, torch.cat([everyone[me] + 1000 * rank for rank in range(size)]))
            part = torch.empty(length, dtype=torch.float64)
            dist.reduce_scatter_tensor(part, gathered)
            assert torch.equal(part, size * everyone[me])
            sent = one.clone()
            dist.broadcast(sent, turn % size)
            assert torch.equal(sent, everyone[turn % size])
    dist.destroy_process_group()


def run_worlds(transfers: list[str]) -> list[tuple[int, set[str]]]:
    """Return of each world how many groups are open and which methods they choose from."""
    found = []
    kept = []
    for one in transfers:
        network = {"ccl": {"shared_memory_transfer": one}} if one else {}
        dist.init_distributed("ccl", verbose=False, config={"network": network})
        for _ in range(100):
            dist.all_reduce(torch.ones(2**14))
        kept.append(dist.all_reduce(torch.ones(3), async_op=True))
        open_now = shared_communicator.open_groups()
        methods = {name for group in open_now for row in group.methods() for name in row["typical_ns"]}
        found.append((len(open_now), methods))
        dist.destroy_process_group()
    return found


def test_each_world_has_the_settings_of_its_own_start(rank_environment: dict[str, Any]) -> None:
    for found in run_ranks(run_worlds, 2, ["", "cached", ""], env=rank_environment):
        (one, first), (two, second), (three, third) = found
        assert (one, two, three) == (1, 1, 1)
        assert second == set()
        assert first == third
        assert {"cached", "streamed"} <= first


def run_with_own_transfer() -> str:
    os.environ["CCL_SHARED_MEMORY_TRANSFER"] = ["cached", "streamed"][int(os.environ["RANK"])]
    with pytest.raises(dist.ConfigurationError) as caught:
        start()
    return str(caught.value)


def test_different_transfers_are_named(rank_environment: dict[str, Any]) -> None:
    for text in run_ranks(run_with_own_transfer, 2, env=rank_environment):
        assert "CCL_SHARED_MEMORY_TRANSFER differs between the ranks of a group" in text
        assert "rank 0: 'cached', rank 1: 'streamed'" in text
