"""The types of the table of operations: arguments, moves of data, patterns and the row itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any

__all__ = [
    "Algorithm",
    "Argument",
    "Content",
    "Direction",
    "Form",
    "Move",
    "OperationSpec",
    "Pattern",
    "Role",
    "Side",
]


class Role(Enum):
    """The role of an argument in a call."""

    TENSOR = auto()
    OBJECT = auto()
    INPUT_SPLITS = auto()
    OUTPUT_SPLITS = auto()
    OP = auto()
    ROOT = auto()
    """Global rank of the root, or of the other side of a message."""
    GROUP_ROOT = auto()
    """The same as a group rank."""
    TAG = auto()
    GROUP = auto()
    ASYNC_OP = auto()
    TIMEOUT = auto()
    COMPRESSION = auto()
    """A codec, or how and what to compress."""
    OPTION = auto()
    """Anything else."""


class Direction(Enum):
    """The use of a tensor: the call reads it, writes it, or both."""

    INPUT = auto()
    OUTPUT = auto()
    IN_OUT = auto()


class Form(Enum):
    """The number of tensors in an argument, and their sizes."""

    SINGLE = auto()
    """One tensor: a rank's own data, or its part."""
    FLAT = auto()
    """One tensor, W times as large as a rank's part."""
    PER_RANK = auto()
    """A list of W tensors, one for each rank of the group."""
    SEVERAL = auto()
    """A list of any number of tensors, communicated as if one by one."""


@dataclass(frozen=True)
class Argument:
    """One parameter of a call.

    Attributes:
        name: of the canonical keyword, as in torch.
        aliases: other keywords that torch and DeepSpeed have for it.
        at_root: only the root gives it, all other ranks None.
    """

    name: str
    role: Role
    direction: Direction = Direction.INPUT
    form: Form = Form.SINGLE
    aliases: tuple[str, ...] = ()
    at_root: bool = False

    @property
    def is_written(self) -> bool:
        """Return whether the call writes the tensor."""
        return self.role is Role.TENSOR and self.direction is not Direction.INPUT


class Side(Enum):
    """Ranks that send or receive in a move."""

    ALL = auto()
    ROOT = auto()
    CALLER = auto()
    """The rank that called, in a message."""
    PEER = auto()
    """The other side of a message: what the call names as ``src`` or ``dst``."""


class Content(Enum):
    """The data of a move from each sender to each receiver; S is the size of the operation, W that of the group."""

    NOTHING = auto()
    WHOLE = auto()
    """All S bytes."""
    SENDERS_PART = auto()
    """The part of the whole that belongs to the sender, S/W bytes."""
    RECEIVERS_PART = auto()
    """The part of the whole that belongs to the receiver, S/W bytes."""
    SPLITS = auto()
    """As the split sizes of the call say; the receiver's part where there are none."""


@dataclass(frozen=True)
class Move:
    """Data that goes from every sender to every receiver. Receivers wait for senders."""

    content: Content
    senders: Side = Side.ALL
    receivers: Side = Side.ALL


@dataclass(frozen=True)
class Algorithm:
    """A candidate of the cost model.

    Attributes:
        phases: names in :data:`comm_utils.observability.cost_model.algorithms.PHASES`, one after the other.
        empty: the messages have no content.
    """

    name: str
    phases: tuple[str, ...]
    empty: bool = False


@dataclass(frozen=True)
class Pattern:
    """A pattern of data movement, which operations of one kind have in common.

    Attributes:
        family: what pictures give one colour.
        moves: together, all the data that has to travel; who waits for whom follows from them.
        bus_factor: busbw / algbw for a number of ranks, as nccl-tests defines it.
        whole_array: the operation is accounted under the size of all ranks' parts, W times that of the tensor that a
            rank holds one part in.
        reduces: the result is a reduction, so the call has an ``op``.
        uneven: ranks may call the same operation with different sizes.
        algorithms: of the cost model; the first is assumed where measurements cannot tell them apart.
    """

    name: str
    family: str
    moves: tuple[Move, ...]
    bus_factor: Callable[[int], float]
    whole_array: bool = False
    reduces: bool = False
    uneven: bool = False
    algorithms: tuple[Algorithm, ...] = ()

    @cached_property
    def is_rooted(self) -> bool:
        """Return whether one rank is the root."""
        return any(Side.ROOT in (move.senders, move.receivers) for move in self.moves)

    @cached_property
    def is_message(self) -> bool:
        """Return whether it is one side of a message between two ranks."""
        return any(Side.CALLER in (move.senders, move.receivers) for move in self.moves)

    @cached_property
    def is_send(self) -> bool:
        """Return whether it is the sending side of a message."""
        return any(move.senders is Side.CALLER for move in self.moves)

    @cached_property
    def is_receive(self) -> bool:
        """Return whether it is the receiving side of a message."""
        return any(move.receivers is Side.CALLER for move in self.moves)

    @cached_property
    def is_empty(self) -> bool:
        """Return whether it carries no data, as a barrier."""
        return all(move.content is Content.NOTHING for move in self.moves)

    @cached_property
    def input_is_part(self) -> bool:
        """Return whether a rank gives one part of the whole, rather than the whole."""
        return all(move.content is Content.SENDERS_PART for move in self.moves)

    @cached_property
    def output_is_part(self) -> bool:
        """Return whether a rank gets one part of the whole, rather than the whole."""
        return all(move.content is Content.RECEIVERS_PART for move in self.moves)

    @cached_property
    def has_parts(self) -> bool:
        """Return whether the whole consists of one part for each rank."""
        return self.whole_array or self.uneven

    @cached_property
    def from_root(self) -> bool:
        """Return whether all the data comes from the root."""
        return any(move.senders is Side.ROOT for move in self.moves)

    @cached_property
    def to_root(self) -> bool:
        """Return whether all the data goes to the root."""
        return any(move.receivers is Side.ROOT for move in self.moves)

    @cached_property
    def is_symmetric(self) -> bool:
        """Return whether every rank of the group sends to all of them."""
        return bool(self.moves) and all(move.senders is move.receivers is Side.ALL for move in self.moves)

    def needs(self, rank: int, other: int, root: int) -> bool:
        """Return whether ``other`` is among the :meth:`sources` of ``rank``, both of one group."""
        return any(
            _is_member(move.receivers, rank, rank, root) and _is_member(move.senders, other, rank, root)
            for move in self.moves
        )

    def sources(self, rank: int, ranks: Collection[int], root: int) -> set[int]:
        """Return the ranks whose data ``rank`` needs, itself among them where it is one of the senders.

        Args:
            ranks: global ranks of the group.
            root: global rank of the root or of a message's other side, -1 for none.
        """
        found: set[int] = set()
        for move in self.moves:
            if rank in _members(move.receivers, rank, ranks, root):
                found.update(_members(move.senders, rank, ranks, root))
        return found

    def targets(self, rank: int, ranks: Collection[int], root: int) -> set[int]:
        """Return the ranks that need data of ``rank``; arguments as for :meth:`sources`."""
        found: set[int] = set()
        for move in self.moves:
            if rank in _members(move.senders, rank, ranks, root):
                found.update(_members(move.receivers, rank, ranks, root))
        return found


