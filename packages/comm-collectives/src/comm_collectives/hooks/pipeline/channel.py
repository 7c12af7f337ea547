"""Typed messages between pipeline stages: shapes and dtypes are agreed once, then only elements travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from comm_collectives.annotations import Group
from comm_collectives.groups import get_rank
from comm_collectives.hooks.pipeline.actions import FORWARD, Message
from comm_collectives.point_to_point import P2POp, batch_isend_irecv, irecv, isend
from comm_utils.backend import Work
from comm_utils.errors import ArgumentError
from comm_utils.torch_support import factories

__all__ = ["StageChannel", "TensorType"]

_HEADER = 128
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


@dataclass(frozen=True)
class TensorType:
    """The dtype and shape of a tensor between two stages, and whether a gradient of it comes back."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    def __str__(self) -> str:
        gradient = ", with a gradient" if self.requires_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')} of shape {self.shape}{gradient}"


@dataclass
class _Arriving:
    """A message that is being received; the tensors may be used after ``wait()``."""

    tensors: list[torch.Tensor]
    works: list[Work]

    def wait(self) -> list[torch.Tensor]:
        for work in self.works:
            work.wait()
        self.works = []
        return self.tensors


class StageChannel:
    """Messages between the stages of a pipeline.

    The first activations between two stages are preceded by a header with their dtypes and shapes. Gradients have those
    of the activations, so they need none.

    Args:
        group: the pipeline group; None is the world group.
        device: of the tensors.
    """

    def __init__(self, group: Group = None, device: torch.device | str = "cpu") -> None:
        self._group, self._device = group, torch.device(device)
        self._rank = get_rank(group)
        self._types: dict[int, tuple[TensorType, ...]] = {}
        self._arriving: dict[Message, _Arriving] = {}
        self._leaving: list[tuple[list[Work], list[torch.Tensor]]] = []

    def types(self, stage: int) -> tuple[TensorType, ...]:
        """Return what ``stage`` sends to the next one, as it was agreed."""
        return self._types[stage]

    def exchange(self, messages: Sequence[Message], outgoing: Mapping[Message, Sequence[torch.Tensor]]) -> None:
        """Start all ``messages`` together.

        Args:
            messages: those that this rank sends or receives, in the order in which the other ranks have them.
            outgoing: tensors by message, for those that this rank sends; they must stay as they are until
                :meth:`finish_sends`.

        Raises:
            ArgumentError: tensors have another dtype or shape than was agreed at the first message.
        """
        self._agree(messages, outgoing)
        ops: list[P2POp] = []
        spans: list[tuple[Message, int, int, list[torch.Tensor]]] = []
        for message in messages:
            begin = len(ops)
            if message.src == self._rank:
                tensors = [one.detach().contiguous() for one in outgoing[message]]
                self._check(message, outgoing[message])
                ops += [P2POp(isend, one, group=self._group, group_peer=message.dst) for one in tensors]
            else:
                tensors = [
                    factories.empty(one.shape, dtype=one.dtype, device=self._device) for one in self._types_of(message)
                ]
                ops += [P2POp(irecv, one, group=self._group, group_peer=message.src) for one in tensors]
            spans.append((message, begin, len(ops), tensors))
        works = batch_isend_irecv(ops) if ops else []
        for message, begin, end, tensors in spans:
            own = works[begin:end] if len(works) == len(ops) else list(works)
            if message.src == self._rank:
                self._leaving.append((own, tensors))
            else:
                self._arriving[message] = _Arriving(tensors, own)
        self._leaving = [(own, tensors) for own, tensors in self._leaving if not all(one.is_completed() for one in own)]

    def receive(self, message: Message) -> list[torch.Tensor]:
        """Return the tensors of a message that was started, once they are there."""
        return self._arriving.pop(message).wait()

    def finish_sends(self) -> None:
        """Wait until all that was sent may be overwritten."""
        for works, _ in self._leaving:
            for work in works:
                work.wait()
        self._leaving = []

    def _agree(self, messages: Sequence[Message], outgoing: Mapping[Message, Sequence[torch.Tensor]]) -> None:
        """Exchange the headers of stages whose activations travel for the first time."""
        new = [one for one in messages if one.kind == FORWARD and one.stage not in self._types]
        if not new:
            return
        headers = []
        for message in new:
            if message.src == self._rank:
                self._types[message.stage] = types = tuple(map(_type_of, outgoing[message]))
                headers.append(_encoded(types).to(self._device))
            else:
                headers.append(factories.empty(_HEADER, dtype=torch.int64, device=self._device))
        ops = [
            P2POp(isend, header, group=self._group, group_peer=message.dst)
            if message.src == self._rank
            else P2POp(irecv, header, group=self._group, group_peer=message.src)
            for message, header in zip(new, headers, strict=True)
        ]
        for work in batch_isend_irecv(ops):
            work.wait()
        for message, header in zip(new, headers, strict=True):
            if message.dst == self._rank:
                self._types[message.stage] = _decoded(header.tolist())

    def _types_of(self, message: Message) -> list[TensorType]:
        if message.kind == FORWARD:
            return list(self._types[message.stage])
        return [one for one in self._types[message.to_stage] if one.requires_grad]

    def _check(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        expected = self._types_of(message)
        found = [_type_of(one) for one in tensors]
        if [(one.dtype, one.shape) for one in found] != [(one.dtype, one.shape) for one in expected]:
            raise ArgumentError(
                f"run_schedule: stage {message.stage}: got {', '.join(map(str, found)) or 'nothing'} for {message}; "
                "expected "
                f"{', '.join(map(str, expected)) or 'nothing'}, as for the first micro-batch; use micro-batches of "
                "one size"
            )
        if message.kind != FORWARD:
            return
        for one, agreed in zip(found, expected, strict=True):
            if one.requires_grad and not agreed.requires_grad:
                raise ArgumentError(
                    f"run_schedule: stage {message.stage}: got {', '.join(map(str, found))} for {message}; expected "
                    f"{', '.join(map(str, expected))}, as for the first micro-batch: no gradient comes back where that "
                    "one needs none; let its activations require gradients as well"
                )


def _type_of(tensor: torch.Tensor) -> TensorType:
    return TensorType(tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


def _encoded(types: Sequence[TensorType]) -> torch.Tensor:
    numbers = [len(types)]
    for one in types:
        if one.dtype not in _DTYPES:
            raise ArgumentError(f"run_schedule: got an activation of {one.dtype}; expected one of {_names()}")
        numbers += [_DTYPES.index(one.dtype), int(one.requires_grad), len(one.shape), *one.shape]
    if len(numbers) > _HEADER:
        raise ArgumentError(
            f"run_schedule: got {len(types)} tensors between two stages, whose shapes take {len(numbers)} numbers; "
            f"expected at most {_HEADER}; join some of them"
        )
    return factories.tensor(numbers + [0] * (_HEADER - len(numbers)))


def _decoded(numbers: list[int]) -> tuple[TensorType, ...]:
    types, place = [], 1
    for _ in range(numbers[0]):
        dtype, requires_grad, dims = numbers[place : place + 3]
        shape = tuple(numbers[place + 3 : place + 3 + dims])
        types.append(TensorType(_DTYPES[dtype], shape, bool(requires_grad)))
        place += 3 + dims
    return tuple(types)


def _names() -> str:
    return ", ".join(str(one).removeprefix("torch.") for one in _DTYPES)
