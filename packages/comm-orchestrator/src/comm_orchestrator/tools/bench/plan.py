"""The plan of a measurement, row by row: sizes rounded as nccl-tests does."""

from __future__ import annotations

from dataclasses import dataclass, field

from comm_orchestrator.tools.bench.operations import ITEM_BYTES, Benchmark, benchmark
from comm_orchestrator.tools.bench.options import Options
from comm_utils import operations
from comm_utils.errors import ArgumentError

__all__ = ["Plan", "Row", "check_world", "plan"]

# Parts of the ranks begin at multiples of this, as in nccl-tests.
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Row:
    """One line of the table: what every library does in each of its ways.

    Attributes:
        root: rank of the group; -1 where the operation has none.
        count: elements of a rank's part where the whole is cut into parts, of the tensor elsewhere.
        size_bytes: of the larger of a rank's two buffers.
    """

    operation: str
    dtype: str
    op: str
    root: int
    count: int
    size_bytes: int

    @property
    def pattern(self) -> operations.Pattern:
        """Return how the operation moves data."""
        return operations.get(self.operation).pattern


@dataclass
class Plan:
    """Rows, and what there is to say about how they came about."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_world(options: Options, world_size: int) -> int:
    """Refuse what cannot be among so many ranks; the size of a group.

    Raises:
        ArgumentError: names the option.
    """
    if options.group_size and world_size % options.group_size:
        divisors = [str(size) for size in range(1, world_size + 1) if world_size % size == 0]
        raise ArgumentError(
            f"--group-size: got {options.group_size} among {world_size} ranks; expected a divisor: "
            f"{', '.join(divisors)}"
        )
    size = options.group_size or world_size
    if options.root >= size:
        raise ArgumentError(f"--root: got {options.root} in groups of {size} ranks; expected 0 to {size - 1}, or all")
    messages = [name for name in options.operations if operations.get(name).pattern.is_message]
    if messages and size < 2 and len(options.operations) == 1:
        raise ArgumentError(
            f"{messages[0]}: got groups of 1 rank; expected 2 or more: start more with --ranks or a launcher"
        )
    return size


def plan(options: Options, world_size: int) -> Plan:
    """Return all rows among groups of ``world_size`` ranks.

    Raises:
        ArgumentError: there is none.
    """
    made = Plan()
    for name in options.operations:
        pattern = operations.get(name).pattern
        if pattern.is_message and world_size < 2:
            made.notes.append(f"{name} needs 2 ranks and is left out")
            continue
        if pattern.is_empty:
            made.rows.append(Row(name, "", "", -1, 0, 0))
            continue
        _add(made, options, benchmark(name), world_size)
    asked = set(options.sizes())
    if asked and max(asked) < options.maxbytes:
        made.notes.append(f"the steps go over --maxbytes {options.maxbytes}; {max(asked)} is the largest of the sizes")
    if rounded := dict.fromkeys(
        row.operation for row in made.rows if row.pattern.has_parts and row.size_bytes not in asked
    ):
        made.notes.append(
            f"sizes of {', '.join(rounded)} are rounded down to {world_size} parts of a multiple of "
            f"{_ALIGNMENT_BYTES} bytes, as in nccl-tests; those that come out the same are measured once"
        )
    if not made.rows:
        raise ArgumentError(f"nothing is left to measure: {'; '.join(made.notes)}; expected larger sizes or more ranks")
    return made


def _add(made: Plan, options: Options, operation: Benchmark, world_size: int) -> None:
    roots = [-1]
    if operation.rooted:
        roots = list(range(world_size)) if options.root < 0 else [options.root]
    too_small: set[int] = set()
    for dtype in options.dtypes:
        for op in options.ops if operation.reduces else ("",):
            if op and not options.possible(dtype, op):
                continue
            for root in roots:
                seen: set[int] = set()
                for asked in options.sizes():
                    count, size = _rounded(operation, asked, ITEM_BYTES[dtype], world_size)
                    if not count:
                        too_small.add(asked)
                    elif count not in seen:
                        seen.add(count)
                        made.rows.append(Row(operation.name, dtype, op, root, count, size))
    if too_small:
        what = ", ".join(map(str, sorted(too_small)))
        made.notes.append(f"{operation.name}: {what} bytes are too few and left out")


def _rounded(operation: Benchmark, size: int, item_bytes: int, world_size: int) -> tuple[int, int]:
    """Count and size in bytes."""
    elements = size // item_bytes
    if not operation.in_parts:
        return elements, elements * item_bytes
    aligned = max(1, _ALIGNMENT_BYTES // item_bytes)
    part = elements // world_size // aligned * aligned
    return part, part * world_size * item_bytes
