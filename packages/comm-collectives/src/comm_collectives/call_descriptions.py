"""Descriptions of calls as a few integers, and what differs between those of several ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.distributed import ProcessGroup

from comm_utils import operations
from comm_utils.backend import Backend
from comm_utils.flight_recorder.calls import Call, RingGroup
from comm_utils.flight_recorder.matching import compare_calls, compare_parts
from comm_utils.flight_recorder.reduce_op import asked_op
from comm_utils.operations import Role
from comm_utils.operations.table import ROWS
from comm_utils.reduce_op import ReduceOp, parse_reduce_op
from comm_utils.torch_support.passed_tensors import dtype_name, passed
from comm_utils.torch_support.recorded_calls import exchanged

__all__ = ["Description", "description_of", "mismatch", "part_mismatch"]

# Changes with what the numbers below mean.
_VERSION = 2
_OPERATIONS = [row.name for row in ROWS]
_OPS = list(ReduceOp)


@cache
def _dtypes() -> list[torch.dtype]:
    """Return all dtypes of torch, in the same order in every process."""
    found = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    return [found[name] for name in sorted(found)]


@dataclass(frozen=True)
class Description:
    """A call of one rank.

    Attributes:
        operation: of the table of operations.
        call: the user's.
        op: name of the reduce op; "" has none.
        root: a global rank; -1 has none.
        elements: of the whole tensor, or of a rank's part.
        joined: of several tensors in one: their number, and a digest of their sizes; 0 is one tensor.
        sent, received: of an exchange in parts: elements to and from each rank.
    """

    operation: str
    call: str
    dtype: torch.dtype | None
    op: str = ""
    root: int = -1
    elements: int = 0
    joined: int = 0
    sent: tuple[int, ...] | None = field(default=None, compare=False)
    received: tuple[int, ...] | None = field(default=None, compare=False)
    device: torch.device | None = field(default=None, compare=False)

    @classmethod
    def of_message(cls, tensor: torch.Tensor) -> Description:
        """Return the description of a message with ``tensor``."""
        return cls(_OPERATIONS[0], _OPERATIONS[0], tensor.dtype, elements=tensor.numel())

    @property
    def is_uneven(self) -> bool:
        """Return whether ranks may give different numbers of elements; those of a reduction may not."""
        return operations.get(self.operation).pattern.uneven and not self.op

    @property
    def payload(self) -> str:
        """Return elements and dtype as a text."""
        return f"{self.elements} elements of {self.dtype and dtype_name(self.dtype)}"

    def encoded(self) -> list[int]:
        """Return it as integers, equally many for every call."""
        dtype = -1 if self.dtype is None else _dtypes().index(self.dtype)
        op = _OPS.index(ReduceOp[self.op.upper()]) if self.op else -1
        call = _OPERATIONS.index(self.call) if self.call in _OPERATIONS else -1
        return [
            _VERSION,
            _OPERATIONS.index(self.operation),
            call,
            dtype,
            op,
            self.root,
            self.elements,
            int(self.sent is not None),
            self.joined,
        ]

    @classmethod
    def decoded(cls, numbers: Sequence[int]) -> Description:
        """Return what another rank has encoded."""
        _, operation, call, dtype, op, root, elements, has_sizes, joined = numbers
        return cls(
            _OPERATIONS[operation] if 0 <= operation < len(_OPERATIONS) else f"operation {operation}",
            _OPERATIONS[call] if 0 <= call < len(_OPERATIONS) else "",
            _dtypes()[dtype] if 0 <= dtype < len(_dtypes()) else None,
            _OPS[op].name.lower() if 0 <= op < len(_OPS) else "",
            root,
            elements,
            joined,
            () if has_sizes else None,
        )

    def encoded_parts(self, size: int) -> list[int]:
        """Return the elements to and from each of ``size`` ranks."""
        equal = (self.elements,) * size
        return [*(self.sent or equal), *(self.received or equal)]

    def as_call(self, group: RingGroup, parts: Sequence[int] | None = None) -> Call:
        """Return it as the flight recorder has calls."""
        half = len(parts or ()) // 2
        return Call(
            lane=0,
            number=0,
            begin_ns=0,
            end_ns=0,
            failed=False,
            group=group,
            operation=self.operation,
            call=self.call,
            dtype="" if self.dtype is None else dtype_name(self.dtype),
            op=self.op,
            root=self.root,
            peer=-1,
            tag=0,
            elements=self.elements,
            in_series=0,
            digest=0,
            sent=tuple(parts[:half]) if parts else self.sent,
            received=tuple(parts[half:]) if parts else None,
            joined=self.joined,
        )


def description_of(
    operation: str, call: str, given: Mapping[str, Any], inner: Backend, group: ProcessGroup | None
) -> Description:
    """Describe a call of a backend, with what the program passed where its arguments are something else.

    Args:
        given: its arguments by name.
    """
    row = operations.get(operation)
    ranks = inner.get_process_group_ranks(group)
    op = asked_op(parse_reduce_op(given.get("op", "sum")).name.lower() if row.pattern.reduces else "")
    root = _root(row, given, ranks) if row.pattern.is_rooted else -1
    name, whole = row.measured_as, call or operation
    if row.pattern.is_empty:
        return Description(name, whole, None, op, root)
    counted: torch.Tensor = given[row.counted[0].name]
    what = passed()
    if not row.pattern.uneven:
        dtype, elements = what.dtype or counted.dtype, what.elements(counted.numel())
        return Description(name, whole, dtype, op, root, elements, what.joined, device=counted.device)
    output, input = (given[one.name] for one in row.tensors)
    rows_out, rows_in = (given.get(_name(row, role)) for role in (Role.OUTPUT_SPLITS, Role.INPUT_SPLITS))
    elements, sent, received = exchanged(output, input, rows_out, rows_in, len(ranks))
    return Description(
        name,
        whole,
        what.dtype or input.dtype,
        op,
        root,
        what.elements(elements),
        what.joined,
        None if sent is None else tuple(map(what.elements, sent)),
        None if received is None else tuple(map(what.elements, received)),
        input.device,
    )


def _name(row: operations.OperationSpec, role: Role) -> str:
    """Return the name of the argument of that role."""
    found = row.argument(role)
    return "" if found is None else found.name


def _root(row: operations.OperationSpec, given: Mapping[str, Any], ranks: Sequence[int]) -> int:
    """Return the global rank of the root."""
    for role, of_group in ((Role.GROUP_ROOT, True), (Role.ROOT, False)):
        argument = row.argument(role)
        value = None if argument is None else given.get(argument.name)
        if value is not None:
            return ranks[value] if of_group else int(value)
    return 0


def mismatch(ranks: Sequence[int], found: Sequence[Description]) -> tuple[str, tuple[int, ...]]:
    """Return what differs between the descriptions of all ranks of a group, and the ranks that are the cause; ""."""
    group = RingGroup("", tuple(ranks))
    return compare_calls({rank: one.as_call(group) for rank, one in zip(ranks, found, strict=True)})


def part_mismatch(
    ranks: Sequence[int], rows: Sequence[Sequence[int]], mine: Description
) -> tuple[str, tuple[int, ...]]:
    """Return the first pair of ranks of which one sends other numbers of elements than the other expects; ""."""
    group = RingGroup("", tuple(ranks))
    return compare_parts(group, {rank: mine.as_call(group, row) for rank, row in zip(ranks, rows, strict=True)})
