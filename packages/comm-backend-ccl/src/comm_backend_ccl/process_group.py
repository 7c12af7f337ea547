"""Both engines as a process group of ``torch.distributed``, so that DDP, FSDP2, DeviceMesh and others run on it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup, Store
from torch.distributed import distributed_c10d as internals

from comm_backend_ccl import reductions
from comm_backend_ccl.arguments import (
    check_exchange,
    check_lengths,
    check_own_parts,
    check_peer,
    check_root,
    check_tag,
    fit,
    one,
    op_of,
)
from comm_backend_ccl.c10d_work import C10dWork
from comm_backend_ccl.communicator import Communicator
from comm_backend_ccl.communicator_factory import make_communicator
from comm_backend_ccl.fast_path.kinds import Kind
from comm_backend_ccl.fast_path.shared import started_natively
from comm_backend_ccl.layout import for_reading, for_writing, unflatten_any
from comm_backend_ccl.overloads import overloaded
from comm_backend_ccl.shared_communicator import SharedCommunicator
from comm_backend_ccl.shared_tensors import empty_shared
from comm_backend_ccl.sparse import all_reduce_sparse
from comm_backend_ccl.work import ANY_SOURCE, CclWork, seconds
from comm_utils.backend import Capabilities
from comm_utils.errors import ArgumentTypeError, BackendUnavailableError
from comm_utils.fast_path import FastPath
from comm_utils.reduce_op import ReduceOp
from comm_utils.torch_support.flattening import flatten
from comm_utils.torch_support.monitored_barrier import pass_monitored_barrier
from comm_utils.torch_support.passed_tensors import passing_joined
from comm_utils.torch_support.uncompiled import uncompiled

__all__ = ["NAME", "CclProcessGroup"]

NAME = "ccl"
_Tensors = list[torch.Tensor]
_OF_THE_LIBRARY = "{}: groups of the backend 'ccl' cannot do this themselves; call torch.distributed.new_group()"


@uncompiled
class CclProcessGroup(ProcessGroup):
    """The group's methods under every name that releases of torch since 2.6 call.

    Tensors live on the CPU. An output that is not contiguous is written when the handle is waited for.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, ranks: Sequence[int] | None = None
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.communicator: Communicator | None = make_communicator(store, rank, size, timeout, ranks)
        self._store, self._timeout = store, timeout
        self._name = self._description = ""
        self._coalesced: list[CclWork] | None = None
        self._native: dict[tuple[str, ReduceOp, int], FastPath | None] = {}

    @property
    def capabilities(self) -> Capabilities:
        """Return the operations and dtypes that it serves natively."""
        return self._open().capabilities

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
        if self.communicator is not None:
            self.communicator.name = name

    _set_group_name = setGroupName

    def getGroupName(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description
        if self.communicator is not None:
            self.communicator.description = description

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

    @property
    def _device_types(self) -> list[torch.device]:
        # FSDP2's state dicts and asynchronous checkpoints look for a device of the group. While torch (2.15) makes the
        # group, a device would have it attach its flight recorder, which needs a backend in C++.
        return [torch.device("cpu")] if self in internals._world.pg_map else []

    # FSDP2 allocates so after set_allocate_memory_from_process_group_for_comm(True), and asks the group of the device.

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu" and isinstance(self.communicator, SharedCommunicator)

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of ``size`` elements whose memory the other ranks can reach."""
        return empty_shared((size,), dtype)

    def shutdown(self) -> None:
        self._native.clear()
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

    def _root(self, call: str, options: Any) -> int:
        return check_root(call, options.rootRank, self.size())

    def _plain(self, operation: str, tensors: _Tensors, options: Any, op: ReduceOp, root: int = 0) -> C10dWork | None:
        """Start an operation on tensors that native code validates; None, having done nothing, for others.

        Args:
            tensors: the output first.
        """
        key = operation, op, root
        path = self._native.get(key)
        if path is None:
            if not isinstance(self.communicator, SharedCommunicator) or key in self._native:
                return None
            path = started_natively(self.communicator, Kind(operation, operation, op, root, True))
            self._native[key] = path
            if path is None:
                return None
        work = path(*tensors)
        return None if work is None else self._started(work, operation, tensors[:1], options)

    @overloaded("allreduce", (("tensors", "tensor"),), "op", "timeout")
    def allreduce(self, tensors: _Tensors | torch.Tensor, options: Any) -> C10dWork:
        tensor = one(tensors, "allreduce", sparse=True)
        plain = self._plain("all_reduce", [tensor], options, op_of("allreduce", options))
        if plain is not None:
            return plain
        if tensor.layout is not torch.strided:
            all_reduce_sparse(self._open(), tensor, op_of("allreduce", options))
            return self._started(CclWork(self._open(), None, (), "all_reduce"), "all_reduce", [tensor], options)
        op = op_of("allreduce", options, tensor)
        memory, finish = for_writing(tensor, read=True)
        work = reductions.all_reduce(self._open(), memory, op)
        return self._started(work.then(finish), "all_reduce", [tensor], options)

    @overloaded("allreduce_coalesced", (("tensors",),))
    def allreduce_coalesced(self, tensors: _Tensors, options: Any) -> C10dWork:
        for tensor in tensors:
            one(tensor, "allreduce_coalesced")
        communicator, op = self._open(), op_of("allreduce_coalesced", options, *tensors)
        if len({tensor.dtype for tensor in tensors}) != 1:
            raise ArgumentTypeError("allreduce_coalesced: the tensors have different dtypes; expected one")
        flat = flatten([for_reading(tensor) for tensor in tensors])
        with passing_joined(tensors):
            work = reductions.all_reduce(communicator, flat, op)
        return self._started(work.then(lambda: unflatten_any(flat, tensors)), "all_reduce", tensors, options)

    @overloaded("reduce", (("tensors", "tensor"),), "root", "op", "timeout")
    def reduce(self, tensors: _Tensors | torch.Tensor, options: Any) -> C10dWork:
        tensor = one(tensors, "reduce")
        op, root = op_of("reduce", options, tensor), self._root("reduce", options)
        memory, finish = for_writing(tensor, read=True)
        work = reductions.reduce(self._open(), memory, root, op)
        return self._started(work.then(finish), "reduce", [tensor], options)

    @overloaded("broadcast", (("tensors", "tensor"),), "root", "timeout")
    def broadcast(self, tensors: _Tensors | torch.Tensor, options: Any) -> C10dWork:
        tensor, root = one(tensors, "broadcast"), self._root("broadcast", options)
        plain = self._plain("broadcast", [tensor], options, ReduceOp.SUM, root)
        if plain is not None:
            return plain
        memory, finish = for_writing(tensor, read=True)
        work = self._open().broadcast(memory, root, True)
        return self._started(work.then(finish), "broadcast", [tensor], options)

    @overloaded("allgather", (("output_tensors",), ("input_tensors", "input_tensor")), "timeout")
    def allgather(self, outputs: Any, inputs: Any, options: Any) -> C10dWork:
        targets = _of_one(outputs)
        source = one(inputs, "allgather")
        fit("allgather", targets, source, self.size())
        communicator = self._open()
        flat = source.new_empty(source.numel() * communicator.size)
        work = communicator.all_gather(flat, for_reading(source), True)
        return self._started(work.then(lambda: unflatten_any(flat, targets)), "all_gather", targets, options)

    @overloaded("all_gather_single", (("output",), ("input",)), "timeout")
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> C10dWork:
        plain = self._plain("all_gather_into_tensor", [output, input], options, ReduceOp.SUM)
        if plain is not None:
            return plain
        fit("all_gather_into_tensor", [output], input, 1, self.size())
        memory, finish = for_writing(output)
        source = for_reading(input, memory, own_slot=self.rank() * input.numel())
        work = self._open().all_gather(memory, source, True, "all_gather_into_tensor")
        return self._started(work.then(finish), "all_gather_into_tensor", [output], options)

    _allgather_base = all_gather_single

    @overloaded("all_gather_single_coalesced", (("outputs",), ("inputs",)))
    def all_gather_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, options: Any) -> C10dWork:
        # All of them before the first is sent.
        check_lengths("all_gather_into_tensor_coalesced", outputs, inputs)
        pairs = list(zip(outputs, inputs, strict=True))
        for output, input in pairs:
            fit("all_gather_into_tensor_coalesced", [output], input, 1, self.size())
        return C10dWork.of_all([self.all_gather_single(*pair, options) for pair in pairs], outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @overloaded("allgather_coalesced", (("output_lists",), ("input_list",)))
    def allgather_coalesced(self, outputs: list[_Tensors], inputs: _Tensors, options: Any) -> C10dWork:
        # outputs[r][i] is tensor i of rank r.
        for row in outputs:
            check_lengths("allgather_coalesced", row, inputs)
        columns = [[row[index] for row in outputs] for index in range(len(inputs))]
        for column, tensor in zip(columns, inputs, strict=True):
            fit("allgather_coalesced", column, tensor, self.size())
        works = [self.allgather([column], [tensor], options) for column, tensor in zip(columns, inputs, strict=True)]
        return C10dWork.of_all(works, [tensor for row in outputs for tensor in row])

    @overloaded("reduce_scatter", (("output_tensors", "output"), ("input_tensors", "input")), "op", "timeout")
    def reduce_scatter(self, outputs: Any, inputs: Any, options: Any) -> C10dWork:
        output = one(outputs, "reduce_scatter")
        sources = _of_one(inputs)
        fit("reduce_scatter", sources, output, self.size())
        return self._reduce_scatter(output, flatten([for_reading(one) for one in sources]), "reduce_scatter", options)

    @overloaded("reduce_scatter_single", (("outputTensor", "output"), ("inputTensor", "input")), "op", "timeout")
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> C10dWork:
        plain = self._plain("reduce_scatter_tensor", [output, input], options, op_of("reduce_scatter_tensor", options))
        if plain is not None:
            return plain
        fit("reduce_scatter_tensor", [input], output, 1, self.size())
        return self._reduce_scatter(output, input, "reduce_scatter_tensor", options)

    _reduce_scatter_base = reduce_scatter_single

    def _reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, name: str, options: Any) -> C10dWork:
        op = op_of(name, options, output)
        memory, finish = for_writing(output)
        work = reductions.reduce_scatter(self._open(), memory, for_reading(source, memory), op, name)
        return self._started(work.then(finish), name, [output], options)

    @overloaded("reduce_scatter_single_coalesced", (("outputs",), ("inputs",)))
    def reduce_scatter_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, options: Any) -> C10dWork:
        check_lengths("reduce_scatter_tensor_coalesced", outputs, inputs)
        pairs = list(zip(outputs, inputs, strict=True))
        for output, input in pairs:
            fit("reduce_scatter_tensor_coalesced", [input], output, 1, self.size())
        return C10dWork.of_all([self.reduce_scatter_single(*pair, options) for pair in pairs], outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @overloaded("alltoall", (("output_tensors",), ("input_tensors",)), "timeout")
    def alltoall(self, outputs: _Tensors, inputs: _Tensors, options: Any) -> C10dWork:
        for given in (outputs, inputs):
            fit("all_to_all", given, None, self.size())
        if outputs[0].dtype is not inputs[0].dtype:
            raise ArgumentTypeError(f"all_to_all: got outputs of {outputs[0].dtype} and inputs of {inputs[0].dtype}")
        check_own_parts("all_to_all", outputs[self.rank()].numel(), inputs[self.rank()].numel())
        source = flatten([for_reading(one) for one in inputs])
        target = source.new_empty(sum(one.numel() for one in outputs), dtype=outputs[0].dtype)
        work = self._open().all_to_all(
            target, source, [one.numel() for one in outputs], [one.numel() for one in inputs], True, "all_to_all"
        )
        return self._started(work.then(lambda: unflatten_any(target, outputs)), "all_to_all", outputs, options)

    @overloaded(
        "all_to_all_single", (("output",), ("input",), ("output_split_sizes",), ("input_split_sizes",)), "timeout"
    )
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        options: Any,
    ) -> C10dWork:
        check_exchange(output, input, output_split_sizes, input_split_sizes, self.size(), self.rank())
        memory, finish = for_writing(output)
        source = for_reading(input, memory)
        work = self._open().all_to_all_rows(
            memory, source, output_split_sizes, input_split_sizes, True, "all_to_all_single"
        )
        return self._started(work.then(finish), "all_to_all_single", [output], options)

    alltoall_base = all_to_all_single

    @overloaded("gather", (("output_tensors",), ("input_tensors", "input_tensor")), "root", "timeout")
    def gather(self, outputs: Any, inputs: Any, options: Any) -> C10dWork:
        communicator, source, root = self._open(), one(inputs, "gather"), self._root("gather", options)
        if communicator.rank != root:
            work = communicator.gather(None, for_reading(source), root, True)
            return self._started(work, "gather", [], options)
        targets: _Tensors = _of_one(outputs)
        fit("gather", targets, source, self.size())
        flat = source.new_empty(source.numel() * communicator.size)
        work = communicator.gather(flat, for_reading(source), root, True)
        return self._started(work.then(lambda: unflatten_any(flat, targets)), "gather", targets, options)

    @overloaded("scatter", (("output_tensors", "output_tensor"), ("input_tensors",)), "root", "timeout")
    def scatter(self, outputs: Any, inputs: Any, options: Any) -> C10dWork:
        communicator, output, root = self._open(), one(outputs, "scatter"), self._root("scatter", options)
        mine = communicator.rank == root
        sources = _of_one(inputs) if mine else []
        if mine:
            fit("scatter", sources, output, self.size())
        source = flatten([for_reading(one) for one in sources]) if mine else None
        memory, finish = for_writing(output)
        work = communicator.scatter(memory, source, root, True)
        return self._started(work.then(finish), "scatter", [output], options)

    @overloaded("barrier", (), "timeout")
    def barrier(self, options: Any) -> C10dWork:
        return self._started(self._open().barrier(True), "barrier", [], options)

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """Run a barrier through the group's store.

        Args:
            timeout: as a timedelta or in seconds; None is the group's.
            wait_all_ranks: name every rank that is missing when the time is over, not only the first.

        Raises:
            CommTimeoutError: on every rank that came; names those that did not. The group stays usable.
            PeerLostError: a member has ended.
        """
        communicator = self._open()
        limit_s = communicator.timeout_s if timeout is None else seconds("monitored_barrier", timeout)
        # Of comm's own function, too, so that ranks may call either.
        _, store = internals._world.pg_map.get(self, (None, self._store))
        pass_monitored_barrier(store, communicator.rank, communicator.for_diagnosis(), limit_s, wait_all_ranks)

    # --- what torch's own methods, in C++, would end the process over

    def split_group(self, *_: Any, **__: Any) -> Any:
        raise BackendUnavailableError(_OF_THE_LIBRARY.format("split_group"))

    def merge_remote_group(self, *_: Any, **__: Any) -> Any:
        raise BackendUnavailableError(_OF_THE_LIBRARY.format("merge_remote_group"))

    # --- point to point

    def send(self, tensors: _Tensors, peer: int, tag: int = 0) -> C10dWork:
        tensor = one(tensors, "send")
        check_peer("send", peer, self.size(), self.rank())
        work = self._open().send(for_reading(tensor), peer, True, check_tag("send", tag))
        return self._started(work, "send", [tensor])

    def recv(self, tensors: _Tensors, peer: int, tag: int = 0) -> C10dWork:
        tensor = one(tensors, "recv")
        if peer != ANY_SOURCE:
            check_peer("recv", peer, self.size(), self.rank())
        memory, finish = for_writing(tensor)
        work = self._open().receive(memory, peer, True, check_tag("recv", tag), "recv").then(finish)
        return self._started(work, "recv", [tensor])

    def recv_anysource(self, tensors: _Tensors, tag: int = 0) -> C10dWork:
        return self.recv(tensors, ANY_SOURCE, tag)

    # --- several operations as one

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> C10dWork:
        works, self._coalesced = self._coalesced or [], None
        return C10dWork.of_all([C10dWork(work, []) for work in works], [])

    startCoalescing = _start_coalescing
    endCoalescing = _end_coalescing


def _of_one(lists: Any) -> Any:
    """Return the tensors of one input or output, which torch passes as the only one of a list."""
    return lists[0] if lists and isinstance(lists[0], list | tuple) else lists
