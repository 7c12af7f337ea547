"""Calls within a coalescing block: the same results as one by one, in few messages."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch

import comm_orchestrator as dist
from comm_collectives.coalescing.collecting import CollectingCache
from comm_utils import kernels
from comm_utils.active import slot
from comm_utils.errors import ArgumentError
from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]

DTYPES = (torch.float32, torch.int64, torch.float16, torch.uint8, torch.float32)


def tensors(rank: int) -> list[torch.Tensor]:
    shapes: tuple[tuple[int, ...], ...] = ((5,), (2, 3), (1,), (0,), (4, 4))
    made = [torch.full(shape, float(rank + number), dtype=DTYPES[number]) for number, shape in enumerate(shapes)]
    return [*made, torch.full((4, 6), float(rank)).t(), torch.tensor(rank + 1.0)]


def every_kind(async_op: bool) -> list[tuple[str, int]]:
    rank, W = dist.get_rank(), dist.get_world_size()
    reduced, largest, sources = tensors(rank), tensors(rank), tensors(rank)
    gathered = [torch.empty(W * one.numel(), dtype=one.dtype) for one in sources]
    listed = [[torch.empty_like(one) for _ in range(W)] for one in sources]
    whole = [torch.stack([one + part for part in range(W)]) for one in sources]
    scattered = [torch.empty(one.shape, dtype=one.dtype) for one in sources]
    dist.configure(enabled=True)
    dist.reset_log()
    with dist.coalescing(async_op) as handle:
        for number, one in enumerate(sources):
            assert dist.all_reduce(reduced[number], async_op=True) is handle
            dist.all_reduce(largest[number], "max")
            dist.all_gather_into_tensor(gathered[number], one)
            dist.all_gather(listed[number], one)
            dist.reduce_scatter_tensor(scattered[number], whole[number])
        with pytest.raises(ArgumentError, match="wait after it"):
            handle.wait()
        assert not handle.is_completed()
    assert handle.wait()
    assert handle.is_completed()
    assert handle.exception() is None
    messages = [(row.name, row.calls) for row in dist.log_rows()]
    dist.configure(enabled=False)
    everyones = [tensors(other) for other in range(W)]
    for number, one in enumerate(sources):
        total = sum(everyones[other][number].double() for other in range(W))
        assert torch.equal(one, everyones[rank][number])
        assert torch.equal(reduced[number].double(), total)
        assert torch.equal(largest[number], everyones[W - 1][number])
        assert torch.equal(gathered[number].view(W, *one.shape), torch.stack([every[number] for every in everyones]))
        for other in range(W):
            assert torch.equal(listed[number][other], everyones[other][number])
        assert torch.equal(scattered[number].double(), total + rank * W)
    return messages


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_are_those_of_single_calls(pools: Pools, world_size: int, async_op: bool) -> None:
    for messages in pools(world_size).run(every_kind, async_op):
        # 35 calls, of tensors of four dtypes.
        assert sum(calls for _, calls in messages) <= 20, messages


def reduce_both(one: torch.Tensor, other: torch.Tensor) -> None:
    with dist.coalescing():
        dist.all_reduce(one)
        dist.all_reduce(other)


def with_a_negated_view() -> None:
    with pytest.raises(ArgumentError, match=r"lazily negated view.*call 2 within coalescing"):
        reduce_both(torch.ones(5), torch._neg_view(torch.ones(5)))


def test_a_negated_view_is_refused_as_in_a_single_call(pools: Pools) -> None:
    pools(2).run(with_a_negated_view)


def in_order() -> list[float]:
    tensor = torch.ones(4)
    with dist.coalescing():
        dist.all_reduce(tensor)
        dist.all_reduce(tensor[:2])
    return tensor.tolist()


def test_calls_on_the_same_memory_keep_their_order(pools: Pools) -> None:
    assert pools(2).run(in_order) == [[4.0, 4.0, 2.0, 2.0]] * 2


def values(tensors: list[torch.Tensor]) -> list[float]:
    return [value for one in tensors for value in sorted({value.real for value in one.detach().flatten().tolist()})]


def started_in_order(dtype: torch.dtype, size: int) -> list[float]:
    rank, W = dist.get_rank(), dist.get_world_size()
    twice, once = (torch.full((size,), rank + 1, dtype=dtype) for _ in range(2))
    gathered = torch.zeros(W * size, dtype=dtype)
    with dist.coalescing(async_op=True) as handle:
        dist.all_reduce(twice)
        dist.all_reduce(twice)
        dist.all_reduce(once)
        dist.all_gather_into_tensor(gathered, once)
    handle.wait()
    return values([twice, once, gathered])


@pytest.mark.parametrize(("dtype", "size"), [(torch.int16, 4), (torch.float32, 1 << 20)])
def test_started_calls_on_the_same_memory_keep_their_order(dtype: torch.dtype, size: int, pools: Pools) -> None:
    assert pools(2).run(started_in_order, dtype, size) == [[6.0, 3.0, 3.0]] * 2  # int16 travels in another dtype


class Kind(torch.Tensor):
    """A kind of tensor of the program's own."""


