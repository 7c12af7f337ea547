"""Tensors without the memory that they claim, and dtypes that are refused, cold and on the fast path."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_utils.testing import RankPool, run_ranks
from comm_utils.testing.conformance_fast_path import not_plain

Pools = Callable[[int], RankPool]


def shrunk(size_bytes: int, count: int = 1000) -> torch.Tensor:
    """A tensor of ``count`` floats whose storage was resized, as FSDP frees a parameter."""
    tensor = torch.ones(count)
    tensor.untyped_storage().resize_(size_bytes)
    return tensor


def calls(bad: Callable[[], Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every collective and message with one wrong tensor, in each of its roles."""
    rank, W = dist.get_rank(), dist.get_world_size()
    root, peer = dist.get_rank(), 1 - dist.get_rank()
    one, many = torch.ones(1000), torch.ones(1000 * W)
    parts = [torch.ones(1000) for _ in range(W)]
    yield "all_reduce", lambda: dist.all_reduce(bad())
    yield "all_reduce async", lambda: dist.all_reduce(bad(), async_op=True)
    yield "inference_all_reduce", lambda: dist.inference_all_reduce(bad())
    yield "reduce", lambda: dist.reduce(bad(), root)
    yield "broadcast", lambda: dist.broadcast(bad(), root)
    yield "all_gather", lambda: dist.all_gather(parts, bad())
    yield "all_gather of one", lambda: dist.all_gather(bad())
    yield "all_gather output", lambda: dist.all_gather([bad(), *parts[1:]], one)
    yield "all_gather_into_tensor", lambda: dist.all_gather_into_tensor(many, bad())
    yield "reduce_scatter_tensor output", lambda: dist.reduce_scatter_tensor(bad(), many)
    yield "reduce_scatter output", lambda: dist.reduce_scatter(bad(), parts)
    yield "reduce_scatter", lambda: dist.reduce_scatter(one, [*parts[1:], bad()])
    yield "all_to_all_single", lambda: dist.all_to_all_single(torch.ones(1000), bad())
    yield "all_to_all_single output", lambda: dist.all_to_all_single(bad(), torch.ones(1000))
    yield "all_to_all", lambda: dist.all_to_all([torch.ones(1000) for _ in range(W)], [*parts[1:], bad()])
    yield "gather", lambda: dist.gather(bad(), parts, rank)
    yield "scatter", lambda: dist.scatter(bad(), parts, rank)
    yield "send", lambda: dist.send(bad(), peer)
    yield "recv", lambda: dist.recv(bad(), peer)
    yield "isend", lambda: dist.isend(bad(), peer)
    yield "irecv", lambda: dist.irecv(bad(), peer)
    yield "all_reduce_coalesced", lambda: dist.all_reduce_coalesced([bad()])
    yield "all_gather_coalesced", lambda: dist.all_gather_coalesced([many], [bad()])
    yield "reduce_scatter_coalesced", lambda: dist.reduce_scatter_coalesced([bad()])


def warm_up() -> None:
    """Make every call rightly, twice, with the roots that each rank names later."""
    rank, W = dist.get_rank(), dist.get_world_size()
    one, many = torch.ones(1000), torch.ones(1000 * W)
    for _ in range(2):
        parts = [torch.ones(1000) for _ in range(W)]
        dist.all_reduce(one)
        dist.all_reduce(one, async_op=True).wait()  # type: ignore[union-attr]
        dist.inference_all_reduce(one)
        for root in range(W):
            dist.reduce(one, root)
            dist.broadcast(one, root)
            dist.gather(one, parts if rank == root else None, root)
            dist.scatter(one, parts if rank == root else None, root)
        dist.all_gather(parts, one)
        dist.all_gather_into_tensor(many, one)
        dist.reduce_scatter_tensor(one, many)
        dist.reduce_scatter(one, parts)
        dist.all_to_all_single(torch.ones(1000), one)
        dist.all_to_all([torch.ones(1000) for _ in range(W)], parts)
        dist.all_reduce_coalesced([one])
        dist.send(one, 1 - rank) if rank == 0 else dist.recv(one, 1 - rank)
        dist.recv(one, 1 - rank) if rank == 0 else dist.send(one, 1 - rank)


