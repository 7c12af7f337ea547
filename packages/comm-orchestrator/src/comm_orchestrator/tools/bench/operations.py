"""List what can be measured: operations, reductions and element types, by the names of torch and nccl-tests."""

from __future__ import annotations

from dataclasses import dataclass

from comm_utils import operations
from comm_utils.operations import OperationSpec

__all__ = [
    "DTYPE_ALIASES",
    "IN_PLACE",
    "ITEM_BYTES",
    "OUT_OF_PLACE",
    "REDUCTIONS",
    "Benchmark",
    "aliases",
    "averages",
    "benchmark",
    "benchmarks",
    "reduces",
]

OUT_OF_PLACE = "out_of_place"
IN_PLACE = "in_place"
REDUCTIONS = ("sum", "product", "min", "max", "avg")


@dataclass(frozen=True)
class Benchmark:
    """The measurement of one operation of the table."""

    row: OperationSpec

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def reduces(self) -> bool:
        return self.row.pattern.reduces

    @property
    def rooted(self) -> bool:
        return self.row.pattern.is_rooted

    @property
    def in_parts(self) -> bool:
        """Return whether the whole has to divide by the world size."""
        return self.row.pattern.has_parts

    @property
    def ways(self) -> tuple[str, ...]:
        """Return the ways of giving it memory."""
        if self.row.is_in_place:
            return (IN_PLACE,)
        return (OUT_OF_PLACE, IN_PLACE) if self.row.overlapping else (OUT_OF_PLACE,)

    @property
    def repeatable(self) -> tuple[str, ...]:
        """Return the ways in which a call on what the last call left gives the same result."""
        if self.row.pattern.is_empty:
            return ()
        return tuple(way for way in self.ways if not (self.reduces and way == IN_PLACE))

    def elements(self, count: int, world_size: int) -> tuple[int, int]:
        """Return the elements of a rank's input and output for ``count``, as nccl-tests counts."""
        pattern = self.row.pattern
        if not self.in_parts:
            return count, count
        whole = count * world_size
        return (count if pattern.input_is_part else whole), (count if pattern.output_is_part else whole)


def benchmarks() -> dict[str, Benchmark]:
    """Return everything that can be measured, by name, in the order of the table."""
    return {name: Benchmark(operations.get(name)) for name in operations.benchmarked()}


def benchmark(name: str) -> Benchmark:
    """Return the measurement of the operation ``name``."""
    return Benchmark(operations.get(name))


def aliases() -> dict[str, str]:
    """Return other names of what can be measured: those of torch and nccl-tests, and of forms with lists."""
    found: dict[str, str] = {}
    for row in operations.rows():
        for name in (row.name, row.nccl_tests_name, *row.torch_names, *row.deepspeed_names):
            if name and name != row.measured_as and row.recorded:
                found[name] = row.measured_as
    return found


#: Name in torch -> bytes. ``-d all`` measures these, in this order.
ITEM_BYTES = {
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}

DTYPE_ALIASES = {
    "char": "int8",
    "int": "int32",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "f8e4m3": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "fp8_e5m2": "float8_e5m2",
}


def reduces(dtype: str) -> bool:
    """Return whether anything can be reduced in it."""
    return not dtype.startswith("float8")


def averages(dtype: str) -> bool:
    """Return whether averages exist in it."""
    return reduces(dtype) and "float" in dtype
