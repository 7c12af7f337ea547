"""oneCCL as a process group of ``torch.distributed``, so that DDP, FSDP2, DeviceMesh and others run on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed import ProcessGroup, Store

from comm_backend_ccl import deriving
from comm_backend_ccl.c10d_work import C10dWork
from comm_backend_ccl.communicator import Communicator
from comm_backend_ccl.layout import joined, spread
from comm_backend_ccl.tables import CAPABILITIES
from comm_backend_ccl.work import CclWork
from comm_utils.backend import Capabilities
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.reduce_op import ReduceOp, parse_reduce_op

__all__ = ["NAME", "CclProcessGroup", "register", "unregister"]

NAME = "ccl"
_Tensors = list[torch.Tensor]


class CclProcessGroup(ProcessGroup):
    """The group's methods under every name that releases of torch since 2.6 call.

    Tensors live on the CPU. An output that is not contiguous is written when the handle is waited for.
    """

    capabilities: Capabilities = CAPABILITIES

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, ranks: Sequence[int] | None = None
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.communicator: Communicator | None = Communicator(store, rank, size, timeout, ranks)
        self._store, self._timeout = store, timeout
        self._name = self._description = ""
        self._coalesced: list[CclWork] | None = None

    # --- what torch asks a group

    def getBackendName(self) -> str:
        return NAME

    def getSize(self) -> int:
        return self.size()

    def getRank(self) -> int:
        return self.rank()

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    _set_group_name = setGroupName

    def getGroupName(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _set_group_desc = setGroupDesc  # type: ignore[assignment]

    def getGroupDesc(self) -> str:
        return self._description

    def get_group_store(self) -> Store:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self.communicator is not None:
            self.communicator.set_timeout(timeout)

    setTimeout = set_timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def shutdown(self) -> None:
        communicator, self.communicator = self.communicator, None
        if communicator is not None:
            communicator.close()

    def abort(self) -> None:
        self.shutdown()

    def _open(self) -> Communicator:
        if self.communicator is None:
            raise RuntimeError("this process group was destroyed")
        self.communicator.check()
        return self.communicator

    # --- collectives

    def _started(self, work: CclWork, name: str, outcome: Sequence[torch.Tensor], options: Any = None) -> C10dWork:
        work.name = name
        timeout = getattr(options, "timeout", None)
        if isinstance(timeout, timedelta) and timeout.total_seconds() > 0:
            work.limit(timeout.total_seconds())
        if self._coalesced is not None:
            self._coalesced.append(work)
        return C10dWork(work, outcome)

    def allreduce(self, tensors: _Tensors | torch.Tensor, options: Any = None, *_: Any) -> C10dWork:
        tensor = _one(tensors, "allreduce")
        op = _op(options, tensor)
        memory, finish = _for_writing(tensor, read=True)
        work = deriving.all_reduce(self._open(), memory, op)
        return self._started(_then(work, finish), "all_reduce", [tensor], options)

    def allreduce_coalesced(self, tensors: _Tensors, options: Any = None) -> C10dWork:
        for tensor in tensors:
            _one(tensor, "allreduce_coalesced")
        communicator, op = self._open(), _op(options, *tensors)
        if len({tensor.dtype for tensor in tensors}) != 1:
            raise ArgumentTypeError("allreduce_coalesced: the tensors have different dtypes; expected one")
        together = joined([tensor.contiguous() for tensor in tensors])
        work = deriving.all_reduce(communicator, together, op)
        return self._started(_then(work, lambda: _spread_any(together, tensors)), "all_reduce", tensors, options)

    def reduce(self, tensors: _Tensors | torch.Tensor, root: Any = None, *rest: Any) -> C10dWork:
        tensor, options = _one(tensors, "reduce"), root
        op = _op(options, tensor)
        memory, finish = _for_writing(tensor, read=True)
        work = deriving.reduce(self._open(), memory, options.rootRank, op)
        return self._started(_then(work, finish), "reduce", [tensor], options)

    def broadcast(self, tensors: _Tensors | torch.Tensor, options: Any = None, *_: Any) -> C10dWork:
        tensor = _one(tensors, "broadcast")
        memory, finish = _for_writing(tensor, read=True)
        root = options if isinstance(options, int) else options.rootRank
        work = self._open().broadcast(memory, root, True)
        return self._started(_then(work, finish), "broadcast", [tensor], options)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None, *_: Any) -> C10dWork:
        targets = outputs[0] if isinstance(outputs[0], (list, tuple)) else outputs
        source = _one(inputs, "allgather")
        _fit("allgather", targets, source, self.size())
        communicator = self._open()
        together = source.new_empty(source.numel() * communicator.size)
        work = communicator.all_gather(together, source.contiguous(), True)
        return self._started(_then(work, lambda: _spread_any(together, targets)), "all_gather", targets, options)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, options: Any = None, *_: Any) -> C10dWork:
        _fit("all_gather_into_tensor", [output], input, 1, self.size())
        memory, finish = _for_writing(output)
        work = self._open().all_gather(memory, input.contiguous(), True)
        return self._started(_then(work, finish), "all_gather_into_tensor", [output], options)

    _allgather_base = all_gather_single  # type: ignore[assignment]

    def all_gather_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, options: Any = None) -> C10dWork:
        works = [self.all_gather_single(output, input, options) for output, input in zip(outputs, inputs, strict=True)]
        return C10dWork.of_all(works, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def allgather_coalesced(self, outputs: list[_Tensors], inputs: _Tensors, options: Any = None) -> C10dWork:
        # outputs[r][i] is tensor i of rank r.
        works = [
            self.allgather([[row[index] for row in outputs]], [tensor], options) for index, tensor in enumerate(inputs)
        ]
        return C10dWork.of_all(works, [tensor for row in outputs for tensor in row])

    def reduce_scatter(self, outputs: Any, inputs: Any, options: Any = None, *_: Any) -> C10dWork:
        output = _one(outputs, "reduce_scatter")
        sources = inputs[0] if isinstance(inputs[0], (list, tuple)) else inputs
        _fit("reduce_scatter", sources, output, self.size())
        return self._reduce_scatter(output, joined([one.contiguous() for one in sources]), "reduce_scatter", options)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, options: Any = None, *_: Any
    ) -> C10dWork:
        _fit("reduce_scatter_tensor", [input], output, 1, self.size())
        return self._reduce_scatter(output, input.contiguous(), "reduce_scatter_tensor", options)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def _reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, name: str, options: Any) -> C10dWork:
        op = _op(options, output)
        memory, finish = _for_writing(output)
        work = deriving.reduce_scatter(self._open(), memory, source, op)
        return self._started(_then(work, finish), name, [output], options)

    def reduce_scatter_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, options: Any = None) -> C10dWork:
        pairs = zip(outputs, inputs, strict=True)
        return C10dWork.of_all([self.reduce_scatter_single(one, other, options) for one, other in pairs], outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, options: Any = None, *_: Any) -> C10dWork:
        for given in (outputs, inputs):
            _fit("all_to_all", given, None, self.size())
        source = joined([one.contiguous() for one in inputs])
        target = source.new_empty(sum(one.numel() for one in outputs), dtype=outputs[0].dtype)
        work = self._open().all_to_all(
            target, source, [one.nbytes for one in outputs], [one.nbytes for one in inputs], True
        )
        return self._started(_then(work, lambda: _spread_any(target, outputs)), "all_to_all", outputs, options)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        options: Any = None,
        *_: Any,
    ) -> C10dWork:
        for tensor, rows in ((output, output_split_sizes), (input, input_split_sizes)):
            _check_splits(_one(tensor, "all_to_all_single"), rows, self.size())
        if output.dtype is not input.dtype:
            raise ArgumentTypeError(f"all_to_all_single: got an output of {output.dtype} and an input of {input.dtype}")
        memory, finish = _for_writing(output)
        source = input.contiguous()
        work = self._open().all_to_all_rows(memory, source, output_split_sizes, input_split_sizes, True)
        return self._started(_then(work, finish), "all_to_all_single", [output], options)

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def gather(self, outputs: Any, inputs: Any, options: Any = None, *_: Any) -> C10dWork:
        communicator, source = self._open(), _one(inputs, "gather")
        if communicator.rank != options.rootRank:
            work = communicator.gather(None, source.contiguous(), options.rootRank, True)
            return self._started(work, "gather", [], options)
        targets: _Tensors = outputs[0]
        _fit("gather", targets, source, self.size())
        together = source.new_empty(source.numel() * communicator.size)
        work = communicator.gather(together, source.contiguous(), options.rootRank, True)
        return self._started(_then(work, lambda: _spread_any(together, targets)), "gather", targets, options)

    def scatter(self, outputs: Any, inputs: Any, options: Any = None, *_: Any) -> C10dWork:
        communicator, output = self._open(), _one(outputs, "scatter")
        mine = communicator.rank == options.rootRank
        if mine:
            _fit("scatter", inputs[0], output, self.size())
        source = joined([one.contiguous() for one in inputs[0]]) if mine else None
        memory, finish = _for_writing(output)
        work = communicator.scatter(memory, source, options.rootRank, True)
        return self._started(_then(work, finish), "scatter", [output], options)

    def barrier(  # type: ignore[override]
        self, options: Any = None, *_: Any, **__: Any
    ) -> C10dWork:
        return self._started(self._open().barrier(True), "barrier", [], options)

    # --- point to point

    def send(self, tensors: _Tensors, peer: int, tag: int = 0) -> C10dWork:
        _no_tag("send", tag)
        tensor = _one(tensors, "send")
        return self._started(self._open().send(tensor.contiguous(), peer, True), "send", [tensor])

    def recv(self, tensors: _Tensors, peer: int, tag: int = 0) -> C10dWork:
        _no_tag("recv", tag)
        tensor = _one(tensors, "recv")
        memory, finish = _for_writing(tensor)
        work = _then(self._open().receive(memory, peer, True), finish)
        return self._started(work, "recv", [tensor]).of_rank(peer)

    def recv_anysource(self, tensors: _Tensors, tag: int = 0) -> C10dWork:
        raise ArgumentError("recv: src: oneCCL cannot receive from anyone; name the rank")

    # --- several operations as one

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> C10dWork:
        works, self._coalesced = self._coalesced or [], None
        return C10dWork.of_all([C10dWork(work, []) for work in works], [])

    startCoalescing = _start_coalescing
    endCoalescing = _end_coalescing


def register() -> None:
    """Make ``"ccl"`` a backend of ``torch.distributed`` for CPU tensors; again is a no-op.

    Raises:
        BackendUnavailableError: another library has taken the name.
    """
    from comm_utils.errors import BackendUnavailableError

    known = c10d.Backend._plugins.get(NAME.upper())
    if known is not None and known.creator_fn is not _create:
        raise BackendUnavailableError(
            f"backend {NAME!r} of torch.distributed was registered by {known.creator_fn.__module__}; "
            "import comm_orchestrator before it, or do without it"
        )
    if known is None:
        c10d.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def unregister() -> None:
    """Give the name ``"ccl"`` back, for another library that registers it."""
    backend: Any = c10d.Backend
    if backend._plugins.get(NAME.upper()) is None or backend._plugins[NAME.upper()].creator_fn is not _create:
        return
    del backend._plugins[NAME.upper()]
    delattr(backend, NAME.upper())
    backend.backend_list.remove(NAME)
    for table in (backend.backend_capability, backend.backend_type_map):
        table.pop(NAME, None)


def _create(options: Any, _: Any = None) -> CclProcessGroup:
    return CclProcessGroup(
        options.store, options.group_rank, options.group_size, options.timeout, options.global_ranks_in_group or None
    )


def _one(tensors: Any, call: str) -> torch.Tensor:
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
    if tensor.layout is not torch.strided:
        raise ArgumentTypeError(f"{call}: got a tensor of layout {tensor.layout}; expected a dense one")
    return tensor


def _fit(call: str, tensors: Any, like: torch.Tensor | None, count: int, parts: int = 1) -> None:
    """Check that there are ``count`` tensors, each of the dtype and ``parts`` times the size of ``like``."""
    if len(tensors) != count:
        raise ArgumentError(f"{call}: got {len(tensors)} tensors; expected {count}")
    for tensor in tensors:
        _one(tensor, call)
    if like is None:
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise ArgumentTypeError(f"{call}: the tensors have different dtypes; expected one")
        return
    _one(like, call)
    for tensor in tensors:
        if tensor.dtype is not like.dtype:
            raise ArgumentTypeError(f"{call}: got tensors of {tensor.dtype} and {like.dtype}; expected one dtype")
        if tensor.numel() != parts * like.numel():
            raise ArgumentError(
                f"{call}: got a tensor of {tensor.numel()} elements beside one of {like.numel()}; expected "
                f"{parts * like.numel()}"
            )


def _check_splits(tensor: torch.Tensor, rows: Sequence[int], size: int) -> None:
    have = tensor.shape[0] if tensor.dim() else 1
    if not rows:
        if have % size:
            raise ArgumentError(f"all_to_all_single: got {have} rows, which do not divide by {size} ranks")
    elif len(rows) != size or sum(rows) != have or min(rows) < 0:
        raise ArgumentError(f"all_to_all_single: got split sizes {list(rows)} for {have} rows and {size} ranks")


def _op(options: Any, *tensors: torch.Tensor) -> ReduceOp:
    op = parse_reduce_op("sum" if options is None else getattr(options, "reduceOp", options))
    for tensor in tensors:
        deriving.check(op, tensor.dtype)
    return op


def _no_tag(call: str, tag: int) -> None:
    if tag != 0:
        raise ArgumentError(f"{call}: tag: got {tag}; oneCCL has no tags, expected 0")


def _for_writing(tensor: torch.Tensor, read: bool = False) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Contiguous memory for an output, and how to bring it to where it belongs."""
    if tensor.is_contiguous():
        return tensor, None
    memory = tensor.contiguous() if read else torch.empty(tensor.shape, dtype=tensor.dtype)

    def finish() -> None:
        tensor.copy_(memory)

    return memory, finish


def _spread_any(source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    if all(target.is_contiguous() for target in targets):
        spread(source, targets)
        return
    begin = 0
    for target in targets:
        target.copy_(source[begin : begin + target.numel()].view(target.shape))
        begin += target.numel()


def _then(work: CclWork, step: Callable[[], None] | None) -> CclWork:
    """``work`` with one more step at its end."""
    first = work.finish
    if step is None:
        return work
    if first is None:
        work.finish = step
    else:

        def both() -> None:
            first()
            step()

        work.finish = both
    return work