def refusals(size_bytes: int) -> dict[str, str]:
    found = {}
    for name, call in calls(lambda: shrunk(size_bytes)):
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
        else:
            found[name] = "nothing was raised"
    return found


def run_storages() -> list[dict[str, str]]:
    found = [refusals(4), refusals(0)]
    warm_up()
    found += [refusals(4), refusals(0)]
    tensor = torch.ones(8)
    dist.all_reduce(tensor)  # nothing was begun, and nothing is broken
    assert tensor.tolist() == [2.0] * 8
    whole = torch.arange(1000.0)
    whole.untyped_storage().resize_(8 * 4)
    behind = whole.as_strided((4,), (1,), 4)  # all within what is left
    dist.all_reduce(behind)
    assert behind.tolist() == [8.0, 10.0, 12.0, 14.0]
    return found


def check_storages(found: list[list[dict[str, str]]]) -> None:
    for of_rank in found:
        for size, refused in zip((4, 0, 4, 0), of_rank, strict=True):
            expected = rf"storage of {size} bytes, but shape \(1000,\) of float32 needs 4000"
            wrong = {name: text for name, text in refused.items() if not re.search(expected, text)}
            assert wrong == {}


def test_storages_that_are_too_small(pools: Pools) -> None:
    check_storages(pools(2).run(run_storages))


def start_on_oneccl() -> list[dict[str, str]]:
    dist.init_distributed("ccl", verbose=False)
    found = run_storages()
    dist.destroy_process_group()
    return found


def test_storages_that_are_too_small_on_oneccl() -> None:
    check_storages(run_ranks(start_on_oneccl, 2, timeout_s=120, env={"CCL_SHARED_MEMORY": "0"}))


def run_not_plain() -> list[str]:
    """What is refused or served at first is refused or served in the same way on the fast path."""
    differences, found = [], []
    for _ in range(2):
        outcomes = {}
        for name, bad in not_plain("cpu"):
            if not isinstance(bad, torch.nn.Parameter):
                outcomes[name] = outcome_of(bad)
        found.append(outcomes)
        warm_up()
    for name, cold in found[0].items():
        if found[1][name] != cold:
            differences.append(f"{name}: {cold}, and then {found[1][name]}")
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0]
    return differences


def outcome_of(bad: Any) -> str:
    try:
        dist.all_reduce(bad)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "served"


def test_what_is_refused_at_first_is_refused_later(pools: Pools) -> None:
    assert pools(2).run(run_not_plain) == [[], []]


def run_small_integers() -> list[str]:
    found = []
    for _ in range(2):
        for name in ("uint4", "int1"):
            tensor = torch.empty(8, dtype=getattr(torch, name))
            with pytest.raises(ValueError, match="can be moved but not reduced") as refusal:
                dist.all_reduce(tensor)
            found.append(str(refusal.value))
            with pytest.raises(ValueError, match="can be moved but not reduced"):
                dist.inference_all_reduce(tensor)
        warm_up()
    return found


@pytest.mark.skipif(not hasattr(torch, "uint4"), reason="this torch has no uint4")
def test_integers_below_a_byte_are_not_reduced(pools: Pools) -> None:
    for found in pools(2).run(run_small_integers):
        assert found[:2] == found[2:]


def run_under_vmap() -> list[str]:
    found = []
    for _ in range(2):
        with pytest.raises(ValueError, match=r"called under a transform such as torch\.vmap") as refusal:
            torch.vmap(lambda one: (dist.all_reduce(one), one)[1])(torch.ones(3, 4))
        found.append(str(refusal.value))
        warm_up()
    return found


def test_a_call_under_vmap(pools: Pools) -> None:
    first, second = pools(2).run(run_under_vmap)
    assert first == second
    assert first[0] == first[1]