class Picky(Kind):
    """One that refuses functions of torch which it does not know."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.cat, torch.split):
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


UNUSUAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "strided": lambda one: torch.stack([one, one], -1)[..., 0],
    "expanded": lambda one: one[:1].expand(one.shape),
    "a parameter": torch.nn.Parameter,
    "requires a gradient": lambda one: one.clone().requires_grad_(),
    "a kind of its own": lambda one: one.as_subclass(Kind),
    "a picky kind": lambda one: one.as_subclass(Picky),
    "negated": lambda one: torch._neg_view(-one),
    "conjugated": lambda one: one.conj().resolve_conj().conj(),
}
WRITTEN = ("a parameter", "requires a gradient", "a kind of its own", "a picky kind")


def unusual_on_one_rank(unusual: str, async_op: bool) -> list[list[float]]:
    """Make the same calls as the other rank, of which one gets other tensors on one rank."""
    rank, W, found = dist.get_rank(), dist.get_world_size(), []
    dtype = torch.complex64 if unusual == "conjugated" else torch.float32
    for who in range(W):
        change = UNUSUAL[unusual] if rank == who else torch.clone
        inputs = [torch.full((2 * W,), number + 1.0, dtype=dtype) for number in range(3)]
        outputs = [torch.zeros(2, dtype=dtype) for _ in range(3)]
        gathered = [torch.zeros(2 * W * W, dtype=dtype) for _ in range(3)]
        listed = [[torch.zeros(2 * W, dtype=dtype) for _ in range(W)] for _ in range(3)]
        reduced = [one.clone() for one in inputs]
        inputs[1] = change(inputs[1])
        if unusual in WRITTEN:
            reduced[1], outputs[1], gathered[1] = map(change, (reduced[1], outputs[1], gathered[1]))
            listed[1] = [change(one) for one in listed[1]]
        with torch.no_grad(), dist.coalescing(async_op) as handle:
            for number, one in enumerate(inputs):
                dist.reduce_scatter_tensor(outputs[number], one)
                dist.all_gather_into_tensor(gathered[number], one)
                dist.all_gather(listed[number], one)
                dist.all_reduce(reduced[number])
        handle.wait()
        for some in (outputs, gathered, [one[-1] for one in listed], reduced):
            found.append(values(some))
        others = [torch.ones(2, dtype=dtype) for dtype in (torch.int64, torch.float64, torch.int64)]
        with torch.no_grad(), dist.coalescing(async_op) as handle:  # which native code packs where all are plain
            for pair in zip(reduced, others, strict=True):
                for one in pair:
                    dist.all_reduce(one)
        handle.wait()
        found.append(values(reduced + others))
    return found


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("unusual", UNUSUAL)
def test_ranks_may_have_tensors_of_other_kinds(unusual: str, async_op: bool, pools: Pools) -> None:
    one, two, four = ([float(factor * number) for number in (1, 2, 3)] for factor in (1, 2, 4))
    expected = [two, one, one, two, [*four, 2.0, 2.0, 2.0]]
    assert pools(2).run(unusual_on_one_rank, unusual, async_op) == [expected * 2] * 2


def written_within_an_input() -> list[float]:
    rank, W = dist.get_rank(), dist.get_world_size()
    memory = torch.zeros(2 * W, 3)
    source = memory[:, 0] if rank == 0 else torch.zeros(2 * W)
    source.fill_(rank + 1.0)
    reduced = [torch.zeros(2) for _ in range(2)]
    gap = memory[0, 1:] if rank == 0 else torch.zeros(2)
    with dist.coalescing():
        for one in reduced:
            dist.reduce_scatter_tensor(one, source)
        dist.all_reduce(gap.fill_(1.0))
    assert source.tolist() == [rank + 1.0] * (2 * W)
    return values([*reduced, gap])


def test_what_lies_in_the_gaps_of_an_input_is_not_shared(pools: Pools) -> None:
    assert pools(2).run(written_within_an_input) == [[3.0, 3.0, 2.0]] * 2


def outside_of_a_group() -> list[float]:
    member = dist.get_rank() == 0
    group = dist.new_group([0])
    some, parts = [torch.ones(3) for _ in range(2)], [torch.zeros(3) for _ in range(2)]
    with dist.coalescing():
        for one in some:
            dist.all_reduce(one)
        for one in parts:
            given = (one, torch.ones(3)) if member else (None, None)
            dist.reduce_scatter_tensor(*given, group=group)  # type: ignore[arg-type]
    return [one[0].item() for one in (*some, *parts)]


def test_a_rank_outside_of_a_group_may_give_anything(pools: Pools) -> None:
    assert pools(2).run(outside_of_a_group) == [[2.0, 2.0, 1.0, 1.0], [2.0, 2.0, 0.0, 0.0]]


def refusals() -> list[str]:
    W, found = dist.get_world_size(), []
    tensor, sparse = torch.ones(4), torch.ones(2, 2).to_sparse_csr()

    def nested() -> None:
        with dist.coalescing():
            pass

    bodies: list[Callable[[], Any]] = [
        lambda: dist.broadcast(tensor, 0),
        lambda: dist.barrier(),
        lambda: dist.all_reduce(tensor, timeout=3),
        lambda: dist.all_reduce(tensor, compression="int8"),
        nested,
        lambda: (dist.all_reduce(torch.ones(3)), dist.all_reduce("tensor")),  # type: ignore[call-overload]
        lambda: (dist.all_reduce(torch.ones(3)), dist.all_reduce(tensor, "most")),
        lambda: (dist.all_reduce(torch.ones(3), "most"), dist.all_reduce(tensor, "most")),
        lambda: dist.all_gather_into_tensor(torch.ones(1), torch.ones(4)),
        lambda: dist.reduce_scatter_tensor(torch.ones(4), torch.ones(4 * W + 1)),
        lambda: dist.all_reduce(sparse),
        lambda: dist.all_gather(tensor),
    ]
    for body in bodies:
        with pytest.raises(ArgumentError) as caught, dist.coalescing():
            body()
        found.append(str(caught.value))
    block = dist.coalescing()
    with block:
        pass
    with pytest.raises(ArgumentError) as caught, block:
        pass
    found.append(str(caught.value))
    with pytest.raises(ZeroDivisionError), dist.coalescing():
        print(dist.all_reduce(tensor), 1 / 0)
    assert tensor.tolist() == [1.0] * 4
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(W)] * 4
    return found


def test_refusals_name_the_call_and_leave_the_group_usable(pools: Pools) -> None:
    expected = [
        "broadcast: got called within coalescing(), which collects all_reduce, all_gather, all_gather_into_tensor, ",
        "barrier: got called within coalescing()",
        "all_reduce: got called within coalescing()",
        "all_reduce: got called within coalescing()",
        "coalescing: got called within another coalescing()",
        "all_reduce: tensor: got 'tensor' of type str; expected a tensor (call 2 within coalescing())",
        "all_reduce: op: got 'most'",
        "all_reduce: op: got 'most'",
        "all_gather_into_tensor: output_tensor: got ",
        "reduce_scatter_tensor: input: got ",
        "all_reduce: tensor: got ",
        "all_gather: got no outputs within coalescing(), at whose end they are filled",
        "coalescing: got entered a second time",
    ]
    for found in pools(2).run(refusals):
        for text, begin in zip(found, expected, strict=True):
            assert text.startswith(begin), text


def beside_another_thread() -> bool:
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    inside, outside = torch.ones(4), torch.ones(4)
    with dist.coalescing():
        dist.all_reduce(inside)
        thread = threading.Thread(
            target=lambda: (dist.broadcast(outside, 0, group), dist.all_reduce(outside, group=group))
        )
        thread.start()
        thread.join(30)
        other = bool((outside == 2).all() and (inside == 1).all())
        # A kind of call that the other thread has made is collected from this one all the same.
        late = torch.ones(4)
        dist.all_reduce(late, group=group)
        other = other and bool((late == 1).all())
    return other and bool((inside == 2).all() and (late == 2).all()) and rank >= 0


def nothing(*_: object) -> None: ...


def in_python(body: Callable[..., Any], *args: Any) -> Any:
    """Call ``body`` as where no package has native code for it."""
    with ExitStack() as stack:
        for name in ("plain_batch", "collecting_paths", "collecting_path"):
            stack.enter_context(mock.patch.object(kernels, name, new=nothing))
        return body(*args)


@pytest.mark.parametrize("native", [True, False])
def test_other_threads_go_on_as_usual(pools: Pools, native: bool) -> None:
    call = [beside_another_thread] if native else [in_python, beside_another_thread]
    assert pools(2).run(*call) == [True, True]


def reductions_alone(async_op: bool) -> list[list[float]]:
    """Two ops in turn, two groups and three dtypes; return what the tensors hold."""
    rank, group = dist.get_rank(), dist.new_group(list(range(dist.get_world_size())))
    tensors = [torch.full((5,), number + rank).to(DTYPES[number % 3]) for number in range(20)]
    with dist.coalescing(async_op) as handle:
        for number, one in enumerate(tensors):
            dist.all_reduce(one, "max" if number % 2 else "sum", group if number % 4 < 2 else None)
    handle.wait()
    return [one.tolist() for one in tensors]


@pytest.mark.parametrize("async_op", [False, True])
def test_python_and_native_code_have_the_same_results(pools: Pools, async_op: bool) -> None:
    expected = [[float(2 * number + 1 if number % 2 == 0 else number + 1)] * 5 for number in range(20)]
    for found in (pools(2).run(reductions_alone, async_op), pools(2).run(in_python, reductions_alone, async_op)):
        assert found == [expected, expected]
    assert pools(2).run(every_kind, async_op) == pools(2).run(in_python, every_kind, async_op)


def what_collects() -> str:
    with dist.coalescing():
        return type(slot.fast_paths.synchronous).__module__


def test_native_code_collects_where_it_is_installed(pools: Pools) -> None:
    assert pools(1).run(what_collects) == ["comm_backend_ccl._shared_memory"]
    assert pools(1).run(in_python, what_collects) == ["comm_collectives.coalescing.collecting"]


def in_two_threads() -> list[float]:
    """Two blocks, of which the first one ends before the second one does."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    tensors = [torch.ones(3) for _ in range(3)]
    is_open, may_close = threading.Event(), threading.Event()

    def second() -> None:
        with dist.coalescing():
            dist.all_reduce(tensors[1], group=groups[1])
            is_open.set()
            may_close.wait(30)

    thread = threading.Thread(target=second)
    with dist.coalescing():
        dist.all_reduce(tensors[0], group=groups[0])
        thread.start()
        is_open.wait(30)
        dist.all_reduce(tensors[0].view(-1)[:0], group=groups[0])
    assert (tensors[1] == 1).all()
    dist.all_reduce(tensors[2], group=groups[0])  # of a thread that collects no more
    assert (tensors[2] == 2).all()
    may_close.set()
    thread.join(30)
    assert not isinstance(slot.fast_paths, CollectingCache)
    dist.all_reduce(tensors[2])
    return [one[0].item() for one in tensors]


