"""Fast paths on oneCCL: one native call starts the operation and waits briefly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from comm_backend_ccl import oneccl_library
from comm_backend_ccl.fast_path.kinds import MESSAGES, NATIVE, Kind
from comm_backend_ccl.fast_path.starts import Start
from comm_backend_ccl.oneccl_communicator import OneCclCommunicator
from comm_backend_ccl.tables import ONECCL_DTYPES, ONECCL_OPS, Operation
from comm_backend_ccl.work import LOOK_AROUND_S, CclWork
from comm_utils import operations
from comm_utils.flight_recorder.layout import IN_BACKGROUND
from comm_utils.flight_recorder.recorder import WAITED_FOR
from comm_utils.torch_support.flattening import flat_view, flattened, staging_memory
from comm_utils.torch_support.recorded_calls import KindsByDtype, Note

__all__ = ["planned"]

_Run = Callable[[tuple[Any, ...], int, int, int], "oneccl_library.Handle | None"]

# Sends of so much do not wait for their receive, and are announced while they travel.
_AT_ONCE_BYTES = 4096


class _ByDtype(dict[torch.dtype, _Run]):
    """``runs[dtype]`` reduces elements of it."""

    def __init__(self, group: oneccl_library.Group, operation: Operation, op: int) -> None:
        super().__init__()
        self._settled = group, operation, op

    def __missing__(self, dtype: torch.dtype) -> _Run:
        group, operation, op = self._settled
        run = self[dtype] = oneccl_library.plan(group, operation, ONECCL_DTYPES[dtype], op, 0, LOOK_AROUND_S)
        return run


def planned(ours: OneCclCommunicator, kind: Kind) -> Start:
    """Return a function that starts the operation and waits briefly, in one native call."""
    native = NATIVE[kind.operation]

    pattern = operations.get(kind.operation).pattern
    op = kind.op.name.lower() if pattern.reduces else ""
    root = kind.root if pattern.is_rooted or pattern.is_message else -1
    kinds = KindsByDtype(ours.recorded_as(), ours.ranks, kind.operation, kind.name, op=op, root=root)

    def recorded(
        run: _Run, counted: torch.Tensor, elements: int, tensors: tuple[torch.Tensor, ...], *places: int
    ) -> CclWork | None:
        """Start an operation, which the flight recorder counts as ``elements`` of the dtype of ``counted``."""
        call = kinds[counted.dtype]
        number = call.begin(elements, 4, None, None, IN_BACKGROUND if kind.watched else WAITED_FOR)
        try:
            handle = run(tensors, *places)
        except BaseException:
            call.fail(number)
            raise
        if handle is None:
            call.end(number)
            return None
        work = later(handle, *tensors)
        work.note = Note(call, number)
        return work

    def later(handle: oneccl_library.Handle, *tensors: torch.Tensor) -> CclWork:
        work = CclWork(ours, handle, tensors, kind.name)
        if kind.operation in MESSAGES:
            work.peer = kind.root
        return work

    if operations.get(kind.operation).pattern.reduces:
        runs = _ByDtype(ours.group, native, ONECCL_OPS[kind.op])

        def all_reduce(tensor: torch.Tensor) -> CclWork | None:
            address = tensor.data_ptr()
            elements = tensor.numel()
            return recorded(runs[tensor.dtype], tensor, elements, (tensor,), address, address, elements)

        def reduce_scatter(output: torch.Tensor, input: torch.Tensor) -> CclWork | None:
            places, elements = (input.data_ptr(), output.data_ptr()), output.numel()
            return recorded(runs[output.dtype], output, elements, (output, input), *places, elements)

        if kind.operation == "all_reduce":
            return all_reduce
        if kind.operation == "reduce_scatter":
            return lambda output, inputs: reduce_scatter(output, flattened(inputs, output))
        return reduce_scatter

    run = oneccl_library.plan(ours.group, native, ONECCL_DTYPES[torch.uint8], 0, kind.root, LOOK_AROUND_S)

    def on_one(tensor: torch.Tensor) -> CclWork | None:
        address = tensor.data_ptr()
        return recorded(run, tensor, tensor.numel(), (tensor,), address, address, tensor.nbytes)

    def gather(output: torch.Tensor, input: torch.Tensor) -> CclWork | None:
        places = input.data_ptr(), output.data_ptr()
        return recorded(run, input, input.numel(), (output, input), *places, input.nbytes)

    def gather_into_list(outputs: list[torch.Tensor], input: torch.Tensor) -> CclWork | None:
        memory, finish = staging_memory(outputs, input)
        work = gather(memory, flat_view(input))
        if work is not None:
            return work.then(finish)
        finish()
        return None

    def exchange(output: torch.Tensor, input: torch.Tensor, rows_out: Any = None, rows_in: Any = None) -> Any:
        if rows_out is not None:
            return ours.all_to_all_rows(output, input, rows_out, rows_in, name=kind.name)
        places, part = (input.data_ptr(), output.data_ptr()), input.numel() // ours.size
        return recorded(equal, input, part, (output, input), *places, input.nbytes // ours.size)

    if kind.operation == "all_to_all_single":
        equal = oneccl_library.plan(ours.group, Operation.ALL_TO_ALL, ONECCL_DTYPES[torch.uint8], 0, 0, LOOK_AROUND_S)
        return exchange

    def send(tensor: torch.Tensor) -> CclWork | None:
        if tensor.nbytes > _AT_ONCE_BYTES:
            ours.untagged.announce(kind.root)
            return on_one(tensor)
        work = on_one(tensor)
        ours.untagged.announce(kind.root)
        return work

    def receive(tensor: torch.Tensor) -> CclWork | None:
        return on_one(tensor) if ours.untagged.take(kind.root) else ours.receive(tensor, kind.root, name=kind.name)

    starts: dict[str, Start] = {
        "all_gather": gather_into_list,
        "all_gather_into_tensor": gather,
        "recv": receive,
        "send": send,
    }
    return starts.get(kind.operation, on_one)
