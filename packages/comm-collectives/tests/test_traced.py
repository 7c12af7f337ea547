"""Where ``torch.distributed`` alone was set up, compiled collectives are torch's own. Needs no backend of ours."""

from __future__ import annotations

import gc
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as c10d

import comm_collectives
from comm_utils.reduce_op import ReduceOp
from comm_utils.testing import per_rank, run_ranks


def _all_reduce(op: Any) -> Any:
    def call(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor * 2
        comm_collectives.all_reduce(tensor, op)
        return tensor + 1

    return call


def _inference_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor * 2
    comm_collectives.inference_all_reduce(tensor)
    return tensor + 1


def _all_gather_into_tensor(tensor: torch.Tensor) -> torch.Tensor:
    output = tensor.new_empty(2 * tensor.numel())
    comm_collectives.all_gather_into_tensor(output, tensor * 2)
    return output + 1


def _reduce_scatter_tensor(tensor: torch.Tensor) -> torch.Tensor:
    output = tensor.new_empty(tensor.numel() // 2)
    comm_collectives.reduce_scatter_tensor(output, tensor * 2, "SUM")
    return output + 1


def _all_to_all_single(tensor: torch.Tensor) -> torch.Tensor:
    output = torch.empty_like(tensor)
    comm_collectives.all_to_all_single(output, tensor * 2)
    return output + 1


def _all_to_all_single_with_sizes(tensor: torch.Tensor) -> torch.Tensor:
    output = torch.empty_like(tensor)
    comm_collectives.all_to_all_single(output, tensor * 2, [2, 2], [2, 2])
    return output + 1


WHOLE = {
    "all_reduce sum": _all_reduce("sum"),
    "all_reduce MAX": _all_reduce("MAX"),
    "all_reduce ReduceOp.MIN": _all_reduce(ReduceOp.MIN),
    "all_reduce torch's ReduceOp.PRODUCT": _all_reduce(c10d.ReduceOp.PRODUCT),
    "inference_all_reduce": _inference_all_reduce,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all_single": _all_to_all_single,
    "all_to_all_single with sizes": _all_to_all_single_with_sizes,
}


def compiled_calls(rank: int) -> dict[str, list[float]]:
    """What compiled functions around each collective return on 2 ranks holding 0 1 2 3 and 10 11 12 13."""
    warnings.simplefilter("ignore")  # torch's own, which differ between releases
    c10d.init_process_group("gloo")
    found = {}
    for name, function in WHOLE.items():
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        found[name] = compiled(torch.arange(4.0) + 10 * rank).tolist()
    c10d.destroy_process_group()
    # A thread of gloo that lets go of a tensor while the interpreter ends aborts the process.
    gc.collect()
    time.sleep(0.1)
    return found


EXPECTED_EVERYWHERE = {
    "all_reduce sum": [21.0, 25.0, 29.0, 33.0],
    "all_reduce MAX": [21.0, 23.0, 25.0, 27.0],
    "all_reduce ReduceOp.MIN": [1.0, 3.0, 5.0, 7.0],
    "all_reduce torch's ReduceOp.PRODUCT": [1.0, 45.0, 97.0, 157.0],
    "inference_all_reduce": [21.0, 25.0, 29.0, 33.0],
    "all_gather_into_tensor": [1.0, 3.0, 5.0, 7.0, 21.0, 23.0, 25.0, 27.0],
}
EXPECTED_PARTS = {
    "reduce_scatter_tensor": ([21.0, 25.0], [29.0, 33.0]),
    "all_to_all_single": ([1.0, 3.0, 21.0, 23.0], [5.0, 7.0, 25.0, 27.0]),
    "all_to_all_single with sizes": ([1.0, 3.0, 21.0, 23.0], [5.0, 7.0, 25.0, 27.0]),
}


@pytest.mark.slow
def test_collectives_are_traced_without_a_break() -> None:
    # One test, as compiling takes most of its time.
    first, second = run_ranks(compiled_calls, 2, per_rank([0, 1]), timeout_s=240, env={"CUDA_VISIBLE_DEVICES": ""})
    assert first == EXPECTED_EVERYWHERE | {name: parts[0] for name, parts in EXPECTED_PARTS.items()}
    assert second == EXPECTED_EVERYWHERE | {name: parts[1] for name, parts in EXPECTED_PARTS.items()}