@pytest.mark.parametrize("native", [True, False])
def test_blocks_in_two_threads(pools: Pools, native: bool) -> None:
    assert pools(2).run(*([] if native else [in_python]), in_two_threads) == [[2.0, 2.0, 4.0]] * 2


def with_a_setting_within() -> list[bool]:
    exact, late = torch.linspace(-1, 1, 10_000), torch.linspace(-1, 1, 10_000)
    dist.all_reduce(exact.clone())  # has a fast path
    try:
        with dist.coalescing():
            dist.all_reduce(exact)
            dist.set_compression("int4")
        dist.all_reduce(late)
    finally:
        dist.set_compression(None)
    return [torch.equal(one, 2 * torch.linspace(-1, 1, 10_000)) for one in (exact, late)]


@pytest.mark.parametrize("native", [True, False])
def test_a_setting_within_a_block_holds(pools: Pools, native: bool) -> None:
    for _, late in pools(2).run(*([] if native else [in_python]), with_a_setting_within):
        assert not late


def changed_before_the_wait() -> list[list[float]]:
    tensors = [torch.ones(3) for _ in range(4)]
    with dist.coalescing(async_op=True) as handle:
        for one in tensors:
            dist.all_reduce(one)
    kept = tensors[1].untyped_storage()  # what a result could be written to by mistake
    tensors[1].set_(torch.zeros(3))  # type: ignore[call-overload]
    handle.wait()
    assert kept.nbytes() == 12
    return [one.tolist() for one in tensors]


