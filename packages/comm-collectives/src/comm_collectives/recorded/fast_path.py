"""The fast path of a backend, recorded: what stands in its place may cost as little as can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch.distributed import ProcessGroup

from comm_collectives.composed import Root
from comm_collectives.labels import NO_LABEL, label
from comm_collectives.recorded.call_series import MOST_KNOWN
from comm_utils import operations
from comm_utils.backend import Work
from comm_utils.fast_path import FastPath
from comm_utils.observability.series import NUMBERS_WAITING

if TYPE_CHECKING:
    from comm_collectives.recorded.timed_calls import TimedCalls

__all__ = ["Payload", "recorded_fast_path", "splits_of"]

# What an argument that is no plain tensor may raise; the fast path would refuse it.
_NOT_PLAIN = (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError)


class Payload(NamedTuple):
    """The attributes of the tensors of one call that are recorded, named as those of a tensor."""

    dtype: torch.dtype
    nbytes: int
    is_cpu: bool
    device: torch.device


def recorded_fast_path(
    backend: TimedCalls, operation: str, detail: Any, group: ProcessGroup | None, async_op: bool, call: FastPath
) -> FastPath:
    """Return ``call``, the fast path of the wrapped backend, recorded."""
    travels = _TRAVELS.get(operation, operation)
    payload, key_of = _PAYLOADS.get(operation, (_first, _key_of_first))
    if operation == "all_to_all_single" and backend.call.startswith("reduce_scatter"):
        payload, key_of = _second, _key_of_second
    op, source = operations.get(operation).op_and_root(detail)
    root = source, None
    if async_op:
        return _asynchronous(backend, travels, payload, group, op, root, call)
    return _synchronous(backend, travels, payload, key_of, group, op, root, call)


def splits_of(
    output: torch.Tensor, input: torch.Tensor, rows_out: Sequence[int] | None, rows_in: Sequence[int] | None
) -> dict[str, Any] | None:
    """Return the parts of an exchange in elements; None where they are equal."""
    if not rows_out and not rows_in:
        return None
    found = {}
    for name, tensor, rows in (("input_splits", input, rows_in), ("output_splits", output, rows_out)):
        if rows:
            in_row = tensor.numel() // max(tensor.shape[0], 1)
            found[name] = [number * in_row for number in rows]
    return found


def _synchronous(
    backend: TimedCalls,
    operation: str,
    payload: Callable[..., Any],
    key_of: Callable[..., object],
    group: ProcessGroup | None,
    op: object,
    root: Root,
    call: Callable[..., bool],
) -> FastPath:
    log, kind_of, observe = backend._log, backend._kind_of, backend._observe
    known: dict[object, tuple[int, Any]] = {}
    now, label_of, no_label = perf_counter_ns, label.get, NO_LABEL
    recorder = log.recorder
    waiting = recorder.waiting
    wait = waiting.extend
    exchanges = operation == "all_to_all_single"

    def recorded(*tensors: Any) -> bool:
        # Looked up before the call, which may leave little in the caches.
        try:
            key = key_of(*tensors)
            found = known.get(key)
            is_usual = log.is_plain and label_of() is no_label and not (exchanges and log.writes)
            counted = payload(*tensors) if found is None or not is_usual else None
        except _NOT_PLAIN:
            return False
        if not is_usual:
            splits = _splits(tensors) if exchanges and log.writes else None
            return not log.ranges and observe(
                operation, group, counted, call, tensors, op, root, splits=splits, is_fast=True
            )
        if counted is not None and not counted.is_cpu:
            return observe(operation, group, counted, call, tensors, op, root, is_fast=True)
        begin = now()
        if not call(*tensors):
            return False
        end = now()
        if found is None:
            kind = kind_of(operation, group, counted, op, root, 0, False)
            if kind.series is not None and kind.own is None:  # settings may have changed, in another thread
                if len(known) >= MOST_KNOWN:
                    known.clear()
                known[key] = kind.series.number, kind.counter
            kind.add(next(kind.counter), begin, end)
            return True
        wait((found[0], next(found[1]), begin, end))
        if len(waiting) >= NUMBERS_WAITING or end > recorder.due_ns:
            recorder.settle()
        return True

    return recorded


def _asynchronous(
    backend: TimedCalls,
    operation: str,
    payload: Callable[..., Any],
    group: ProcessGroup | None,
    op: object,
    root: Root,
    call: Callable[..., Work | None],
) -> FastPath:
    log, observe = backend._log, backend._observe

    def recorded(*tensors: Any) -> Work | None:
        if log.ranges:
            return None
        try:
            counted = payload(*tensors)
            splits = _splits(tensors) if operation == "all_to_all_single" else None
        except _NOT_PLAIN:
            return None
        return observe(operation, group, counted, call, tensors, op, root, async_op=True, splits=splits, is_fast=True)

    return recorded


# --- whose size counts, and what similar calls have in common, which costs less to find

# The last is whether it is on the CPU: one fast path may serve several devices.
_Key: TypeAlias = tuple[torch.dtype, int, bool]


def _nothing() -> None:
    return None


def _first(tensor: Any, *_: Any) -> Any:
    return tensor


def _key_of_first(tensor: Any, *_: Any) -> _Key:
    return tensor.dtype, tensor.nbytes, tensor.is_cpu


def _second(_: Any, tensor: Any, *__: Any) -> Any:
    return tensor


def _key_of_second(_: Any, tensor: Any, *__: Any) -> _Key:
    return tensor.dtype, tensor.nbytes, tensor.is_cpu


def _larger(output: Any, input: Any, *_: Any) -> Any:
    return input if output.nbytes <= input.nbytes else output


def _key_of_larger(output: Any, input: Any, *_: Any) -> _Key:
    sent, received = input.nbytes, output.nbytes
    return input.dtype, sent if received <= sent else received, input.is_cpu


def _larger_list(outputs: Any, inputs: Any) -> Payload:
    first = inputs[0]
    return Payload(first.dtype, _key_of_lists(outputs, inputs)[1], first.is_cpu, first.device)


def _key_of_lists(outputs: Any, inputs: Any) -> _Key:
    sent = received = 0
    for one in inputs:
        sent += one.nbytes
    for one in outputs:
        received += one.nbytes
    return inputs[0].dtype, sent if received <= sent else received, inputs[0].is_cpu


def _splits(tensors: Sequence[Any]) -> dict[str, Any] | None:
    if isinstance(tensors[0], list):
        outputs, inputs = tensors
        return {"input_splits": [one.numel() for one in inputs], "output_splits": [one.numel() for one in outputs]}
    return splits_of(*tensors)


#: What a call travels as, where that is another operation.
_TRAVELS = {"all_to_all": "all_to_all_single", "reduce_scatter": "reduce_scatter_tensor"}
_PAYLOADS: dict[str, tuple[Callable[..., Any], Callable[..., object]]] = {
    "all_gather": (_second, _key_of_second),
    "all_gather_into_tensor": (_second, _key_of_second),
    "all_to_all": (_larger_list, _key_of_lists),
    "all_to_all_single": (_larger, _key_of_larger),
    "barrier": (_nothing, _nothing),
}
