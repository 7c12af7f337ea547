"""The examples of the article on ``deepspeed.comm`` that users know, on gloo with CPU tensors.

Each function is one example of it, with our import line and without ``.cuda()``. What it has to print is the article's
own expected output, which writes ``1.0`` as ``1``; where the article shows none, its text says what has to come out.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

import comm_orchestrator as dist
from comm_orchestrator import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    destroy_process_group,
    get_rank,
    get_world_size,
    init_distributed,
    irecv,
    is_initialized,
    isend,
    new_group,
    recv,
    reduce,
    reduce_scatter,
    send,
)
from comm_utils.testing import RankOutcome, RankPool, run_ranks_outcomes

Pools: TypeAlias = Callable[[int], RankPool]


def show(tensor: torch.Tensor) -> str:
    return f"[{', '.join(f'{value:g}' for value in tensor.tolist())}]"


def printed(pool: RankPool, example: Callable[..., Any], *args: Any) -> list[list[str]]:
    """The lines that each rank printed."""
    return lines(pool.run_outcomes(example, *args))


def lines(outcomes: list[RankOutcome]) -> list[list[str]]:
    for outcome in outcomes:
        assert outcome.ok, outcome.report()
    return [outcome.stdout.splitlines() for outcome in outcomes]


# --- 2.1 collectives


def all_reduce_example() -> None:
    init_distributed(dist_backend="gloo", verbose=False)
    tensor = torch.arange(5, dtype=torch.float32) + torch.distributed.get_rank()
    print(f"Before: Rank {torch.distributed.get_rank()}, Tensor: {show(tensor)}")
    all_reduce(tensor, op="sum")
    print(f"After: Rank {torch.distributed.get_rank()}, Tensor: {show(tensor)}")


ALL_REDUCE_OUTPUT = [
    ["Before: Rank 0, Tensor: [0, 1, 2, 3, 4]", "After: Rank 0, Tensor: [6, 10, 14, 18, 22]"],
    ["Before: Rank 1, Tensor: [1, 2, 3, 4, 5]", "After: Rank 1, Tensor: [6, 10, 14, 18, 22]"],
    ["Before: Rank 2, Tensor: [2, 3, 4, 5, 6]", "After: Rank 2, Tensor: [6, 10, 14, 18, 22]"],
    ["Before: Rank 3, Tensor: [3, 4, 5, 6, 7]", "After: Rank 3, Tensor: [6, 10, 14, 18, 22]"],
]


def all_reduce_program() -> None:
    all_reduce_example()
    destroy_process_group()


def test_all_reduce_as_a_program(rank_environment: dict[str, Any]) -> None:
    """In processes that do nothing else, from their start to their end."""
    assert lines(run_ranks_outcomes(all_reduce_program, 4, env=rank_environment)) == ALL_REDUCE_OUTPUT


def test_all_reduce(pools: Pools) -> None:
    assert printed(pools(4), all_reduce_example) == ALL_REDUCE_OUTPUT


def all_reduce_usage() -> list[tuple[str, list[float]]]:
    found = []
    for op in ("sum", "product", "min", "max", "avg"):
        tensor = torch.ones(5) * (get_rank() + 1)
        assert all_reduce(tensor, op=op) is None
        found.append((op, tensor.tolist()))
    tensor = torch.ones(5)
    all_reduce(tensor)
    found.append(("default", tensor.tolist()))
    handle = all_reduce(tensor, async_op=True)
    assert isinstance(handle, dist.Work)
    assert handle.wait() is True
    found.append(("async_op", tensor.tolist()))
    return found


def test_all_reduce_usage(pools: Pools) -> None:
    expected = [
        ("sum", [3.0] * 5),
        ("product", [2.0] * 5),
        ("min", [1.0] * 5),
        ("max", [2.0] * 5),
        ("avg", [1.5] * 5),
        ("default", [2.0] * 5),
        ("async_op", [4.0] * 5),
    ]
    assert pools(2).run(all_reduce_usage) == [expected, expected]


def all_gather_example() -> None:
    init_distributed(dist_backend="gloo", verbose=False)
    rank = torch.distributed.get_rank()
    tensor = torch.full((5,), float(rank), dtype=torch.float32)
    gathered_tensors = all_gather(tensor)
    print(f"Rank {rank}, Gathered: [{', '.join(show(t) for t in gathered_tensors)}]")


def test_all_gather(pools: Pools) -> None:
    assert printed(pools(2), all_gather_example) == [
        ["Rank 0, Gathered: [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]"],
        ["Rank 1, Gathered: [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]"],
    ]


def all_gather_usage() -> tuple[int, int, list[list[float]], list[list[float]]]:
    tensor = torch.ones(5)
    gathered_tensors = all_gather(tensor)
    asynchronous = all_gather(tensor * get_rank(), async_op=True).result()
    into = [torch.empty(5) for _ in range(get_world_size())]
    torch_form = all_gather(into, tensor * get_rank())
    assert torch_form is None
    return (
        len(gathered_tensors),
        int(sum(t.sum() for t in gathered_tensors)),
        [t.tolist() for t in asynchronous],
        [t.tolist() for t in into],
    )


def test_all_gather_returns_one_tensor_of_each_rank(pools: Pools) -> None:
    expected = [[float(rank)] * 5 for rank in range(3)]
    assert pools(3).run(all_gather_usage) == [(3, 15, expected, expected)] * 3


def reduce_example() -> None:
    init_distributed(dist_backend="gloo", verbose=False)
    rank = torch.distributed.get_rank()
    tensor = torch.full((5,), float(rank + 1), dtype=torch.float32)
    print(f"Before: Rank {rank}, Tensor: {show(tensor)}")
    reduce(tensor, dst=0, op="sum")
    print(f"After: Rank {rank}, Tensor: {show(tensor)}")


def test_reduce_leaves_the_other_ranks_alone(pools: Pools) -> None:
    assert printed(pools(2), reduce_example) == [
        ["Before: Rank 0, Tensor: [1, 1, 1, 1, 1]", "After: Rank 0, Tensor: [3, 3, 3, 3, 3]"],
        ["Before: Rank 1, Tensor: [2, 2, 2, 2, 2]", "After: Rank 1, Tensor: [2, 2, 2, 2, 2]"],
    ]


def reduce_usage(n: int) -> list[float]:
    tensor = torch.full((n,), float(get_rank()))
    reduce(tensor, dst=1, op="max")
    return tensor.unique().tolist()


@pytest.mark.parametrize("n", [1, 5, 100_000])
def test_reduce_leaves_three_other_ranks_alone(pools: Pools, n: int) -> None:
    assert pools(4).run(reduce_usage, n) == [[0.0], [3.0], [2.0], [3.0]]


def broadcast_example() -> None:
    init_distributed(dist_backend="gloo", verbose=False)
    rank = torch.distributed.get_rank()
    tensor = torch.full((5,), float(rank), dtype=torch.float32)
    print(f"Before: Rank {rank}, Tensor: {show(tensor)}")
    broadcast(tensor, src=0)
    print(f"After: Rank {rank}, Tensor: {show(tensor)}")


def test_broadcast(pools: Pools) -> None:
    assert printed(pools(2), broadcast_example) == [
        ["Before: Rank 0, Tensor: [0, 0, 0, 0, 0]", "After: Rank 0, Tensor: [0, 0, 0, 0, 0]"],
        ["Before: Rank 1, Tensor: [1, 1, 1, 1, 1]", "After: Rank 1, Tensor: [0, 0, 0, 0, 0]"],
    ]


def reduce_scatter_example() -> None:
    init_distributed(dist_backend="gloo", verbose=False)
    rank = torch.distributed.get_rank()
    input_tensor = torch.full((8,), float(rank + 1), dtype=torch.float32)
    output_tensor = torch.zeros(4)
    print(f"Before: Rank {rank}, Input: {show(input_tensor)}")
    reduce_scatter(output_tensor, input_tensor, op="sum")
    print(f"After: Rank {rank}, Output: {show(output_tensor)}")


def test_reduce_scatter(pools: Pools) -> None:
    assert printed(pools(2), reduce_scatter_example) == [
        ["Before: Rank 0, Input: [1, 1, 1, 1, 1, 1, 1, 1]", "After: Rank 0, Output: [3, 3, 3, 3]"],
        ["Before: Rank 1, Input: [2, 2, 2, 2, 2, 2, 2, 2]", "After: Rank 1, Output: [3, 3, 3, 3]"],
    ]


def reduce_scatter_usage() -> list[float]:
    input_tensor = torch.ones(10)
    output_tensor = torch.zeros(5)
    reduce_scatter(output_tensor, input_tensor)
    by_keyword = torch.zeros(5)
    reduce_scatter(output_tensor=by_keyword, input_tensor=input_tensor)
    assert torch.equal(by_keyword, output_tensor)
    assert torch.equal(input_tensor, torch.ones(10))
    return output_tensor.tolist()


def test_reduce_scatter_of_ten_elements(pools: Pools) -> None:
    assert pools(2).run(reduce_scatter_usage) == [[2.0] * 5] * 2


def reduce_scatter_parts() -> list[float]:
    output = torch.zeros(2)
    reduce_scatter(output, torch.arange(6.0) * (get_rank() + 1))
    return output.tolist()


def test_reduce_scatter_gives_each_rank_its_own_part(pools: Pools) -> None:
    assert pools(3).run(reduce_scatter_parts) == [[0.0, 6.0], [12.0, 18.0], [24.0, 30.0]]


# --- 2.2 point to point


def send_example() -> None:
    init_distributed(dist_backend="gloo", verbose=False)
    rank = torch.distributed.get_rank()
    tensor = torch.full((5,), float(rank), dtype=torch.float32)
    if rank == 0:
        send(tensor, dst=1)
        print(f"Rank {rank} sent: {show(tensor)}")
    elif rank == 1:
        recv(tensor, src=0)
        print(f"Rank {rank} received: {show(tensor)}")


def test_send_and_recv(pools: Pools) -> None:
    assert printed(pools(2), send_example) == [["Rank 0 sent: [0, 0, 0, 0, 0]"], ["Rank 1 received: [0, 0, 0, 0, 0]"]]


def test_send_and_recv_beside_ranks_that_do_neither(pools: Pools) -> None:
    assert printed(pools(4), send_example)[2:] == [[], []]


def send_with_handles() -> Any:
    tensor = torch.full((5,), float(get_rank()))
    handle = send(tensor, dst=1, async_op=True) if get_rank() == 0 else recv(tensor, src=0, async_op=True)
    assert handle.wait() is True
    return tensor.tolist()


def test_send_and_recv_with_async_op(pools: Pools) -> None:
    assert pools(2).run(send_with_handles) == [[0.0] * 5, [0.0] * 5]


def isend_example(rank_value: float) -> tuple[bool, list[float]]:
    rank = get_rank()
    tensor = torch.ones(5) if rank == 0 else torch.full((5,), rank_value)
    if rank == 0:
        handle = isend(tensor, dst=1)
        done = handle.wait()
    elif rank == 1:
        handle = irecv(tensor, src=0)
        done = handle.wait()
    return done, tensor.tolist()


def test_isend_and_irecv(pools: Pools) -> None:
    assert pools(2).run(isend_example, 7.0) == [(True, [1.0] * 5)] * 2


# --- 2.3 management


def life_of_the_environment() -> list[Any]:
    rank = int(os.environ["RANK"])
    found: list[Any] = [is_initialized()]
    init_distributed("gloo", rank=rank, world_size=2, verbose=False)
    if is_initialized():
        print("Distributed environment ready")
    found += [is_initialized(), torch.distributed.is_initialized(), get_rank(), get_world_size()]
    print(f"Rank: {get_rank()}")
    print(f"World size: {get_world_size()}")
    barrier()
    destroy_process_group()
    found += [is_initialized(), torch.distributed.is_initialized()]
    return found


@pytest.mark.cpu
def test_management(bare_pools: Pools) -> None:
    outcomes = bare_pools(2).run_outcomes(life_of_the_environment)
    assert lines(outcomes) == [["Distributed environment ready", f"Rank: {rank}", "World size: 2"] for rank in range(2)]
    assert [outcome.value for outcome in outcomes] == [[False, True, True, rank, 2, False, False] for rank in range(2)]


def initialised_by_torch(method: str) -> list[float]:
    """4.1: either of the two may set up the environment."""
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    try:
        init_distributed(verbose=False)
        tensor = torch.ones(5)
        all_reduce(tensor)
        return tensor.tolist()
    finally:
        destroy_process_group()


@pytest.mark.cpu
def test_environment_that_torch_initialised(bare_pools: Pools, tmp_path: Path) -> None:
    assert bare_pools(2).run(initialised_by_torch, f"file://{tmp_path}/meet") == [[2.0] * 5] * 2


def new_group_example() -> tuple[int, int, list[float]]:
    group = new_group(ranks=[0, 1])
    tensor = torch.ones(5)
    all_reduce(tensor, group=group)
    found = get_rank(group), get_world_size(group), tensor.tolist()
    destroy_process_group(group)
    return found


def test_new_group_called_by_all(pools: Pools) -> None:
    members = [(0, 2, [2.0] * 5), (1, 2, [2.0] * 5)]
    assert pools(2).run(new_group_example) == members
    assert pools(4).run(new_group_example) == [*members, (-1, -1, [1.0] * 5), (-1, -1, [1.0] * 5)]


# --- 2.4 and 4.3 helpers


def barrier_example() -> tuple[float, float]:
    init_distributed(dist_backend="gloo", verbose=False)
    rank = torch.distributed.get_rank()
    time.sleep(0.1 * rank)
    before = time.monotonic()
    print(f"Rank {rank} before barrier")
    barrier()
    print(f"Rank {rank} after barrier")
    return before, time.monotonic()


def test_barrier(pools: Pools) -> None:
    outcomes = pools(4).run_outcomes(barrier_example)
    assert lines(outcomes) == [[f"Rank {rank} before barrier", f"Rank {rank} after barrier"] for rank in range(4)]
    befores, afters = zip(*(outcome.value for outcome in outcomes), strict=True)
    assert max(befores) - min(befores) > 0.2
    assert min(afters) >= max(befores)


def barrier_then_all_reduce() -> list[float]:
    barrier()
    tensor = torch.ones(5)
    all_reduce(tensor)
    return tensor.tolist()


def test_barrier_then_all_reduce(pools: Pools) -> None:
    assert pools(2).run(barrier_then_all_reduce) == [[2.0] * 5] * 2


# --- 3 scenarios


def gradients() -> None:
    init_distributed(dist_backend="gloo", verbose=False)
    tensor = torch.ones(5, requires_grad=True)
    loss = tensor.sum()
    loss.backward()
    print(f"Rank {torch.distributed.get_rank()}, Grad before: {show(tensor.grad)}")
    all_reduce(tensor.grad)
    print(f"Rank {torch.distributed.get_rank()}, Grad after: {show(tensor.grad)}")


def test_3_1_gradients(pools: Pools) -> None:
    assert printed(pools(2), gradients) == [
        [f"Rank {rank}, Grad before: [1, 1, 1, 1, 1]", f"Rank {rank}, Grad after: [2, 2, 2, 2, 2]"] for rank in range(2)
    ]


def sharded_parameters() -> None:
    init_distributed(dist_backend="gloo", verbose=False)
    rank = torch.distributed.get_rank()
    param = torch.full((5,), float(rank), dtype=torch.float32)
    gathered_params = all_gather(param)
    print(f"Rank {rank}, Gathered params: [{', '.join(show(p) for p in gathered_params)}]")


def test_3_2_sharded_parameters(pools: Pools) -> None:
    assert printed(pools(2), sharded_parameters) == [
        [f"Rank {rank}, Gathered params: [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]"] for rank in range(2)
    ]


def pipeline() -> None:
    init_distributed(dist_backend="gloo", verbose=False)
    rank = torch.distributed.get_rank()
    tensor = torch.zeros(5)
    if rank == 0:
        tensor.fill_(1.0)
        send(tensor, dst=1)
        print(f"Rank {rank} sent: {show(tensor)}")
    elif rank == 1:
        recv(tensor, src=0)
        print(f"Rank {rank} received: {show(tensor)}")


def test_3_3_pipeline(pools: Pools) -> None:
    assert printed(pools(2), pipeline) == [["Rank 0 sent: [1, 1, 1, 1, 1]"], ["Rank 1 received: [1, 1, 1, 1, 1]"]]


def group_of_two() -> None:
    init_distributed(dist_backend="gloo", verbose=False)
    group = new_group(ranks=[0, 1])
    tensor = torch.ones(5) * (torch.distributed.get_rank() + 1)
    all_reduce(tensor, group=group)
    print(f"Rank {torch.distributed.get_rank()}, Tensor: {show(tensor)}")
    destroy_process_group(group)


def test_3_4_groups(pools: Pools) -> None:
    members = [["Rank 0, Tensor: [3, 3, 3, 3, 3]"], ["Rank 1, Tensor: [3, 3, 3, 3, 3]"]]
    others = [["Rank 2, Tensor: [3, 3, 3, 3, 3]"], ["Rank 3, Tensor: [4, 4, 4, 4, 4]"]]
    assert printed(pools(2), group_of_two) == members
    assert printed(pools(4), group_of_two) == members + others


def asynchronous() -> None:
    init_distributed(dist_backend="gloo", verbose=False)
    rank = torch.distributed.get_rank()
    tensor = torch.zeros(5)
    if rank == 0:
        tensor.fill_(1.0)
        handle = isend(tensor, dst=1)
        handle.wait()
        print(f"Rank {rank} sent")
    elif rank == 1:
        handle = irecv(tensor, src=0)
        handle.wait()
        print(f"Rank {rank} received: {show(tensor)}")


def test_3_5_asynchronous(pools: Pools) -> None:
    assert printed(pools(2), asynchronous) == [["Rank 0 sent"], ["Rank 1 received: [1, 1, 1, 1, 1]"]]


# --- 6 advanced usage


def overlapped() -> tuple[float, list[float]]:
    init_distributed(dist_backend="gloo", verbose=False)
    rank = torch.distributed.get_rank()
    tensor = torch.ones(5) if rank == 0 else torch.zeros(5)
    mine = torch.ones(5)
    if rank == 0:
        handle = isend(tensor, dst=1)
        result = torch.matmul(mine, mine)
        handle.wait()
    elif rank == 1:
        handle = irecv(tensor, src=0)
        result = torch.matmul(mine, mine)
        handle.wait()
    return result.item(), tensor.tolist()


def test_6_1_communication_beside_computation(pools: Pools) -> None:
    assert pools(2).run(overlapped) == [(5.0, [1.0] * 5)] * 2


def group_made_by_its_members() -> None:
    init_distributed(dist_backend="gloo", verbose=False)
    rank = torch.distributed.get_rank()
    group = new_group(ranks=[0, 2]) if rank in [0, 2] else None
    tensor = torch.ones(5) * (rank + 1)
    if group is not None:
        all_reduce(tensor, group=group)
    print(f"Rank {rank}, Tensor: {show(tensor)}")
    if group is not None:
        destroy_process_group(group)


def group_made_by_all() -> None:
    init_distributed(dist_backend="gloo", verbose=False)
    rank = torch.distributed.get_rank()
    group = new_group(ranks=[0, 2])
    tensor = torch.ones(5) * (rank + 1)
    all_reduce(tensor, group=group)
    print(f"Rank {rank}, Tensor: {show(tensor)}")
    destroy_process_group(group)


@pytest.mark.parametrize("example", [group_made_by_its_members, group_made_by_all])
@pytest.mark.parametrize("world_size", [3, 4])
def test_6_2_group_of_ranks_0_and_2(pools: Pools, world_size: int, example: Callable[[], None]) -> None:
    expected = [
        ["Rank 0, Tensor: [4, 4, 4, 4, 4]"],
        ["Rank 1, Tensor: [2, 2, 2, 2, 2]"],
        ["Rank 2, Tensor: [4, 4, 4, 4, 4]"],
        ["Rank 3, Tensor: [4, 4, 4, 4, 4]"],
    ]
    assert printed(pools(world_size), example) == expected[:world_size]


def measured() -> tuple[str, bool]:
    init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(get_rank())
    tensor = torch.randn(1000000)
    parts = all_gather(tensor)
    start = time.time()
    all_reduce(tensor)
    print(f"AllReduce time: {time.time() - start:.4f} seconds")
    return f"{tensor.shape}", torch.allclose(tensor, parts[0] + parts[1])


def test_6_3_performance_analysis(pools: Pools) -> None:
    outcomes = pools(2).run_outcomes(measured)
    for (line,) in lines(outcomes):
        seconds = float(line.removeprefix("AllReduce time: ").removesuffix(" seconds"))
        assert 0 <= seconds < 30
    assert [outcome.value for outcome in outcomes] == [("torch.Size([1000000])", True)] * 2


def zero_stage_3() -> tuple[list[float], list[float]]:
    init_distributed(dist_backend="gloo", verbose=False)
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    param = torch.randn(5) / (rank + 1)
    gathered_params = all_gather(param)
    full_param = torch.cat(gathered_params)
    return param.tolist(), full_param.tolist()


def test_6_4_zero_stage_3(pools: Pools) -> None:
    (first, whole), (second, whole_again) = pools(2).run(zero_stage_3)
    assert first != second
    assert whole == whole_again == first + second


# --- 1 and 4: backends and settings


def refusal(*args: Any, **kwargs: Any) -> tuple[str, bool, bool, str]:
    try:
        init_distributed(*args, verbose=False, **kwargs)
    except dist.CommError as error:
        return type(error).__name__, is_initialized(), torch.distributed.is_initialized(), str(error)
    destroy_process_group()
    return "nothing", False, False, ""


@pytest.mark.cpu
def test_nccl_without_a_gpu(bare_pools: Pools) -> None:
    """``init_distributed(dist_backend="nccl")``, with which most of the article's examples begin."""
    for error, ours, torchs, text in bare_pools(2).run(refusal, dist_backend="nccl"):
        assert (error, ours, torchs) == ("BackendUnavailableError", False, False)
        assert text.startswith("init_distributed: dist_backend: backend 'nccl' cannot be used: ")
        if torch.distributed.is_nccl_available():
            assert "torch sees no CUDA device; check nvidia-smi and CUDA_VISIBLE_DEVICES" in text
        else:
            assert f"this build of torch ({torch.__version__}) was made without NCCL; install a CUDA build" in text


