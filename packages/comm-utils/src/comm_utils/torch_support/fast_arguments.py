"""The tensor arguments, as the user gives them, that the fast paths of every backend accept.

An :data:`Accept` returns whether the fast path may take the call. It refuses whatever the checked path refuses, and
calls that the checked path serves with copies. Tensors that require gradients are accepted where an operation has one
tensor, which it overwrites in place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from comm_utils import operations
from comm_utils.operations import Form
from comm_utils.torch_support.plain_tensors import PlainTensors, is_intercepted, plain_tensors

__all__ = ["Accept", "acceptance", "are_disjoint", "overwrites"]

Accept: TypeAlias = Callable[..., bool]


def acceptance(
    operation: str,
    device_type: str,
    dtypes: Iterable[torch.dtype],
    W: int,
    rank: int,
    root: int | None = None,
    *,
    inference: bool = False,
) -> Accept | None:
    """Make what accepts the tensor arguments of ``operation``; None where no fast path takes tensors of their forms.

    Args:
        device_type, dtypes, inference: see :func:`comm_utils.torch_support.plain_tensors.plain_tensors`.
        W: the size of the group.
        rank: this rank within the group.
        root: the group rank of the root, for ``gather`` and ``scatter``.
    """
    tensors = operations.get(operation).tensors
    make = _ACCEPT.get((tuple(one.form for one in tensors), any(one.at_root for one in tensors)))
    if make is None:
        return None
    return make(plain_tensors(device_type, dtypes, inference=inference, grad=make is _one), W, rank, root)


def are_disjoint(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two contiguous tensors of one device share no memory."""
    start, first = one.data_ptr(), other.data_ptr()
    return start + one.nbytes <= first or first + other.nbytes <= start


