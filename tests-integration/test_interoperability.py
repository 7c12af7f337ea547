"""What torch's own software asks of a process group and of our handles and errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as c10d

import comm_orchestrator as dist
from comm_utils import active_backend
from comm_utils.testing import RankPool, run_ranks, run_ranks_outcomes

Pools: TypeAlias = Callable[[int], RankPool]

ENGINES = [
    pytest.param({"CCL_SHARED_MEMORY": "1"}, id="shared-memory"),
    pytest.param({"CCL_SHARED_MEMORY": "0"}, id="oneccl"),
]


def run_state_dicts(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    dist.init_distributed("ccl", verbose=False)
    torch.manual_seed(dist.get_rank())
    full = {name: value.clone() for name, value in torch.nn.Linear(4, 2).state_dict().items()}
    expected = full["weight"].clone()
    model = torch.nn.Linear(4, 2)
    fully_shard(model, mesh=c10d.init_device_mesh("cpu", (dist.get_world_size(),)))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full if dist.get_rank() == 0 else {}, options=options)

    dist.broadcast(expected, 0)
    found = get_model_state_dict(model)["weight"].full_tensor()  # type: ignore[union-attr]
    assert torch.equal(found, expected)

    state = {"weight": expected.clone(), "rank": torch.tensor([1.0])}
    dcp.async_save(state, checkpoint_id=str(folder)).result(timeout=60)
    loaded = {"weight": torch.zeros(2, 4), "rank": torch.zeros(1)}
    dcp.load(loaded, checkpoint_id=str(folder))
    assert torch.equal(loaded["weight"], expected)
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.available_backends()["ccl"].usable, reason=dist.available_backends()["ccl"].reason)
@pytest.mark.parametrize("env", ENGINES)
def test_sharded_state_dicts_and_asynchronous_checkpoints(
    env: dict[str, Any], rank_environment: dict[str, Any], tmp_path: Path
) -> None:
    run_ranks(run_state_dicts, 2, tmp_path, timeout_s=120, env={**rank_environment, **env})


def run_sources() -> None:
    rank = dist.get_rank()
    swapped = dist.new_group([1, 0])
    for group in (None, swapped):
        if rank:
            dist.send(torch.ones(2), 0, group)
        else:
            work: Any = dist.irecv(torch.empty(2), None, group)
            work.wait()
            assert work.source_rank() == work._source_rank() == (1 if group is None else dist.get_group_rank(group, 1))
    dist.destroy_process_group(swapped)


def test_the_handle_of_irecv_names_the_sender(pools: Pools) -> None:
    pools(2).run(run_sources)


def run_late() -> None:
    dist.init_distributed("gloo", verbose=False, timeout=1)
    if dist.get_rank() == 0:
        caught = None
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:  # as code around torch does
            caught = error
        assert isinstance(caught, dist.CommTimeoutError)
        assert isinstance(caught, TimeoutError)
        active_backend().get_store().set("done", "")
    else:
        active_backend().get_store().wait(["done"], timedelta(seconds=30))


def test_a_timeout_is_what_code_around_torch_catches(rank_environment: dict[str, Any]) -> None:
    run_ranks(run_late, 2, timeout_s=60, env=rank_environment)


def run_training_with_a_lost_peer(hook: str | None) -> None:
    from torch.nn.parallel import DistributedDataParallel

    dist.init_distributed("ccl", verbose=False, timeout=30)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    if hook is not None:
        model._register_builtin_comm_hook(getattr(c10d.BuiltinCommHookType, hook))
    model(torch.ones(3, 4)).sum().backward()
    if dist.get_rank() == 1:
        os._exit(0)
    # DDP broadcasts the order of its buckets first. The root fails there if it knows by then that its peer has ended.
    lost = r"(all_reduce|broadcast) on the group of ranks \[0, 1\] lost a peer.*rank 1 \(pid"
    with pytest.raises(RuntimeError, match=lost):
        model(torch.ones(3, 4)).sum().backward()


@pytest.mark.skipif(not dist.available_backends()["ccl"].usable, reason=dist.available_backends()["ccl"].reason)
@pytest.mark.parametrize("hook", [None, "FP16_COMPRESS"])
@pytest.mark.parametrize("env", ENGINES)
def test_ddp_names_a_lost_peer(env: dict[str, Any], rank_environment: dict[str, Any], hook: str | None) -> None:
    """C++ reads the failed future, and must not take the exception for a result."""
    outcomes = run_ranks_outcomes(run_training_with_a_lost_peer, 2, hook, timeout_s=60, env={**rank_environment, **env})
    for outcome in outcomes:
        assert outcome.exit_code == 0, outcome.message


def run_monitored_by_the_group() -> list[str]:
    """The group's own method on one rank and our function on the other are one barrier."""
    dist.init_distributed("ccl", verbose=False)
    group: Any = dist.new_group([1, 2], timeout=60)
    found = []
    if dist.get_rank() == 1:
        group.monitored_barrier()
        dist.monitored_barrier(group, timeout=20)
    elif dist.get_rank() == 2:
        dist.monitored_barrier(group, timeout=20)
        group.monitored_barrier(timedelta(seconds=20))
        try:
            group.monitored_barrier(timeout=timedelta(seconds=0.2), wait_all_ranks=True)
        except dist.CommTimeoutError as error:
            found.append(str(error))
        # Before 2.15, torch asks for gloo before it asks the group.
        refused = "monitored_barrier is only implemented for GLOO backend|rank 1 did not arrive within 0.2 s"
        with pytest.raises((ValueError, dist.CommTimeoutError), match=refused):
            c10d.monitored_barrier(group, timedelta(seconds=0.2))
        with pytest.raises(TypeError, match="monitored_barrier: timeout: got '1'; expected seconds"):
            group.monitored_barrier("1")
    dist.barrier()
    if dist.get_rank():
        dist.all_reduce(torch.ones(1), group=group)  # it stays usable
    dist.destroy_process_group()
    return found