def test_a_tensor_that_has_other_memory_at_the_wait_gets_the_result_there(pools: Pools) -> None:
    assert pools(2).run(changed_before_the_wait) == [[[2.0] * 3] * 4] * 2


def wrong_after_other_kinds() -> str:
    def body() -> None:
        dist.all_reduce(torch.ones(2))
        dist.all_gather_into_tensor(torch.ones(2 * dist.get_world_size()), torch.ones(2))
        dist.all_reduce("tensor")  # type: ignore[call-overload]

    with pytest.raises(ArgumentError) as caught, dist.coalescing():
        body()
    return str(caught.value)


def test_the_number_of_a_wrong_call_counts_all_kinds(pools: Pools) -> None:
    for text in pools(2).run(wrong_after_other_kinds):
        assert text.endswith("(call 3 within coalescing())")


def left_by_a_block() -> bool:
    gc.collect()
    gc.disable()
    try:
        with dist.coalescing():
            dist.all_reduce(torch.ones(3))
            dist.all_reduce(torch.ones(3), async_op=True)
            assert any(type(one) is CollectingCache for one in gc.get_objects())
        return not any(type(one) is CollectingCache for one in gc.get_objects())
    finally:
        gc.enable()


@pytest.mark.parametrize("native", [True, False])
def test_a_block_leaves_nothing_in_a_cycle(pools: Pools, native: bool) -> None:
    assert pools(2).run(*([] if native else [in_python]), left_by_a_block) == [True, True]


