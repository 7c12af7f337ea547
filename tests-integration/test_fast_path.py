"""The second call of a kind goes a shorter way than the first, and does the same."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch

import comm_orchestrator as dist
from comm_utils.flight_recorder import RECORDER, open_ring
from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]

#: shapes of the input and of the output on two ranks
GATHERED = [
    ((4,), (8,)),
    ((4,), (2, 4)),
    ((2, 2), (4, 2)),
    ((2, 2), (2, 2, 2)),
    ((2, 2), (8,)),
    ((), (2,)),
    ((0,), (0,)),
]


def run_gathering() -> list[list[float]]:
    rank, found = dist.get_rank(), []
    for shape, output_shape in GATHERED * 2:
        output = torch.empty(output_shape)
        dist.all_gather_into_tensor(output, torch.full(shape, rank + 1.0))
        found.append(output.flatten().tolist())
    inside = torch.full((8,), rank + 1.0)
    for _ in range(2):
        dist.all_gather_into_tensor(inside, inside[4 * rank : 4 * rank + 4])  # this rank's own place
        found.append(inside.tolist())
        inside[4 * rank : 4 * rank + 4] = rank + 1.0
    return found


def test_gathering_into_every_shape(pools: Pools) -> None:
    sizes = [torch.Size(shape).numel() for shape, _ in GATHERED] * 2 + [4, 4]
    expected = [[1.0] * size + [2.0] * size for size in sizes]
    assert pools(2).run(run_gathering) == [expected, expected]


def run_scattering() -> list[list[float]]:
    found = []
    for output_shape, shape in GATHERED * 2:
        output, source = torch.empty(output_shape), torch.arange(torch.Size(shape).numel() + 0.0).view(shape)
        dist.reduce_scatter_tensor(output, source)
        found.append(output.flatten().tolist())
    return found


def test_scattering_from_every_shape(pools: Pools) -> None:
    for rank, found in enumerate(pools(2).run(run_scattering)):
        sizes = [torch.Size(shape).numel() for shape, _ in GATHERED] * 2
        assert found == [[2.0 * (rank * size + i) for i in range(size)] for size in sizes]


def run_lists_and_messages() -> list[list[float]]:
    rank, found = dist.get_rank(), []
    for step in range(4):
        parts = [torch.empty(2, 2) for _ in range(2)]
        mine = torch.full((2, 2), 10.0 * step + rank)
        dist.all_gather(parts, mine)
        found.append([part[1, 1].item() for part in parts])
        parts[rank].copy_(mine)
        dist.all_gather(parts, parts[rank])  # in its own place
        found.append([part[0, 0].item() for part in parts])
        inside = torch.tensor([100.0 + rank, 0.0, 0.0])
        dist.all_gather([inside[0:2], inside[1:3].clone()], inside[0:2])  # on rank 1 it arrives where it is read
        received = torch.empty(2, 2)
        if rank == 0:
            dist.send(mine, 1)
            assert dist.recv(received, 1) == 1
        else:
            assert dist.recv(received, 0) == 0
            dist.send(mine, 0)
        found.append(received.flatten().tolist())
    return found


def test_lists_and_messages(pools: Pools) -> None:
    for rank, found in enumerate(pools(2).run(run_lists_and_messages)):
        expected = [[[10.0 * s, 10.0 * s + 1]] * 2 + [[10.0 * s + 1 - rank] * 4] for s in range(4)]
        assert found == [one for step in expected for one in step]


def run_rooted() -> list[Any]:
    rank, found = dist.get_rank(), []
    for step in range(4):
        root = step // 2
        mine = torch.full((2, 2), 10.0 * step + rank)
        reduced = mine.clone()
        dist.reduce(reduced, root)
        largest = mine.clone()
        dist.reduce(largest, dst=root, op=dist.ReduceOp.MAX)
        found.append([reduced[1, 1].item(), largest[1, 1].item(), mine[0, 0].item()])
        parts = [torch.empty(2, 2) for _ in range(2)] if rank == root else None
        dist.gather(mine, parts, root)
        found.append(None if parts is None else [part[1, 0].item() for part in parts])
        if parts is not None:
            parts[rank].copy_(mine)
        dist.gather(mine if parts is None else parts[rank], parts, root)  # in its own place
        found.append(None if parts is None else [part[0, 1].item() for part in parts])
        received = torch.empty(2, 2)
        dist.scatter(received, None if parts is None else [part + 0.5 for part in parts], root)
        found.append(received.flatten().tolist())
        dist.scatter(received if parts is None else parts[rank], parts, root)  # from its own place
        found.append((received if parts is None else parts[rank]).flatten().tolist())
    found.append(default_roots(rank))
    return found


def default_roots(rank: int) -> list[float]:
    for step in range(2):
        parts = [torch.empty(1), torch.empty(1)] if rank == 0 else None
        dist.gather(torch.full((1,), step + rank * 1.0), parts)
        received = torch.empty(1)
        dist.scatter(received, parts)
    return received.tolist()


def test_reductions_and_parts_of_a_root(pools: Pools) -> None:
    for rank, found in enumerate(pools(2).run(run_rooted)):
        for step in range(4):
            root, mine, both = step // 2, 10.0 * step + rank, [10.0 * step, 10.0 * step + 1]
            reduced, gathered, in_place, received, scattered = found[5 * step : 5 * step + 5]
            assert reduced == ([sum(both), max(both), mine] if rank == root else [mine] * 3)
            assert gathered == in_place == (both if rank == root else None)
            assert received == [mine + 0.5] * 4
            assert scattered == [mine] * 4
        assert found[-1] == [1.0 + rank]


def refused(found: list[str], call: Callable[[], Any]) -> None:
    """Make a call that has to be refused, and add to ``found`` how it was."""
    with pytest.raises(dist.CommError) as refusal:
        call()
    found.append(f"{type(refusal.value).__name__}: {refusal.value}")


def run_rooted_refusals() -> list[str]:
    """What a root is refused before anything is sent, in the second call as in the first; the others do not call."""
    rank = dist.get_rank()
    found: list[str] = []
    attempt = partial(refused, found)

    for _ in range(2):
        parts = [torch.ones(2), torch.ones(2)]
        dist.reduce(torch.ones(2), 0)
        dist.gather(torch.ones(2), parts if rank == 0 else None, 0)
        dist.scatter(torch.ones(2), parts if rank == 0 else None, 0)
        attempt(lambda: dist.reduce(torch.ones(2), 7))
        attempt(lambda: dist.reduce(torch.ones(2), True))
        dist.reduce(torch.ones(2), 0, torch.distributed.ReduceOp.SUM)
        attempt(lambda: dist.reduce(torch.ones(2), 0, 0))
        attempt(lambda: dist.reduce(torch.ones(2), 0, numpy.int64(0)))  # it equals torch's enumerator
        attempt(lambda: dist.reduce(torch.ones(2), 0, "mean"))
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(1)])
        attempt(lambda: dist.reduce(nested, 0))  # noqa: B023
        attempt(lambda: dist.gather(nested, parts, rank))  # noqa: B023
        attempt(lambda: dist.scatter(torch.ones(4)[::2], parts, 0))  # noqa: B023
        if rank == 0:
            shared = torch.empty(3)
            attempt(lambda: dist.reduce(torch.ones(4)[::2], 0))
            attempt(lambda: dist.gather(torch.ones(2), None, 0))
            attempt(lambda: dist.gather(torch.ones(2), parts[:1], 0))  # noqa: B023
            attempt(lambda: dist.gather(torch.ones(2), [torch.ones(2), torch.ones(3)], 0))
            attempt(lambda: dist.gather(torch.ones(2), [torch.ones(2), torch.ones(2, dtype=torch.int32)], 0))
            attempt(lambda: dist.gather(torch.ones(2), [shared[:2], shared[1:]], 0))  # noqa: B023
            attempt(lambda: dist.gather(torch.ones(2), [torch.ones(2), nested], 0))  # noqa: B023
            attempt(lambda: dist.scatter(torch.ones(2), None, 0))
            attempt(lambda: dist.scatter(torch.ones(2), [torch.ones(2), torch.ones(1)], 0))
        else:
            attempt(lambda: dist.gather(torch.ones(2), parts, 0))  # noqa: B023
            attempt(lambda: dist.scatter(torch.ones(2), parts, 0))  # noqa: B023
    return found


def test_refusals_of_roots_stay(pools: Pools) -> None:
    for rank, found in enumerate(pools(2).run(run_rooted_refusals)):
        half = 10 if rank else 17
        assert len(found) == 2 * half
        assert found[:half] == found[half:]


def run_rooted_awkward() -> None:
    rank = dist.get_rank()
    for _ in range(3):
        wide = torch.ones(2, 3, dtype=torch.bfloat16).t()  # not the order of the others
        dist.reduce(wide, 0)
        assert wide.tolist() == [[2.0 - rank] * 2] * 3
        with torch.inference_mode():
            made_there = torch.full((2,), rank + 1.0)
        dist.reduce(made_there, 1)
        assert made_there.tolist() == [3.0 if rank else 1.0] * 2
        flags = torch.tensor([rank == 0, False])
        dist.reduce(flags, 1)
        assert flags.tolist() == [True, False]
        leaf = torch.full((2,), rank + 1.0, requires_grad=True)
        received = [torch.empty(2), torch.empty(2)] if rank else None
        dist.gather(leaf, received, 1)
        if received is not None:
            assert [one.tolist() for one in received] == [[1.0, 1.0], [2.0, 2.0]]
        dist.scatter(leaf, received, 1)
        assert leaf.tolist() == [rank + 1.0] * 2
        shared = torch.tensor([5.0, 6.0, 7.0])
        dist.scatter(shared[1:] if rank == 0 else shared[:2], [shared[:2], shared[1:].clone()] if rank == 0 else None)
        assert shared.tolist() == ([5.0, 5.0, 6.0] if rank == 0 else [6.0, 7.0, 7.0])
        empty = torch.empty(0)
        dist.reduce(empty, 0)
        dist.gather(empty, [torch.empty(0), torch.empty(0)] if rank == 0 else None)


def test_awkward_tensors_of_roots(pools: Pools) -> None:
    pools(2).run(run_rooted_awkward)


def run_exchanges() -> None:
    """Parts of every size, in lists and by their rows; in memory of their own, or in that of one tensor."""
    rank, W = dist.get_rank(), dist.get_world_size()
    for step in range(4):
        for size in (0, 1, 5, 3000, 40_000):
            sizes_in = [size * (rank + to) for to in range(W)]
            sizes_out = [size * (of + rank) for of in range(W)]
            parts = [torch.full((n,), 100.0 * step + 10 * rank + to) for to, n in enumerate(sizes_in)]
            expected = [torch.full((n,), 100.0 * step + 10 * of + rank) for of, n in enumerate(sizes_out)]
            for chunked in (False, True):
                sent, found = torch.cat(parts), torch.zeros(sum(sizes_out))
                inputs = list(sent.split(sizes_in)) if chunked else parts
                outputs = list(found.split(sizes_out)) if chunked else [torch.zeros(n) for n in sizes_out]
                dist.all_to_all(outputs, inputs)
                assert all(map(torch.equal, outputs, expected))
                assert torch.equal(sent, torch.cat(parts))
            found.zero_()
            dist.all_to_all_single(found, sent, sizes_out, sizes_in)
            assert torch.equal(found, torch.cat(expected))
            rows = torch.zeros(sum(sizes_out), 2)
            dist.all_to_all_single(rows, torch.stack([sent, -sent], 1), sizes_out, sizes_in)
            assert torch.equal(rows, torch.stack([found, -found], 1))
            if not chunked or W != 2:
                continue
            whole = torch.arange(4.0) + 10 * rank
            halves = list(whole.split(2))
            dist.all_to_all(halves, halves)  # each is read where another arrives
            assert whole.tolist() == [2.0 * rank, 2.0 * rank + 1, 2.0 * rank + 10, 2.0 * rank + 11]


@pytest.mark.parametrize("W", [1, 2, 3])
def test_exchanges_of_parts_of_any_size(pools: Pools, W: int) -> None:
    pools(W).run(run_exchanges)


def run_chunks() -> None:
    """Lists whose tensors lie one after the other in memory, with which no copies need to be made, and nearly so."""
    rank, W = dist.get_rank(), dist.get_world_size()
    for step in range(4):
        root = step % W
        for shape in ((3,), (2, 5), (70_000,)):
            n = torch.Size(shape).numel()
            mine = torch.arange(n).reshape(shape) + 1000.0 * rank
            all_of_them = torch.stack([torch.arange(n).reshape(shape) + 1000.0 * one for one in range(W)])
            for order in (list, lambda parts: list(reversed(list(parts)))):
                found = torch.zeros(W, *shape)
                parts = order(found)
                dist.all_gather(parts, mine)
                assert torch.equal(torch.stack(parts), all_of_them)
                parts[rank].copy_(mine)
                dist.all_gather(parts, parts[rank])
                assert torch.equal(torch.stack(parts), all_of_them)
                found.zero_()
                dist.gather(mine, parts if rank == root else None, root)
                assert torch.equal(torch.stack(parts), all_of_them * (rank == root))
                if rank == root:
                    parts[rank].copy_(mine)
                dist.gather(parts[rank] if rank == root else mine, parts if rank == root else None, root)
                assert torch.equal(torch.stack(parts), all_of_them * (rank == root))
                received = parts[rank] if rank == root else torch.zeros(shape)
                dist.scatter(received, parts if rank == root else None, root)
                assert torch.equal(received, mine)
                assert torch.equal(torch.stack(parts), all_of_them * (rank == root))
                reduced = torch.zeros(shape)
                parts = order(all_of_them.clone())
                dist.reduce_scatter(reduced, parts)
                assert torch.equal(reduced, W * parts[rank])
                wanted = W * parts[rank]
                dist.reduce_scatter(parts[rank], parts, "sum")
                assert torch.equal(parts[rank], wanted)
                dist.reduce_scatter(reduced, [parts[0]] * W, op=dist.ReduceOp.MAX)  # one tensor for all
        tensors = [torch.full((3,), rank + 1.0), torch.full((2, 2), 10.0 * (rank + 1)), torch.tensor([rank])]
        dist.all_reduce_coalesced(tensors)
        total = W * (W + 1) / 2
        assert [one.flatten()[0].item() for one in tensors] == [total, 10 * total, W * (W - 1) / 2]
        dist.all_reduce_coalesced(tensors[:1], op=torch.distributed.ReduceOp.MAX)
        assert tensors[0].tolist() == [total] * 3


def run_recorded() -> dict[str, list[list[Any]]]:
    assert RECORDER.path is not None
    W, rank, ring = dist.get_world_size(), dist.get_rank(), open_ring(RECORDER.path)
    parts, whole, part = [torch.ones(3) for _ in range(W)], torch.ones(3 * W), torch.ones(3)
    group = dist.new_group(range(W))
    calls = {
        "all_reduce": lambda: dist.all_reduce(part, group=group),
        "all_reduce avg": lambda: dist.all_reduce(part, "avg", group=group),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([part, whole], group=group),
        "reduce": lambda: dist.reduce(part, 0, "max", group=group),
        "reduce_scatter": lambda: dist.reduce_scatter(part, parts, group=group),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, whole, "max", group=group),
        "all_gather": lambda: dist.all_gather(parts, part, group=group),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "all_to_all": lambda: dist.all_to_all([one.clone() for one in parts], parts, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(whole, whole.clone(), group=group),
        "broadcast": lambda: dist.broadcast(part, 0, group=group),
        "gather": lambda: dist.gather(part, parts if rank == 0 else None, 0, group=group),
        "scatter": lambda: dist.scatter(part, parts if rank == 0 else None, 0, group=group),
        "barrier": lambda: dist.barrier(group=group),
    }
    found = {}
    for name, call in calls.items():
        rounds = []
        for _ in range(3):  # the first one on the checked path
            ring.refresh()
            before = [ring.count(lane) for lane in (0, 1)]
            call()
            ring.refresh()
            made = [one for lane in (0, 1) for one in ring.calls(lane) if one.number > before[lane]]
            rounds.append([(one.operation, one.op, one.dtype, one.elements, one.root) for one in made])
        found[name] = rounds
    ring.close()
    return found


@pytest.mark.parametrize("W", [1, 2, 3])
def test_a_call_is_recorded_alike_on_both_paths(pools: Pools, W: int) -> None:
    """Ranks need not take the same path, and are compared by their records."""
    for of_rank in pools(W).run(run_recorded):
        for name, (first, *others) in of_rank.items():
            assert all(one == first for one in others), (name, first, others)


@pytest.mark.parametrize("W", [1, 2, 3])
def test_lists_in_one_memory(pools: Pools, W: int) -> None:
    pools(W).run(run_chunks)


def run_graphs_and_scalars() -> None:
    rank = dist.get_rank()
    needed = torch.full((4,), rank + 1.0, requires_grad=True)
    for _ in range(30):
        found = torch.zeros(8)
        dist.all_gather_into_tensor(found, needed)
        assert found.tolist() == [1.0] * 4 + [2.0] * 4
        one, rows = torch.zeros(()), [1, 0] if rank == 0 else [0, 1]
        dist.all_to_all_single(one, torch.full((1,), rank + 5.0), rows, rows)  # a scalar has no rows
        assert one.item() == rank + 5.0
        one = torch.zeros(1)
        dist.all_to_all_single(one, torch.full((1,), rank + 5.0), rows, rows)
        assert one.item() == rank + 5.0
        chunks = list(torch.zeros(6).chunk(2))
        weights = torch.ones(3, requires_grad=True)
        loss = (chunks[1] * weights).sum()
        dist.all_to_all(chunks, [torch.ones(3)] * 2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # type: ignore[no-untyped-call]


def test_gradients_and_scalars(pools: Pools) -> None:
    pools(2).run(run_graphs_and_scalars)


def run_nothing_to_exchange() -> None:
    """Ranks need not say in the same way that they have nothing for each other."""
    rank = dist.get_rank()
    dist.all_to_all_single(torch.zeros(2), torch.zeros(2))
    for sizes in ([0, 0], None):
        for _ in range(3):
            if rank == 0:
                dist.all_to_all_single(torch.zeros(0), torch.zeros(0))
            else:
                dist.all_to_all_single(torch.zeros(0), torch.zeros(4)[:0:2], sizes, sizes)
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == 2.0


def test_nothing_to_exchange(pools: Pools) -> None:
    pools(2).run(run_nothing_to_exchange)


def run_late() -> None:
    """A rank that is late has the others wait for their memory, whatever else it is in."""
    rank = dist.get_rank()
    for step in range(6):
        root, late = step % 2, step // 2 % 2
        for size in (2, 50_000):
            mine, parts = torch.full((size,), rank + 1.0), [torch.empty(size), torch.empty(size)]
            given = parts if rank == root else None

            def scatter() -> None:
                dist.scatter(mine, None if given is None else [torch.full((size,), 3.0), mine + 3.0], root)  # noqa: B023

            for call, expected in (
                (lambda: dist.all_gather(parts, mine), [1.0, 2.0]),  # noqa: B023
                (lambda: dist.gather(mine, given, root), [1.0, 2.0] if rank == root else None),  # noqa: B023
                (lambda: dist.all_to_all(parts, [mine, mine + 10.0]), [1.0 + 10 * rank, 2.0 + 10 * rank]),  # noqa: B023
                (lambda: dist.reduce_scatter(parts[0], [mine, mine + 1.0]), [3.0 + 2 * rank, None]),  # noqa: B023
                (lambda: dist.reduce(mine, root), None),  # noqa: B023
                (scatter, None),
            ):
                for part in parts:
                    part.fill_(-1.0)
                if rank == late:
                    time.sleep(0.1)
                call()
                garbage = torch.full((size,), 77.0)  # where memory was let go too early
                for part, value in zip(parts, expected or [-1.0, -1.0], strict=True):
                    assert value is None or torch.equal(part, torch.full((size,), value))
                del garbage
            assert torch.equal(mine, torch.full((size,), 3.0 + 3 * rank))


def test_late_ranks(pools: Pools) -> None:
    pools(2).run(run_late)


def run_list_refusals() -> list[str]:
    rank = dist.get_rank()
    found: list[str] = []
    attempt = partial(refused, found)

    for _ in range(2):
        two, shared = [torch.ones(2), torch.ones(2)], torch.empty(3)
        dist.reduce_scatter(torch.empty(2), two)
        dist.all_to_all([torch.empty(2), torch.empty(2)], two)
        dist.all_to_all_single(torch.empty(3), torch.ones(3), [1 + rank, 2 - rank], [1 + rank, 2 - rank])
        attempt(lambda: dist.reduce_scatter(torch.empty(4)[::2], two))  # noqa: B023
        attempt(lambda: dist.reduce_scatter(torch.empty(3), two))  # noqa: B023
        attempt(lambda: dist.reduce_scatter(torch.empty(2), two[:1]))  # noqa: B023
        attempt(lambda: dist.reduce_scatter(torch.empty(2), two, 0))  # noqa: B023
        attempt(lambda: dist.reduce_scatter(torch.empty(2, dtype=torch.int32), two))  # noqa: B023
        attempt(lambda: dist.all_to_all([shared[:2], shared[1:]], two))  # noqa: B023
        attempt(lambda: dist.all_to_all([torch.empty(3), torch.empty(3)], two))  # noqa: B023
        attempt(lambda: dist.all_to_all(two, []))  # noqa: B023
        attempt(lambda: dist.all_to_all([torch.empty(2), torch.empty(2, dtype=torch.int32)], two))  # noqa: B023
        for rows_out, rows_in in (
            ([1, 1], [1, 2]),
            ([4, -1], [4, -1]),
            ([1, 2], [2, 1]),
            ([1, 1, 1], [1, 1, 1]),
            ([1.0, 2.0], [1.0, 2.0]),
        ):
            attempt(lambda: dist.all_to_all_single(torch.empty(3), torch.ones(3), rows_out, rows_in))  # noqa: B023
        attempt(lambda: dist.all_to_all_single(torch.empty(3, 2), torch.ones(3), [1, 2], [1, 2]))
    return found


def test_refusals_of_lists_stay(pools: Pools) -> None:
    for found in pools(2).run(run_list_refusals):
        assert len(found) == 30
        assert found[:15] == found[15:]


def run_refusals() -> list[str]:
    """What the first call refuses, the second does as well."""
    rank, found = dist.get_rank(), []

    def attempt(call: Callable[[], Any]) -> None:
        try:
            call()
        except dist.CommError as error:
            found.append(f"{type(error).__name__}: {error}")

    for _ in range(2):
        dist.all_gather_into_tensor(torch.empty(4), torch.ones(2))
        dist.all_to_all_single(torch.empty(4), torch.ones(4))
        dist.broadcast(torch.ones(2), 0)
        attempt(lambda: dist.all_gather_into_tensor(torch.empty(5), torch.ones(2)))
        attempt(lambda: dist.all_gather_into_tensor(torch.empty(4, dtype=torch.int32), torch.ones(2)))
        attempt(lambda: dist.all_gather_into_tensor(torch.empty(8)[::2], torch.ones(2)))
        attempt(lambda: dist.all_to_all_single(torch.empty(3), torch.ones(3)))
        attempt(lambda: dist.all_to_all_single(torch.empty(2, 2), torch.ones(4)))
        attempt(lambda: dist.broadcast(torch.ones(4)[::2], 1 - rank))
        attempt(lambda: dist.broadcast(torch.ones(2), True))
        attempt(lambda: dist.broadcast(torch.ones(2), 7))
        dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2))
        shared = torch.empty(3)
        attempt(lambda: dist.all_gather([shared[:2], shared[1:]], torch.ones(2)))  # noqa: B023
        attempt(lambda: dist.all_gather([torch.empty(2)], torch.ones(2)))
        attempt(lambda: dist.all_gather([torch.empty(2), torch.empty(2, dtype=torch.int32)], torch.ones(2)))
        attempt(lambda: dist.send(torch.ones(2), rank))
        attempt(lambda: dist.recv(torch.ones(2), rank))
        attempt(lambda: dist.recv(torch.ones(4)[::2], 1 - rank))
        attempt(lambda: dist.send(torch.ones(2), True))
        attempt(lambda: dist.send(torch.ones(2), 1 - rank, None, False))
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(1)])  # two elements, and no place for them
        attempt(lambda: dist.broadcast(nested, 0))  # noqa: B023
        attempt(lambda: dist.all_gather_into_tensor(torch.empty(4), nested))  # noqa: B023
        attempt(lambda: dist.all_to_all_single(nested, torch.ones(2)))  # noqa: B023
        attempt(lambda: dist.all_gather([torch.empty(2), nested], torch.ones(2)))  # noqa: B023
    return found


def test_refusals_stay(pools: Pools) -> None:
    for found in pools(2).run(run_refusals):
        assert len(found) == 40
        assert found[:20] == found[20:]


def run_awkward() -> None:
    """Take the checked path for tensors that are not plain, with the right results."""
    rank = dist.get_rank()
    for _ in range(3):
        weights = torch.nn.Parameter(torch.zeros(4))
        with torch.no_grad():
            dist.all_gather_into_tensor(weights, torch.full((2,), rank + 1.0))
        assert weights.tolist() == [1.0, 1.0, 2.0, 2.0]
        with torch.inference_mode():
            made_there = torch.zeros(4)
        dist.all_gather_into_tensor(made_there, torch.full((2,), rank + 1.0))
        assert made_there.tolist() == [1.0, 1.0, 2.0, 2.0]
        shared = torch.tensor([5.0 + rank, 6.0 + rank, 0.0, 0.0])
        dist.all_gather_into_tensor(shared, shared[:2])  # on rank 1 it is overwritten while it is read
        assert shared.tolist() == [5.0, 6.0, 6.0, 7.0]
        negated = torch.tensor([1 + 2j]).conj().imag
        received = torch.empty(2)
        dist.all_gather_into_tensor(received, negated)
        assert received.tolist() == [-2.0, -2.0]
        exchanged = torch.tensor([10.0 * rank, 10.0 * rank + 1])
        dist.all_to_all_single(exchanged, exchanged)
        assert exchanged.tolist() == [float(rank), 10.0 + rank]


def test_awkward_tensors(pools: Pools) -> None:
    pools(2).run(run_awkward)


def made_in_inference(count: int) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [torch.zeros(3) for _ in range(count)]


def run_lists_of_inference_mode() -> None:
    """Lists of tensors that torch refuses to write outside of inference mode."""
    rank, W = dist.get_rank(), dist.get_world_size()
    own, every = torch.full((3,), rank + 1.0), [torch.full((3,), of + 1.0) for of in range(W)]
    for step in range(3):
        for async_op in (False, True):
            gathered, exchanged, rooted = (made_in_inference(W) for _ in range(3))
            works = [
                dist.all_gather(gathered, own, async_op=async_op),
                dist.all_to_all(exchanged, [own] * W, async_op=async_op),
                dist.gather(own, rooted if rank == 0 else None, async_op=async_op),
            ]
            if async_op:
                for work in works:
                    work.wait()
            for name, found in (("all_gather", gathered), ("all_to_all", exchanged), ("gather", rooted)):
                if rank == 0 or name != "gather":
                    assert all(map(torch.equal, found, every)), (step, async_op, name, found)


@pytest.mark.parametrize("W", [1, 2])
def test_lists_of_inference_mode(pools: Pools, W: int) -> None:
    pools(W).run(run_lists_of_inference_mode)


@pytest.mark.parametrize("logged", [False, True], ids=["", "logged"])
@pytest.mark.parametrize("W", [1, 2])
def test_what_is_prepared_is_forgotten_with_its_group(pools: Pools, W: int, logged: bool) -> None:
    pools(W).run(run_forgetting_logged if logged else run_forgetting)


def run_forgetting_logged() -> None:
    dist.configure(enabled=True)
    try:
        run_forgetting()
    finally:
        dist.configure(enabled=False)


def run_forgetting() -> None:
    for _ in range(3):
        group = dist.new_group(range(dist.get_world_size()))
        for _ in range(2):
            tensor = torch.ones(1)
            dist.broadcast(tensor, 0, group)
            dist.reduce(tensor, 0, group=group)
            dist.barrier(group)
        dist.destroy_process_group(group)
        with pytest.raises(dist.NotInitializedError):
            dist.broadcast(torch.ones(1), 0, group)
        with pytest.raises(dist.NotInitializedError):
            dist.reduce(torch.ones(1), 0, group=group)
        with pytest.raises(dist.NotInitializedError):
            dist.barrier(group)


def run_reductions_of_saved_tensors() -> None:
    size = dist.get_world_size()
    for op in ("sum", "max"):
        for _ in range(2):
            weight, saved = torch.ones(4, requires_grad=True), torch.full((4,), 2.0)
            loss = (weight * saved).sum()
            dist.reduce_scatter_tensor(saved, torch.zeros(4 * size), op)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()  # type: ignore[no-untyped-call]
    with torch.inference_mode():
        output = torch.full((4,), 2.0)
        for _ in range(2):
            dist.reduce_scatter_tensor(output, torch.zeros(4 * size))
    assert output.tolist() == [0.0] * 4


@pytest.mark.skipif(os.environ.get("TESTS_BACKEND", "gloo") != "gloo", reason="is of what gloo does not reduce itself")
def test_autograd_refuses_what_a_reduce_scatter_has_overwritten(pools: Pools) -> None:
    """torch.distributed's own does on gloo, too; the gradient would be wrong silently."""
    pools(2).run(run_reductions_of_saved_tensors)