def _members(side: Side, rank: int, ranks: Collection[int], root: int) -> Collection[int]:
    if side is Side.ALL:
        return ranks
    return (rank,) if side is Side.CALLER else (root,)


def _is_member(side: Side, one: int, rank: int, root: int) -> bool:
    return side is Side.ALL or one == (rank if side is Side.CALLER else root)


@dataclass(frozen=True)
class OperationSpec:
    """One row: an operation that programs call or backends implement.

    Attributes:
        name: of the function, as in torch.
        arguments: in the order of the function's parameters.
        torch_names: what torch calls it, the newest name first, where that is not ``name`` alone.
        deepspeed_names: what DeepSpeed calls it besides.
        measured_as: the operation that does the same on one flat tensor: benchmarks measure it, the cost model prices
            it and a replay calls it. Empty: itself.
        travels_as: operations of the backend that may carry it out, each in one call. Empty: itself.
        primitive: backends implement it; the others are composed of those that do.
        recorded: logger and traces know it by this name.
        benchmarked: ``commctl bench`` measures it.
        overlapping: input and output may share memory: a rank's own part lies at its place in the whole.
        nccl_tests_name: what nccl-tests calls its program, where that is another name.
        native_code: its number in the native library; -1 where it has none.
        function: ``"module:name"`` of the function that programs call.
    """

    name: str
    pattern: Pattern
    arguments: tuple[Argument, ...]
    torch_names: tuple[str, ...] = ()
    deepspeed_names: tuple[str, ...] = ()
    measured_as: str = ""
    travels_as: tuple[str, ...] = ()
    primitive: bool = False
    recorded: bool = True
    benchmarked: bool = False
    overlapping: bool = False
    nccl_tests_name: str = ""
    native_code: int = -1
    function: str = ""

    def __post_init__(self) -> None:
        defaults: Mapping[str, object] = {
            "measured_as": self.name,
            "travels_as": (self.name,),
            "torch_names": (self.name,),
            "function": f"comm_collectives:{self.name}",
        }
        for field, value in defaults.items():
            if not getattr(self, field):
                object.__setattr__(self, field, value)

    @property
    def tensors(self) -> tuple[Argument, ...]:
        """Return the arguments that hold tensors, in order."""
        return tuple(one for one in self.arguments if one.role is Role.TENSOR)

    @property
    def aliases(self) -> dict[str, str]:
        """Return the other keywords of its arguments, each with the canonical one."""
        return {alias: one.name for one in self.arguments for alias in one.aliases}

    @property
    def is_in_place(self) -> bool:
        """Return whether the result takes the place of the input."""
        return any(one.direction is Direction.IN_OUT for one in self.tensors)

    def argument(self, role: Role) -> Argument | None:
        """Return the first argument of ``role``, None where it has none."""
        return next((one for one in self.arguments if one.role is role), None)

    def op_and_root(self, detail: Any) -> tuple[object, int | None]:
        """Return the op and the root of a fast path, as ``Backend.fast_path`` gets them; None for what it has not.

        The root is a global rank: 0, the default of those that have one, for None.
        """
        reduces, is_rooted = self.pattern.reduces, self.argument(Role.ROOT) is not None
        root, op = detail if reduces and is_rooted else (detail, detail)
        return op if reduces else None, (root or 0) if is_rooted else None

    @property
    def counted(self) -> tuple[Argument, ...]:
        """Return the tensor arguments of which the largest is the size that :attr:`Pattern.whole_array` scales."""
        return tuple(one for one in self.tensors if one.form in (Form.SINGLE, Form.SEVERAL)) or self.tensors[:1]
