"""What compressed calls have lost goes to the tensor and the group that it belongs to, or all ranks raise."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_utils.errors import ArgumentError, CollectiveMismatchError, CommError
from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]

COUNT = 1000


def on(library: str, body: Callable[..., Any], *args: Any) -> Any:
    """Call ``body`` on every rank of a world."""
    dist.init_distributed(library, verbose=False, timeout=60)
    try:
        return body(*args)
    finally:
        dist.destroy_process_group()


def blocks_of_other_tensors(method: str) -> list[float]:
    """Return the largest element of sums of zeros, in a block after one with other tensors of the same sizes."""
    dist.set_compression(dist.Compression(method, error_feedback=True))
    rank, W = dist.get_rank(), dist.get_world_size()
    found = []
    for scatters in (False, True):
        values, zeros = ([make(500) for _ in range(2)] for make in (torch.randn, torch.zeros))
        for some in (values, zeros):
            outputs = [torch.empty(500 // W) for _ in some]
            with dist.coalescing():
                for one, output in zip(some, outputs, strict=True):
                    if scatters:
                        dist.reduce_scatter_tensor(output, one, "avg")
                    else:
                        dist.all_reduce(one, "avg")
        found.append(max(float(one.abs().max()) for one in (outputs if scatters else zeros)))
    dist.set_compression(None)
    assert rank < W
    return found


@pytest.mark.parametrize("method", ["int4", "onebit", "topk", "powersgd"])
@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_a_block_adds_nothing_of_other_tensors(bare_pools: Pools, backend: str, method: str) -> None:
    assert bare_pools(2).run(on, backend, blocks_of_other_tensors, method) == [[0.0, 0.0]] * 2


def blocks_of_the_same_tensors(enabled: bool) -> float:
    """Return the error of the mean of many averages, each of a block with the same two tensors."""
    dist.set_compression(dist.Compression("int4", error_feedback=enabled))
    expected = [torch.linspace(-1, 1, 500), torch.linspace(0, 3, 300)]
    tensors, total = [torch.empty_like(one) for one in expected], torch.zeros(800)
    for _ in range(40):
        with dist.coalescing():
            for tensor, one in zip(tensors, expected, strict=True):
                dist.all_reduce(tensor.copy_(one), "avg")
        total += torch.cat(tensors)
    dist.set_compression(None)
    return float((total / 40 - torch.cat(expected)).abs().max())


def test_a_block_makes_up_for_what_it_lost_of_the_same_tensors(bare_pools: Pools) -> None:
    with_feedback = bare_pools(2).run(on, "gloo", blocks_of_the_same_tensors, True)
    without = bare_pools(2).run(on, "gloo", blocks_of_the_same_tensors, False)
    assert max(with_feedback) < 0.02 < min(without)


def on_a_mesh(named: bool) -> list[Any]:
    """Return how far replicas are apart after sums over rows and columns, and what a second group raises."""
    rank = dist.get_rank()
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    compression = dist.Compression("int4", error_feedback=True)
    tensor = torch.randn(4096, generator=torch.Generator().manual_seed(rank))
    dist.all_reduce(tensor, group=rows[rank // 2], compression=compression.of("w") if named else compression)
    message = ""
    try:
        dist.all_reduce(tensor, group=columns[rank % 2], compression=compression.of("w") if named else compression)
    except ArgumentError as error:
        message = str(error)
        dist.all_reduce(tensor, group=columns[rank % 2], compression=compression.of("w, by columns"))
    replicas = [torch.empty_like(tensor) for _ in range(4)]
    dist.all_gather(replicas, tensor)
    return [max(float((one - replicas[0]).abs().max()) for one in replicas), message]


def test_groups_have_states_of_their_own(bare_pools: Pools) -> None:
    assert bare_pools(4).run(on, "gloo", on_a_mesh, False) == [[0.0, ""]] * 4


def test_a_name_belongs_to_one_group(bare_pools: Pools) -> None:
    for rank, (distance, message) in enumerate(bare_pools(4).run(on, "gloo", on_a_mesh, True)):
        row, column = [0, 1] if rank < 2 else [2, 3], [rank % 2, rank % 2 + 2]
        assert message == (
            f"compression: the error feedback of 'w' is that of the group of ranks {row}; got a call on that of ranks "
            f"{column}: each group needs a name of its own"
        )
        assert distance == 0.0


def with_a_state_of_another_size(method: str, ranks: list[int], call: str) -> tuple[str, str, float]:
    compression = dist.Compression(method, error_feedback=True)
    if dist.get_rank() in ranks:
        other = torch.zeros(0, 0) if method == "powersgd" else torch.zeros(0)
        saved = {"local": torch.zeros(7), "other": other, "average": False}
        compression.load_state_dict({"compression": repr(compression), "tensors": {"w": saved}})
    W = dist.get_world_size()
    tensor, source = torch.ones(COUNT), torch.ones(W * COUNT)
    arguments = (tensor,) if call == "all_reduce" else (tensor, source)
    with pytest.raises(CommError) as caught:
        getattr(dist, call)(*arguments, compression=compression.of("w"))
    dist.all_reduce(tensor)  # nothing was sent: the group works
    return type(caught.value).__name__, str(caught.value), float(tensor[0])


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("int4", "all_reduce"),
        ("powersgd", "all_reduce"),
        ("topk", "reduce_scatter_tensor"),
        ("powersgd", "reduce_scatter_tensor"),
    ],
)
def test_a_state_that_one_rank_refuses_is_refused_by_all(bare_pools: Pools, method: str, call: str) -> None:
    count = COUNT if call == "all_reduce" else 2 * COUNT
    reason = f"the error feedback of 'w' is that of 7 elements; got a tensor of {count}"
    for kind, text, total in bare_pools(2).run(on, "gloo", with_a_state_of_another_size, method, [1], call):
        assert kind == CollectiveMismatchError.__name__
        assert f"rank 1: compression: {reason}" in text
        assert f"rank 0: {'all_reduce' if call == 'all_reduce' else 'reduce_scatter'} of" in text
        assert total == 2.0
    for kind, text, total in bare_pools(2).run(on, "gloo", with_a_state_of_another_size, method, [0, 1], call):
        assert (kind, total) == (ArgumentError.__name__, 2.0)
        assert text.startswith(f"compression: {reason}")


def some_keep_losses() -> str:
    compression = dist.Compression("int4", error_feedback=dist.get_rank() == 0)
    with pytest.raises(CollectiveMismatchError) as caught:
        dist.all_reduce(torch.ones(COUNT), compression=compression.of("w"))
    dist.all_gather_into_tensor(torch.empty(2 * COUNT), torch.ones(COUNT), compression=compression)  # which keeps none
    return str(caught.value)


def test_ranks_that_disagree_about_error_feedback(bare_pools: Pools) -> None:
    for text in bare_pools(2).run(on, "gloo", some_keep_losses):
        assert "rank 0: all_reduce of 1000 torch.float32 with int4(block_size=256)+error_feedback; rank 1:" in text
        assert text.endswith("with int4(block_size=256)")


def alone_with_what_two_lacked(method: str, call: str) -> float:
    compression = dist.Compression(method)
    other = torch.zeros(0, 0) if method == "powersgd" else torch.zeros(0)
    saved = {"local": torch.ones(COUNT), "other": other, "average": False}
    states = [{"compression": repr(compression), "tensors": {"w": saved}}] * 2
    compression.load_state_dict(dist.Compression.reshard(states, 1)[0])
    output, first = torch.zeros(COUNT), 0.0
    for step in range(2):
        output.zero_()
        if call == "all_reduce":
            dist.all_reduce(output, compression=compression.of("w"))
        else:
            dist.reduce_scatter_tensor(output, torch.zeros(COUNT), compression=compression.of("w"))
        if step == 0:
            first = float(output.sum())
    assert not output.any()
    return first


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("topk", "all_reduce"),
        ("powersgd", "all_reduce"),
        ("topk", "reduce_scatter_tensor"),
        ("powersgd", "reduce_scatter_tensor"),
    ],
)
def test_one_rank_adds_what_more_ranks_had_lost(bare_pools: Pools, method: str, call: str) -> None:
    assert bare_pools(1).run(on, "gloo", alone_with_what_two_lacked, method, call) == [2 * COUNT]


def saved_and_restored(
    saved: list[int], positions: list[int], used: list[int], method: str, call: str
) -> tuple[str, str, float]:
    """Return what a call on ranks ``used`` raises with the state of one on ranks ``saved``, and a call after it.

    Args:
        positions: by group rank of ``used``, whose state it loads, by group rank of ``saved``.
    """
    rank = dist.get_rank()
    W = len(used)

    def make_call(group: Any, size: int, compression: dist.Compression) -> None:
        if call == "all_reduce":
            dist.all_reduce(torch.linspace(-1, 1, COUNT), group=group, compression=compression.of("w"))
        else:
            source = torch.linspace(-1, 1, COUNT)
            output = torch.empty(COUNT // size)
            dist.reduce_scatter_tensor(output, source, group=group, compression=compression.of("w"))

    first, second = dist.new_group(saved), dist.new_group(used)
    states: list[Any] = [None] * len(saved)
    if rank in saved:
        compression = dist.Compression(method, error_feedback=True)
        make_call(first, len(saved), compression)
        for place, source in enumerate(saved):
            own = compression.state_dict() if source == rank else None
            states[place] = [own]
            dist.broadcast_object_list(states[place], src=source, group=first)
    if rank not in used:
        return "", "", 0.0
    compression = dist.Compression(method, error_feedback=True)
    compression.load_state_dict(states[positions[used.index(rank)]][0])
    raised = "", ""
    try:
        make_call(second, W, compression)
    except CommError as error:
        raised = type(error).__name__, str(error)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=second)  # nothing was sent: the group works
    return *raised, float(tensor)


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("int4", "all_reduce"),
        ("powersgd", "all_reduce"),
        ("int4", "reduce_scatter_tensor"),
        ("powersgd", "reduce_scatter_tensor"),
    ],
)
@pytest.mark.parametrize(
    ("used", "positions", "reason"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3], ""),
        ([0, 1], [0, 1], "is that of 4 ranks; got a call on a group of 2: Compression.reshard()"),
        ([0, 1, 2, 3], [0, 0, 0, 0], "is that of group rank 0; got a call of group rank "),
    ],
)
def test_a_saved_state_belongs_to_its_group_and_rank(
    bare_pools: Pools, method: str, call: str, used: list[int], positions: list[int], reason: str
) -> None:
    found = bare_pools(4).run(on, "gloo", saved_and_restored, [0, 1, 2, 3], positions, used, method, call)
    for kind, text, total in [found[rank] for rank in used]:
        assert total == len(used)
        assert bool(kind) == bool(reason)
        assert reason in text


def other_members_and_order() -> list[str]:
    """Return why ranks 2 and 3 refuse the states of ranks 0 and 1, and why states in another order are refused."""
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    compression = dist.Compression("int4", error_feedback=True)
    if rank < 2:
        dist.all_reduce(torch.linspace(-1, 1, COUNT), group=pairs[0], compression=compression.of("w"))
    states: list[Any] = [compression.state_dict() if rank == place else None for place in (0, 1)]
    for place in (0, 1):
        part = [states[place]]
        dist.broadcast_object_list(part, src=place)
        states[place] = part[0]
    with pytest.raises(ArgumentError) as disordered:
        dist.Compression.reshard(states[::-1], 4)
    with pytest.raises(ArgumentError) as incomplete:
        dist.Compression.reshard(states[:1], 4)
    found = [str(disordered.value), str(incomplete.value)]
    if rank >= 2:
        compression.load_state_dict(states[rank - 2])
        with pytest.raises(ArgumentError) as others:
            dist.all_reduce(torch.linspace(-1, 1, COUNT), group=pairs[1], compression=compression.of("w"))
        found.append(str(others.value))
    # Resharded states belong to any group of that many ranks, and then to that one.
    compression.load_state_dict(dist.Compression.reshard(states, 4)[rank])
    dist.all_reduce(torch.linspace(-1, 1, COUNT), compression=compression.of("w"))
    assert compression.state_dict()["tensors"]["w"]["ranks"] == [0, 1, 2, 3]
    return found


def test_states_of_other_members_or_in_another_order_are_refused(bare_pools: Pools) -> None:
    for rank, found in enumerate(bare_pools(4).run(on, "gloo", other_members_and_order)):
        assert found[0].startswith(
            "Compression.reshard: states[0]: got the state of 'w' of group rank 1 of 2; expected"
        )
        assert found[1].startswith(
            "Compression.reshard: states[0]: got the state of 'w' of group rank 0 of 2; expected"
        )
        if rank >= 2:
            assert "is that of the group of ranks [0, 1]; got a call on that of ranks [2, 3]" in found[2]


def a_block_after_trouble() -> str:
    try:
        dist.all_reduce(torch.ones(4), "max" if dist.get_rank() else "sum")
    except CollectiveMismatchError as error:  # found before the call returned
        return type(error).__name__
    time.sleep(1.5)
    try:
        with dist.coalescing():
            dist.all_reduce(torch.ones(3))
            dist.all_reduce(torch.ones(4))
    except CommError as error:
        return type(error).__name__
    return ""


def test_a_block_raises_what_was_found_before(bare_pools: Pools) -> None:
    assert bare_pools(2).run(on, "gloo", a_block_after_trouble) == [CollectiveMismatchError.__name__] * 2
