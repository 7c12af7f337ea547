"""Starts of operations on plain tensors, whichever engine a communicator has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comm_backend_ccl.communicator import Communicator
from comm_backend_ccl.fast_path.kinds import Kind
from comm_backend_ccl.work import CclWork
from comm_utils.torch_support.flattening import flattened, staging_memory

__all__ = ["STARTS", "Start"]

#: Starts an operation on the user's tensors: None where it is complete, else a handle.
Start = Callable[..., "CclWork | None"]


def _all_gather(ours: Communicator, kind: Kind) -> Start:
    return lambda outputs, input: ours.all_gather_parts(outputs, input, kind.watched, kind.name)


def _all_gather_into_tensor(ours: Communicator, kind: Kind) -> Start:
    return lambda output, input: ours.all_gather(output, input, kind.watched, kind.name)


def _all_reduce(ours: Communicator, kind: Kind) -> Start:
    return lambda tensor: ours.all_reduce(tensor, kind.op, kind.watched, kind.name)


def _all_to_all(ours: Communicator, kind: Kind) -> Start:
    def start(outputs: Any, inputs: Any) -> CclWork:
        source = flattened(inputs)
        memory, finish = staging_memory(outputs, source)
        sizes_out, sizes_in = [one.numel() for one in outputs], [one.numel() for one in inputs]
        return ours.all_to_all(memory, source, sizes_out, sizes_in, kind.watched, kind.name).then(finish)

    return start


def _all_to_all_single(ours: Communicator, kind: Kind) -> Start:
    return lambda output, input, rows_out=None, rows_in=None: ours.all_to_all_rows(
        output, input, rows_out, rows_in, kind.watched, kind.name
    )


def _barrier(ours: Communicator, kind: Kind) -> Start:
    return lambda: ours.barrier(kind.watched, kind.name)


def _broadcast(ours: Communicator, kind: Kind) -> Start:
    return lambda tensor: ours.broadcast(tensor, kind.root, kind.watched, kind.name)


def _gather(ours: Communicator, kind: Kind) -> Start:
    return lambda tensor, outputs: ours.gather_parts(outputs, tensor, kind.root, kind.watched, kind.name)


def _receive(ours: Communicator, kind: Kind) -> Start:
    return lambda tensor: ours.receive(tensor, kind.root, name=kind.name)


def _reduce(ours: Communicator, kind: Kind) -> Start:
    return lambda tensor: ours.reduce(tensor, kind.root, kind.op, kind.watched, kind.name)


def _reduce_scatter(ours: Communicator, kind: Kind) -> Start:
    return lambda output, inputs: ours.reduce_scatter(
        output, flattened(inputs, output), kind.op, kind.watched, kind.name
    )


def _reduce_scatter_tensor(ours: Communicator, kind: Kind) -> Start:
    return lambda output, input: ours.reduce_scatter(output, input, kind.op, kind.watched, kind.name)


def _scatter(ours: Communicator, kind: Kind) -> Start:
    return lambda tensor, inputs: ours.scatter_parts(tensor, inputs, kind.root, kind.watched, kind.name)


def _send(ours: Communicator, kind: Kind) -> Start:
    return lambda tensor: ours.send(tensor, kind.root, name=kind.name)


STARTS: dict[str, Callable[[Communicator, Kind], Start]] = {
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
    "broadcast": _broadcast,
    "gather": _gather,
    "recv": _receive,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "scatter": _scatter,
    "send": _send,
}