WRONG_LAST: dict[str, Callable[[], object]] = {
    "strided": lambda: dist.all_reduce(torch.ones(8)[::2]),
    "another kind": lambda: dist.all_gather_into_tensor(torch.ones(1), torch.ones(4)),
    "a list that is too short": lambda: dist.all_gather([torch.ones(4)], torch.ones(4)),
    "parts that do not fit": lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(5)),
    "an op that the dtype lacks": lambda: dist.all_reduce(torch.ones(4, dtype=torch.int64), "avg"),
    "an op that is none": lambda: dist.all_reduce(torch.ones(4), "most"),
    "no tensor": lambda: dist.all_reduce(4),  # type: ignore[call-overload]
}


def wrong_on_one_rank(name: str, strided: bool) -> tuple[str, list[float]]:
    """Rank 0 makes a mistake, and then the right calls, which are those that the others have made already."""
    found = ""
    calls = [torch.ones(6)[::3] if strided else torch.ones(2), torch.ones(3)]
    reduced = [one.contiguous() for one in calls]
    if dist.get_rank() == 0:
        with pytest.raises(ArgumentError) as caught, dist.coalescing():  # noqa: PT012
            dist.all_reduce(reduced[0])
            dist.all_reduce(reduced[1])
            if strided:  # which no native code packs
                dist.all_gather_into_tensor(torch.zeros(2 * dist.get_world_size()), calls[0])
            WRONG_LAST[name]()
        found = str(caught.value)
        assert [one.unique().tolist() for one in reduced] == [[1.0], [1.0]]
    with dist.coalescing():
        for one in reduced:
            dist.all_reduce(one)
    dist.barrier()
    return found, reduced[1].tolist()


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", WRONG_LAST)
def test_a_wrong_call_is_found_before_anything_is_sent(name: str, strided: bool, pools: Pools) -> None:
    (text, first), (_, second) = pools(2).run(wrong_on_one_rank, name, strided)
    assert text.endswith(f"(call {4 if strided else 3} within coalescing())"), text
    assert first == second == [2.0] * 3


