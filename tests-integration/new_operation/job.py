"""What each rank does: calls the operation, right and wrong, logged and traced."""

import re
import sys

import pytest
import torch

import comm_orchestrator as dist
from comm_utils import operations

folder = sys.argv[1]
dist.init_distributed("extended", verbose=False)
rank, W = dist.get_rank(), dist.get_world_size()
call = operations.function_of(operations.get("reduce_scatter_in_place"))


def refused(kind: type[Exception], text: str, *args: object, **kwargs: object) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call(*args, **kwargs)


def checked() -> None:
    refused(dist.ArgumentTypeError, "tensor: got 3 of type int; expected a tensor", 3)
    refused(dist.ArgumentTypeError, "missing a required argument: 'tensor'")
    refused(dist.ArgumentTypeError, "did you mean 'tensor'?", tensr=torch.ones(2))
    refused(dist.ArgumentError, "which does not divide by the world size", torch.ones(W + 1))
    refused(dist.ArgumentError, "got 'summ'", torch.ones(W), "summ")
    refused(dist.ArgumentError, "is not contiguous", torch.ones(W, 3).t())
    refused(dist.ArgumentError, "timeout: got -1", torch.ones(W), timeout=-1)


def right(async_op: bool) -> None:
    tensor = torch.arange(3.0 * W) + rank
    work = call(tensor, "sum", None, async_op)
    if async_op:
        work.wait()
    expected = W * torch.arange(3.0 * W) + sum(range(W))
    assert torch.equal(tensor.view(W, 3)[rank], expected.view(W, 3)[rank]), tensor


checked()
right(False)
checked()
dist.configure(enabled=True, prof_all=True)
dist.start_trace(folder)
for asynchronous in (False, True, False):
    right(asynchronous)
checked()
(row,) = dist.log_rows()
assert (row.name, row.calls, row.size_bytes, row.world_size) == ("reduce_scatter_in_place", 3, 12 * W, W), row
assert abs(row.busbw_gb_per_s - row.algbw_gb_per_s * (W - 1) / W) <= 1e-9
dist.stop_trace()
dist.configure(enabled=False)
dist.destroy_process_group()
