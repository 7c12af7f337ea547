"""Groups leave nothing in the store in which their members met."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d as internals

import comm_orchestrator as dist
from comm_utils.testing import run_ranks

LIBRARIES = [
    pytest.param("gloo", {}, "", id="gloo"),
    pytest.param("ccl", {"CCL_SHARED_MEMORY": "1"}, "", id="shared-memory"),
    pytest.param("ccl", {"CCL_SHARED_MEMORY": "0"}, "//process/", id="oneccl"),
]


def run_groups(backend: str, part: str) -> list[str]:
    """Return the keys of a group's members that are left, of those with ``part`` in their names."""
    dist.init_distributed(backend, verbose=False)
    store: Any = internals._world.pg_map[internals._get_default_group()][1]
    group = dist.new_group([0, 1, 2])
    name = group.group_name
    dist.all_reduce(tensor := torch.ones(1), group=group)
    assert tensor.item() == 3
    dist.destroy_process_group(group)
    dist.barrier()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    left = [key for key in map(str, store.list_keys()) if name in key and part in key]
    dist.barrier()
    dist.destroy_process_group()
    return left


@pytest.mark.parametrize(("backend", "env", "part"), LIBRARIES)
def test_members_delete_the_records_that_all_have_read(
    backend: str, env: dict[str, Any], part: str, rank_environment: dict[str, Any]
) -> None:
    if not hasattr(torch.distributed.Store, "list_keys"):
        pytest.skip("this torch cannot list the keys of a store")
    assert run_ranks(run_groups, 3, backend, part, env={**rank_environment, **env}) == [[], [], []]
