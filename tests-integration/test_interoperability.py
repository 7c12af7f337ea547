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
from comm_utils.testing import RankPool, run_ranks

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
            # Only gloo receives from whoever sends first.
            source = 1 if os.environ.get("TESTS_BACKEND", "gloo") == "ccl" else None
            work: Any = dist.irecv(torch.empty(2), source, group)
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