def uneven_lists() -> list[list[int]]:
    rank = dist.get_rank()
    outputs = [[torch.zeros(3, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)] for _ in range(2)]
    with dist.coalescing():
        for one in outputs:
            dist.all_gather(one, torch.full((3 + 2 * rank,), rank + 1))
    return [torch.cat(one).tolist() for one in outputs]


def test_ranks_may_gather_tensors_of_different_sizes(pools: Pools) -> None:
    assert pools(2).run(uneven_lists) == [[[1] * 3 + [2] * 5] * 2] * 2


def versions(together: str) -> list[Any]:
    kinds = (torch.float32, torch.float32, torch.float64)
    found: list[Any] = []
    for _ in range(3):  # on the checked path, and then on fast ones
        some = [torch.ones(size, dtype=dtype) for size, dtype in zip((3, 4, 2), kinds, strict=True)]
        weight = torch.ones(3, requires_grad=True)
        loss = (weight * some[0]).sum()
        if together == "a list":
            dist.all_reduce_coalesced(some)
        else:
            with dist.coalescing():
                for one in some:
                    dist.all_reduce(one)
        try:
            loss.backward()
        except RuntimeError as error:
            found.append("modified by an inplace operation" in str(error))
        else:
            found.append(weight.grad.tolist() if weight.grad is not None else None)
        found.append([one.tolist() for one in some])
    return found


@pytest.mark.parametrize("together", ["a list", "a block"])
def test_autograd_refuses_values_that_were_overwritten(together: str, pools: Pools) -> None:
    sums = [[2.0] * 3, [2.0] * 4, [2.0] * 2]
    assert pools(2).run(versions, together) == [[True, sums] * 3] * 2


def lists_of_both_kinds() -> list[list[float]]:
    found = []
    for turn in range(4):
        plain = [torch.ones(2), torch.ones(3, dtype=torch.int64), torch.ones(2, 3)]
        if turn % 2 == dist.get_rank():  # not plain here, and plain on the other rank
            plain[2] = torch.ones(3, 2).t()
        given = tuple(plain) if turn == 3 else plain
        dist.all_reduce_coalesced(given)
        found.append([float(value) for one in given for value in one.flatten().tolist()])
    large = [torch.ones(3 << 20), torch.ones(2 << 20)]  # copied by torch
    for _ in range(2):
        dist.all_reduce_coalesced(large, "avg")
    found.append([float(one.min() + one.max()) for one in large])
    return found


def test_lists_of_plain_tensors_meet_lists_of_others(pools: Pools) -> None:
    assert pools(2).run(lists_of_both_kinds) == [[*([[2.0] * 11] * 4), [2.0, 2.0]]] * 2


# --- with compression by default


def run_compressed() -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    dist.set_compression(dist.Compression("int8", min_size_bytes=1024))
    drawn = [torch.randn(4096, generator=torch.Generator().manual_seed(10 * rank + one)) for one in range(4)]
    exact = sum(
        torch.stack([torch.randn(4096, generator=torch.Generator().manual_seed(10 * other + one)) for one in range(4)])
        for other in range(W)
    )
    for with_grad in (False, True):
        for async_op in (False, True):
            tensors = [
                one.clone().requires_grad_(with_grad and rank == W - 1 and not number)
                for number, one in enumerate(drawn)
            ]
            with torch.no_grad(), dist.coalescing(async_op=async_op) as block:
                for one in tensors:
                    dist.all_reduce(one)
            if async_op:
                block.wait()
            lost = (torch.stack([one.detach() for one in tensors]) - exact).abs().max().item()
            assert (0 < lost < 0.2) == (W > 1), (with_grad, async_op, lost)
    dist.set_compression(None)
    tensors = [one.clone() for one in drawn]
    with dist.coalescing():
        for one in tensors:
            dist.all_reduce(one)
    assert (torch.stack(tensors) - exact).abs().max() < 1e-4


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_block_is_compressed_by_default_whatever_its_tensors(pools: Pools, ranks: int) -> None:
    pools(ranks).run(run_compressed)
