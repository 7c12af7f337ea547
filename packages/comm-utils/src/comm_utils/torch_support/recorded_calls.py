"""Calls with tensors in the flight recorder: what is recorded of them, and the note that says what became of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from comm_utils import operations
from comm_utils.flight_recorder.recorder import RECORDER, WAITED_FOR, Kind
from comm_utils.flight_recorder.reduce_op import asked_op
from comm_utils.operations import Form
from comm_utils.torch_support.device_calls import DeviceCalls
from comm_utils.torch_support.passed_tensors import AS_IT_TRAVELS, Passed, dtype_name, passed

__all__ = ["KindsByDtype", "Note", "exchanged", "kind_of_call", "measure_of"]


class Note(NamedTuple):
    """A call that the flight recorder has, and how to say what became of it.

    Attributes:
        device: the type of device of its tensors, or of those that its library serves.
    """

    kind: Kind
    number: int
    device: str = "cpu"

    def end(self) -> None:
        """Record the end, or that the host has gone on where it does not wait for the device."""
        self.kind.end(self.number)

    def complete(self) -> None:
        """Record the end of a call that is known to have completed, also on its device."""
        self.kind.complete(self.number)

    def fail(self) -> None:
        """Record a failure."""
        self.kind.fail(self.number)

    def wait(self, state: int = WAITED_FOR) -> None:
        """Record that somebody waits for what began in the background; ``state`` may be ``layout.LIMITED``."""
        self.kind.wait(self.number, state)


def kind_of_call(
    group: int,
    ranks: Sequence[int],
    operation: str,
    call: str,
    dtype: torch.dtype | None = None,
    *,
    op: str = "",
    root: int = -1,
    tag: int = 0,
) -> Kind:
    """Return a kind of call in the flight recorder.

    It is a call with what the program passed, where the library gets something else.

    Args:
        group: the group's number there.
        ranks: the group's global ranks.
        operation: as ``Backend.fast_path`` names it, or as it is measured.
        call: the call of the user's in whose course it is; "" is the operation.
        dtype: of the elements; None is a call without tensors.
        op: the reduce op, or "".
        root: the group rank of the root or of the peer; -1 has none, or is any peer.
    """
    what = passed()
    if what is AS_IT_TRAVELS or dtype is None:
        return _kind(group, ranks, operation, call, dtype, asked_op(op), root, tag)
    kind = _kind(group, ranks, operation, call, what.dtype or dtype, asked_op(op), root, tag, what.joined)
    return kind if what.per_element == 1 else _counted_as(what, kind)


def _counted_as(what: Passed, kind: Kind) -> Kind:
    """Return ``kind``, whose ``begin`` is given the elements that travel and records those that were passed."""

    def begin(elements: int, depth: int, sent: Any = None, received: Any = None, state: int = WAITED_FOR, /) -> int:
        if sent is not None:
            sent, received = [what.elements(one) for one in sent], [what.elements(one) for one in received]
        return kind.begin(what.elements(elements), depth + 1, sent, received, state)

    return kind._replace(begin=begin)


def _kind(
    group: int,
    ranks: Sequence[int],
    operation: str,
    call: str,
    dtype: torch.dtype | None,
    op: str,
    root: int,
    tag: int = 0,
    joined: int = 0,
) -> Kind:
    row = operations.get(operation)
    rank = ranks[root] if root >= 0 else -1
    name, root, peer = (operation, -1, rank) if row.pattern.is_message else (row.measured_as, rank, -1)
    return RECORDER.kind(group, name, call, "" if dtype is None else dtype_name(dtype), op, root, peer, tag, joined)


def exchanged(
    output: torch.Tensor, input: torch.Tensor, rows_out: Sequence[int] | None, rows_in: Sequence[int] | None, size: int
) -> tuple[int, list[int] | None, list[int] | None]:
    """Return the elements of a part of an exchange, and those to and from each rank where parts differ."""
    elements = input.numel() // size
    if (not rows_out or rows_out.count(rows_out[0]) == size) and (not rows_in or rows_in.count(rows_in[0]) == size):
        return elements, None, None
    return elements, _in_elements(input, rows_in, size), _in_elements(output, rows_out, size)


def _in_elements(tensor: torch.Tensor, rows: Sequence[int] | None, size: int) -> list[int]:
    if not rows:
        return [tensor.numel() // size] * size
    in_row = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 0
    return [in_row * number for number in rows]


class KindsByDtype(dict["torch.dtype | None", Kind]):
    """``kinds[dtype]`` is :func:`kind_of_call` of that dtype and of the other arguments, which are given here.

    The reduce op is that of the call in whose course this is made, not of the first call of a dtype.

    Args:
        calls: follows them on a device; None where the host waits for their ends.
    """

    def __init__(
        self,
        group: int,
        ranks: Sequence[int],
        operation: str,
        call: str,
        *,
        op: str = "",
        root: int = -1,
        calls: DeviceCalls | None = None,
    ) -> None:
        super().__init__()
        self._calls = calls
        self._describe = partial(_kind, group, ranks, operation, call, op=asked_op(op), root=root)

    def __missing__(self, dtype: torch.dtype | None) -> Kind:
        kind = self._describe(dtype=dtype)
        if self._calls is not None:
            kind = self._calls.recorded(kind)
        self[dtype] = kind
        return kind


# --- what is recorded of the tensors of a call: dtype, elements, and those to and from each rank

#: Takes the tensor arguments of a fast path.
Measure = Callable[..., "tuple[torch.dtype | None, int, Any, Any]"]


def measure_of(operation: str, size: int) -> Measure:
    """Return the function that measures the tensors of an operation, in a group of ``size`` ranks."""
    row = operations.get(operation)
    if row.pattern.is_empty:
        return lambda: (None, 0, None, None)
    if row.pattern.uneven:
        return _of_lists if row.tensors[0].form is Form.PER_RANK else partial(_of_exchange, size)
    at = row.tensors.index(row.counted[0])
    return lambda *tensors: (tensors[at].dtype, tensors[at].numel(), None, None)


def _of_exchange(size: int, output: Any, input: Any, rows_out: Any = None, rows_in: Any = None) -> Any:
    return (input.dtype, *exchanged(output, input, rows_out, rows_in, size))


def _of_lists(outputs: Any, inputs: Any) -> Any:
    sent, received = [one.numel() for one in inputs], [one.numel() for one in outputs]
    elements, size = sent[0], len(sent)
    if sent.count(elements) == size and received.count(elements) == size:  # equal parts
        return inputs[0].dtype, elements, None, None
    return inputs[0].dtype, sum(sent) // size, sent, received