def overwrites(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether writing contiguous ``outputs``, no two of which share memory, changes one of the ``inputs``."""
    written = sorted([(tensor.data_ptr(), tensor.nbytes) for tensor in outputs])
    for tensor in inputs:
        start = tensor.data_ptr()
        before = bisect_left(written, (start + tensor.nbytes,))
        # The last output that begins before the end of the input is the one that ends last.
        if before and sum(written[before - 1]) > start:
            return True
    return False


def _nothing(are_plain: PlainTensors, W: int, rank: int, root: int | None) -> Accept:
    return lambda: not is_intercepted()


def _one(are_plain: PlainTensors, W: int, rank: int, root: int | None) -> Accept:
    return lambda tensor: are_plain((tensor,))


def _gathered(are_plain: PlainTensors, W: int, rank: int, root: int | None) -> Accept:
    """Accept an output of W times the input, which may lie in this rank's part of it."""

    def accept(output: torch.Tensor, input: torch.Tensor) -> bool:
        if not are_plain((output, input)):
            return False
        size, start, first = input.nbytes, output.data_ptr(), input.data_ptr()
        return output.nbytes == W * size and (
            start + W * size <= first or first + size <= start or first == start + rank * size
        )

    return accept


def _scattered(are_plain: PlainTensors, W: int, rank: int, root: int | None) -> Accept:
    """Accept an input of W times the output."""

    def accept(output: torch.Tensor, input: torch.Tensor) -> bool:
        if not are_plain((output, input)):
            return False
        size, start, first = output.nbytes, output.data_ptr(), input.data_ptr()
        return input.nbytes == W * size and (start + size <= first or first + W * size <= start)

    return accept


def _exchanged(are_plain: PlainTensors, W: int, rank: int, root: int | None) -> Accept:
    """Accept two tensors in equal parts, or with the lists of rows that each rank sends and gets."""

    def accept(output: Any, input: Any, rows_out: Any = None, rows_in: Any = None) -> bool:
        if not are_plain((output, input)):
            return False
        shape = input.shape
        if rows_out is None and rows_in is None:
            return output.shape == shape and (shape[0] if shape else 1) % W == 0 and are_disjoint(output, input)
        if not shape or output.shape[1:] != shape[1:] or not output.dim():
            return False
        for rows, have in ((rows_out, output.shape[0]), (rows_in, shape[0])):
            if type(rows) is not list or len(rows) != W:
                return False
            for count in rows:
                if type(count) is not int or count < 0:
                    return False
            if sum(rows) != have:
                return False
        return rows_out[rank] == rows_in[rank] and are_disjoint(output, input)

    return accept


def _into_list(are_plain: PlainTensors, W: int, rank: int, root: int | None) -> Accept:
    """Accept W outputs of the shape of the input, which may be this rank's one."""

    def accept(outputs: Any, input: Any) -> bool:
        if type(outputs) is not list or len(outputs) != W or not are_plain((input, *outputs)):
            return False
        return _fit(outputs, input, rank)

    return accept


def _gathered_on_root(are_plain: PlainTensors, W: int, rank: int, root: int | None) -> Accept:
    if rank != root:
        return lambda tensor, parts: parts is None and are_plain((tensor,))
    into_list = _into_list(are_plain, W, rank, root)
    return lambda tensor, parts: into_list(parts, tensor)


def _from_list(are_plain: PlainTensors, W: int, rank: int, root: int | None) -> Accept:
    """Accept W inputs of the shape of the output, wherever they lie."""

    def accept(output: Any, inputs: Any) -> bool:
        if type(inputs) is not list or len(inputs) != W or not are_plain((output, *inputs)):
            return False
        return _are_alike(inputs, output)

    return accept


def _lists_exchanged(are_plain: PlainTensors, W: int, rank: int, root: int | None) -> Accept:
    """Accept two lists of W tensors of any sizes; no two outputs share memory."""

    def accept(outputs: Any, inputs: Any) -> bool:
        if type(outputs) is not list or type(inputs) is not list or len(outputs) != W or len(inputs) != W:
            return False
        if not are_plain((*outputs, *inputs)):
            return False
        return outputs[rank].numel() == inputs[rank].numel() and _lie_apart(outputs)

    return accept


def _list_of_any(are_plain: PlainTensors, W: int, rank: int, root: int | None) -> Accept:
    """Accept a list of tensors, each of which is overwritten."""

    def accept(tensors: Any) -> bool:
        return type(tensors) is list and bool(tensors) and are_plain(tensors)

    return accept


def _are_alike(parts: Sequence[torch.Tensor], like: torch.Tensor) -> bool:
    if like.dim() == 1:  # the shape costs more to ask for than the size, which is enough then
        size = like.nbytes
        for part in parts:  # noqa: SIM110 (a generator takes twice as long)
            if part.nbytes != size or part.dim() != 1:
                return False
        return True
    shape = like.shape
    return not any(part.shape != shape for part in parts)


def _fit(parts: Sequence[torch.Tensor], tensor: torch.Tensor, rank: int) -> bool:
    """Return whether ``parts`` are of the shape of ``tensor``, which is the one of ``rank`` or lies apart from all."""
    if not _are_alike(parts, tensor):
        return False
    size, own = tensor.nbytes, tensor.data_ptr()
    starts = [part.data_ptr() for part in parts]
    if own != starts[rank]:
        for start in starts:
            if start < own + size and own < start + size:
                return False  # read while others' elements arrive there
    starts.sort()
    end = 0
    for start in starts:
        if start < end:
            return False
        end = start + size
    return True


def _lie_apart(tensors: Sequence[torch.Tensor]) -> bool:
    end = 0
    for start, size in sorted([(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]):
        if start < end:
            return False
        end = start + size
    return True


#: By the forms of an operation's tensor arguments, in order, and whether only the root gives one of them.
_ACCEPT: dict[tuple[tuple[Form, ...], bool], Callable[[PlainTensors, int, int, int | None], Accept]] = {
    ((), False): _nothing,
    ((Form.SINGLE,), False): _one,
    ((Form.SEVERAL,), False): _list_of_any,
    ((Form.FLAT, Form.SINGLE), False): _gathered,
    ((Form.SINGLE, Form.FLAT), False): _scattered,
    ((Form.SINGLE, Form.SINGLE), False): _exchanged,
    ((Form.PER_RANK, Form.SINGLE), False): _into_list,
    ((Form.SINGLE, Form.PER_RANK), False): _from_list,
    ((Form.PER_RANK, Form.PER_RANK), False): _lists_exchanged,
    ((Form.SINGLE, Form.PER_RANK), True): _gathered_on_root,
}