def compressed(config: dict[str, Any] | str) -> float:
    """Return the largest error of a sum under the article's configuration of compression."""
    dist.init_distributed("gloo", config=config, verbose=False)
    exact = torch.linspace(0, 1, 50_000)
    tensor = exact.clone()
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return float((tensor - 2 * exact).abs().max())


@pytest.mark.cpu
def test_the_articles_compression(bare_pools: Pools, tmp_path: Path) -> None:
    config = {"communication_data_type": "fp16", "compress_communication": True}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    for given in (config, str(path)):
        assert all(0 < error < 1e-3 for error in bare_pools(2).run(compressed, given))


@pytest.mark.cpu
def test_no_compression_is_accepted(bare_pools: Pools) -> None:
    config = {"communication_data_type": "fp32", "compress_communication": False}
    assert bare_pools(2).run(compressed, config) == [0.0, 0.0]


def test_every_name_of_the_article() -> None:
    collectives = ["all_reduce", "all_gather", "reduce", "broadcast", "reduce_scatter"]
    messages = ["send", "recv", "isend", "irecv"]
    management = ["init_distributed", "get_rank", "get_world_size", "new_group", "destroy_process_group"]
    for name in (*collectives, *messages, *management, "barrier", "is_initialized"):
        assert name in dist.__all__
        assert callable(getattr(dist, name))
