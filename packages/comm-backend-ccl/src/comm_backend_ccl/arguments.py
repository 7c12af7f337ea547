"""Validation of calls through ``torch.distributed``; errors name the call and raise before anything is sent.

Calls through this project's own API never get here: ``comm_collectives`` has checked them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.reduce_op import ReduceOp, parse_reduce_op
from comm_utils.torch_support.reduction_encoding import refusal

__all__ = [
    "check_exchange",
    "check_lengths",
    "check_own_parts",
    "check_peer",
    "check_root",
    "check_tag",
    "fit",
    "is_integer_average",
    "one",
    "op_of",
]


def one(tensors: Any, call: str, sparse: bool = False) -> torch.Tensor:
    """Return the tensor that is meant, on the CPU and dense, or of any layout where ``sparse``."""
    if isinstance(tensors, torch.Tensor):
        tensor = tensors
    elif len(tensors) == 1:
        tensor = tensors[0]
    else:
        raise ArgumentError(f"{call}: got {len(tensors)} tensors; expected one")
    if tensor.device.type != "cpu":
        raise ArgumentError(
            f"{call}: got a tensor on {tensor.device}; ccl serves CPU tensors, xccl or the discontinued "
            "oneccl_bindings_for_pytorch those on XPUs"
        )
    if tensor.layout is not torch.strided and not sparse:
        raise ArgumentTypeError(f"{call}: got a tensor of layout {tensor.layout}; expected a dense one")
    return tensor


def fit(call: str, tensors: Any, like: torch.Tensor | None, count: int, parts: int = 1) -> None:
    """Check that there are ``count`` tensors, each of the dtype and ``parts`` times the size of ``like``."""
    if len(tensors) != count:
        raise ArgumentError(f"{call}: got {len(tensors)} tensors; expected {count}")
    for tensor in tensors:
        one(tensor, call)
    if like is None:
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise ArgumentTypeError(f"{call}: the tensors have different dtypes; expected one")
        return
    one(like, call)
    for tensor in tensors:
        if tensor.dtype is not like.dtype:
            raise ArgumentTypeError(f"{call}: got tensors of {tensor.dtype} and {like.dtype}; expected one dtype")
        if tensor.numel() != parts * like.numel():
            raise ArgumentError(
                f"{call}: got a tensor of {tensor.numel()} elements beside one of {like.numel()}; expected "
                f"{parts * like.numel()}"
            )


def check_exchange(
    output: torch.Tensor,
    input: torch.Tensor,
    output_rows: Sequence[int],
    input_rows: Sequence[int],
    size: int,
    rank: int,
) -> None:
    """Check the tensors and split sizes of an exchange; empty ones are equal parts."""
    for tensor, rows in ((output, output_rows), (input, input_rows)):
        _check_splits(one(tensor, "all_to_all_single"), rows, size)
    if output.dtype is not input.dtype:
        raise ArgumentTypeError(f"all_to_all_single: got an output of {output.dtype} and an input of {input.dtype}")
    # Without split sizes, parts have the input's size, and more of them would be written behind the output.
    if not output_rows and not input_rows and output.numel() != input.numel():
        raise ArgumentError(
            f"all_to_all_single: got an output of {output.numel()} elements and an input of {input.numel()}; without "
            "split sizes both have to have as many"
        )
    own = [_own_part(tensor, rows, size, rank) for tensor, rows in ((output, output_rows), (input, input_rows))]
    check_own_parts("all_to_all_single", *own)


def check_own_parts(call: str, received: int, sent: int) -> None:
    """Check that this rank expects as many elements from itself as it sends to itself."""
    if received != sent:
        raise ArgumentError(
            f"{call}: got {sent} elements to send to this rank itself, and room for {received}; expected as many"
        )


def _own_part(tensor: torch.Tensor, rows: Sequence[int], size: int, rank: int) -> int:
    have = tensor.shape[0] if tensor.dim() else 1
    return tensor.numel() // size if not rows else tensor.numel() // max(have, 1) * rows[rank]


def _check_splits(tensor: torch.Tensor, rows: Sequence[int], size: int) -> None:
    """Check that ``rows``, empty for equal parts, share out the first dimension among ``size`` ranks."""
    have = tensor.shape[0] if tensor.dim() else 1
    if not rows:
        if have % size:
            raise ArgumentError(f"all_to_all_single: got {have} rows, which do not divide by {size} ranks")
    elif len(rows) != size or sum(rows) != have or min(rows) < 0:
        raise ArgumentError(f"all_to_all_single: got split sizes {list(rows)} for {have} rows and {size} ranks")


def check_lengths(call: str, outputs: Sequence[object], inputs: Sequence[object]) -> None:
    """Check that a call of several operations has an output for each input."""
    if len(outputs) != len(inputs):
        raise ArgumentError(f"{call}: got {len(outputs)} outputs for {len(inputs)} inputs; expected one for each")


def op_of(call: str, options: Any, *tensors: torch.Tensor) -> ReduceOp:
    """Return the reduction that c10d's options name, which every dtype can do."""
    op = parse_reduce_op("sum" if options is None else getattr(options, "reduceOp", options), call)
    for tensor in tensors:
        if (reason := refusal(op, tensor.dtype)) is not None and not is_integer_average(op, tensor.dtype):
            raise ArgumentTypeError(f"{call}: {reason}")
    return op


def is_integer_average(op: ReduceOp, dtype: torch.dtype) -> bool:
    """Return whether this is an average of integers, which programs on NCCL take for granted."""
    return op is ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def check_root(call: str, root: int, size: int) -> int:
    """Return the group rank of a root."""
    if not 0 <= root < size:
        raise ArgumentError(f"{call}: root: got rank {root}; expected one of the group, 0 to {size - 1}")
    return root


def check_peer(call: str, peer: int, size: int, rank: int) -> int:
    """Return the group rank of the other rank of a message."""
    if not 0 <= peer < size or peer == rank:
        raise ArgumentError(
            f"{call}: got rank {peer} as the peer; expected another rank of the group, of 0 to {size - 1}, as this one "
            f"is {rank}"
        )
    return peer


def check_tag(call: str, tag: int) -> int:
    """Return the tag of a message, an integer from 0 to 2**31 - 1."""
    if not 0 <= tag < 1 << 31:
        raise ArgumentError(f"{call}: tag: got {tag}; expected an integer of 0 to {(1 << 31) - 1}")
    return tag
