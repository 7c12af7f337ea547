"""The sum of sparse tensors over all ranks, as DDP needs it for embeddings with sparse gradients.

Every rank gathers the indices and values of all ranks, padded to the longest, and adds them up in the order of ranks,
so that the bits of the result are the same on each. gloo's sparse all_reduce gathers in the same way.
"""

from __future__ import annotations

from zlib import crc32

import torch

from comm_backend_ccl.communicator import Communicator
from comm_utils.errors import ArgumentError, ArgumentTypeError, CollectiveMismatchError
from comm_utils.reduce_op import ReduceOp
from comm_utils.torch_support import factories

__all__ = ["all_reduce_sparse"]


def all_reduce_sparse(communicator: Communicator, tensor: torch.Tensor, op: ReduceOp) -> None:
    """Overwrite ``tensor``, of layout ``torch.sparse_coo``, with the sum over all ranks; return when it is complete.

    Args:
        tensor: on the CPU, of the same shape and dtype, and with as many sparse dimensions, on every rank. The number
            of elements that it specifies may differ. The result is coalesced.

    Raises:
        ArgumentTypeError: another layout.
        ArgumentError: another op than the sum.
        CollectiveMismatchError: shapes or sparse dimensions differ between ranks.
    """
    if tensor.layout is not torch.sparse_coo:
        raise ArgumentTypeError(
            f"all_reduce: tensor: got the layout {tensor.layout}; expected torch.sparse_coo or dense"
        )
    if op is not ReduceOp.SUM:
        raise ArgumentError(f"all_reduce: op: got {op.name.lower()!r} of a sparse tensor; expected 'sum'")
    own = tensor.detach().coalesce()
    indices, values = own.indices(), own.values()
    record = [own.sparse_dim(), own.dim(), *own.shape]
    # Of one size for all ranks, whatever the number of dimensions.
    mine = factories.tensor([own._nnz(), crc32(repr(record).encode())], dtype=torch.int64, device="cpu")
    everyone = factories.empty(communicator.size, 2, dtype=torch.int64, device="cpu")
    communicator.all_gather(everyone, mine, name="all_reduce").wait()
    counts = everyone[:, 0].tolist()
    if len(set(everyone[:, 1].tolist())) != 1:
        raise CollectiveMismatchError(
            f"all_reduce: tensor: got the shape {tuple(own.shape)} with {own.sparse_dim()} sparse dimensions, but "
            "other ranks differ; expected the same on every rank"
        )
    most = max(counts)
    if most:
        all_indices = _gathered(communicator, indices.t().contiguous(), most)
        all_values = _gathered(communicator, values.contiguous(), most)
        parts = [slice(rank * most, rank * most + count) for rank, count in enumerate(counts)]
        indices = torch.cat([all_indices[part] for part in parts]).t()
        # Without out=, autocast chooses the dtype, and refuses float16 on the CPU.
        values = values.new_empty((sum(counts), *values.shape[1:]))
        torch.cat([all_values[part] for part in parts], out=values)
    found = torch.sparse_coo_tensor(indices, values, own.shape, check_invariants=False).coalesce()
    with torch.no_grad():
        tensor.copy_(found)


def _gathered(communicator: Communicator, own: torch.Tensor, most: int) -> torch.Tensor:
    """Return the rows of all ranks, (W * most, ...), each rank's padded with zeros."""
    padded = own.new_zeros(most, *own.shape[1:])
    padded[: len(own)] = own
    found = own.new_empty(communicator.size * most, *own.shape[1:])
    communicator.all_gather(found, padded, name="all_reduce").wait()
    return found