@pytest.mark.skipif(not dist.available_backends()["ccl"].usable, reason=dist.available_backends()["ccl"].reason)
@pytest.mark.parametrize("env", ENGINES)
def test_monitored_barrier_of_a_group(env: dict[str, Any], rank_environment: dict[str, Any]) -> None:
    found = run_ranks(run_monitored_by_the_group, 3, timeout_s=90, env={**rank_environment, **env})
    assert found[:2] == [[], []]
    (text,) = found[2]
    assert text.startswith("monitored_barrier: rank 1 did not arrive within 0.2 s: rank 1 (pid ")


def run_averages_of_integers() -> None:
    """As Lightning's mean of a batch size; the sums are divided towards zero, as by NCCL."""
    dist.init_distributed("ccl", verbose=False)
    rank = dist.get_rank()
    for dtype in (torch.int64, torch.int32, torch.int8):
        tensor = torch.tensor([3 + rank, -3 - rank, 8], dtype=dtype)
        c10d.all_reduce(tensor, op=c10d.ReduceOp.AVG)
        assert tensor.tolist() == [3, -3, 8]
        scalar = torch.tensor(5 + rank, dtype=dtype)
        work = c10d.all_reduce(scalar, op=c10d.ReduceOp.AVG, async_op=True)
        work.wait()
        work.wait()
        assert scalar.item() == 5
        single = torch.zeros(1, dtype=dtype)
        c10d.reduce_scatter_tensor(single, torch.tensor([4, 7], dtype=dtype) + rank, op=c10d.ReduceOp.AVG)
        assert single.item() == (4, 7)[rank]
        single = torch.tensor([7 + rank], dtype=dtype)
        c10d.reduce(single, 1, op=c10d.ReduceOp.AVG)
        assert single.item() == 7 + 0 * rank
    with pytest.raises(dist.ArgumentError, match="an average is no integer"):
        dist.all_reduce(torch.tensor(3), "avg")


def run_exchange_of_other_dtypes() -> None:
    dist.init_distributed("ccl", verbose=False)
    outputs, inputs = [torch.zeros(9) for _ in range(2)], [torch.ones(9, dtype=torch.float64) for _ in range(2)]
    with pytest.raises(dist.ArgumentError, match=r"got outputs of torch.float32 and inputs of torch.float64"):
        dist.get_world_group().alltoall(outputs, inputs)
    dist.barrier()


@pytest.mark.parametrize("shared", ["0", "1"])
@pytest.mark.parametrize("run", [run_averages_of_integers, run_exchange_of_other_dtypes])
def test_torchs_calls_on_a_group_of_ours(
    run: Callable[[], None], shared: str, rank_environment: dict[str, Any]
) -> None:
    run_ranks(run, 2, env={**rank_environment, "CCL_SHARED_MEMORY": shared})
