"""The series of the comms logger that a call is recorded in: looked up once for all calls that are alike."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

from torch.distributed import ProcessGroup

from comm_collectives import labels
from comm_collectives.composed import ComposedCall, Method, Root
from comm_collectives.labels import NO_LABEL
from comm_collectives.recorded.device_times import DeviceTimes
from comm_collectives.recorded.work import RecordedKind
from comm_collectives.wrapping import BackendWrapper
from comm_utils import operations
from comm_utils.backend import Backend
from comm_utils.flight_recorder.call_sites import line_of_program
from comm_utils.group_names import name_of
from comm_utils.observability.comms_logger import CommsLogger
from comm_utils.observability.traces.events import Operation
from comm_utils.reduce_op import parse_reduce_op
from comm_utils.sizes import message_size_bytes

__all__ = ["ANYBODY", "MOST_KNOWN", "CallArguments", "CallSeries"]

#: The source of a message from any source.
ANYBODY: Root = (None, -1)
#: So many different calls are remembered before all are forgotten.
MOST_KNOWN = 4096


class CallArguments(NamedTuple):
    """The arguments of a call that decide what it is recorded as; see :meth:`TimedCalls._observe`."""

    operation: str
    group: ProcessGroup | None
    tensor: Any
    op: object
    root: Root
    tag: int
    async_op: bool


class CallSeries(BackendWrapper):
    """The part of :class:`comm_collectives.recorded.backend.RecordingBackend` that knows what calls are recorded as."""

    def __init__(self, inner: Backend, log: CommsLogger, devices: DeviceTimes) -> None:
        super().__init__(inner)
        self._log = log
        self._devices = devices
        self._known = inner.fast_paths.memo("recorded")

    def _kind_of(
        self,
        operation: str,
        group: ProcessGroup | None,
        tensor: Any,
        op: object,
        root: Root,
        tag: int,
        async_op: bool,
    ) -> RecordedKind:
        """Return how calls with these arguments are recorded."""
        log, label = self._log, labels.label.get()
        known = self._known
        usual = log.is_plain and label is NO_LABEL
        dtype, size = (None, 0) if tensor is None else (tensor.dtype, tensor.nbytes)
        key: tuple[object, ...] = (operation, size, dtype, group, op, root, tag, async_op, self.call)
        if tensor is not None and not tensor.is_cpu:
            key = (*key, "device")
        if usual:
            found: RecordedKind | None = known.get(key)
            if found is not None:
                return found
        call = CallArguments(operation, group, tensor, op, root, tag, async_op)
        return self._new_kind(label, key if usual else None, call)

    def _new_kind(
        self,
        label: tuple[str | None, bool],
        key: tuple[object, ...] | None,
        call: CallArguments,
        method: str = "",
        wire_bytes: int = 0,
    ) -> RecordedKind:
        """Look the series up, and remember it under ``key`` unless that is None or the call is not recorded."""
        log, (log_name, prof), known = self._log, label, self._known
        operation, group, tensor, op, root, tag, async_op = call
        recorded_as = operations.record_name(operation, self.call)
        pattern = operations.get(operation).pattern
        ranks = tuple(self.inner.get_process_group_ranks(group))
        # Groups without a name are those of other threads' worlds, in tests.
        group_name = name_of(self.inner.get_world_group() if group is None else group)
        other = root[0] if root[0] is not None else -1 if root[1] is None or root[1] < 0 else ranks[root[1]]
        channel: tuple[object, ...] = (group_name, ranks)
        within = None
        if pattern.is_message:
            own_rank = self.inner.get_rank(None)
            sends = pattern.is_send
            if not sends:
                within = (*channel, tag)
                if async_op and other < 0 and log.sequences.make_vague(within):
                    # Which message it gets is nobody's knowledge, nor then which the later ones get.
                    self.fast_paths.clear()
            channel = (*channel, *((own_rank, other) if sends else (other, own_rank)), tag)
        counter = log.sequences.counter(channel, within)
        size = 0 if tensor is None else message_size_bytes(operation, tensor.nbytes, len(ranks))
        what = Operation(
            name=log_name or recorded_as,
            operation=recorded_as,
            size_bytes=size,
            ranks=ranks,
            group=group_name,
            dtype="" if tensor is None else str(tensor.dtype).removeprefix("torch."),
            op="" if op is None else parse_reduce_op(op).name.lower(),
            root=other,
            tag=tag,
            asynchronous=async_op,
            caller=_caller() if log.debug else "",
            on_device=tensor is not None and not tensor.is_cpu,
            method=method,
            wire_bytes=wire_bytes,
        )
        if not (prof or log.wants(what.name)):
            return RecordedKind(None, counter, None, what)
        series = log.series(what)
        made = RecordedKind(series, counter, _own(what, series.operation), what)
        if key is not None:
            if len(known) >= MOST_KNOWN:
                known.clear()
            known[key] = made
        return made

    def _kind_of_composed(self, call: ComposedCall, method: Method) -> RecordedKind:
        """Return how such calls are recorded, which are made of several exchanges."""
        log, label, known = self._log, labels.label.get(), self._known
        usual = log.is_plain and label is NO_LABEL
        group, counted, op, async_op, root = call.group, call.counted, call.op, call.async_op, call.root
        size, way = (counted.nbytes, counted.dtype, counted.is_cpu), (method.name, method.wire_bytes)
        key = (call.name, size, group, op, way, root, async_op, self.call)
        found: RecordedKind | None = known.get(key) if usual else None
        if found is None:
            arguments = CallArguments(call.name, group, counted, op, root, 0, async_op)
            found = self._new_kind(label, key if usual else None, arguments, *way)
        return found


def _own(what: Operation, of_series: Operation) -> dict[str, Any] | None:
    """Return the part of a record that belongs to this operation alone, where a series has several."""
    if what == of_series:
        return None
    return {
        one.name: value
        for one in fields(Operation)
        if (value := getattr(what, one.name)) != getattr(of_series, one.name)
    }


def _caller() -> str:
    """Return the innermost function of the program, as the lines of other records name it."""
    return line_of_program().rpartition(" ")[2]
