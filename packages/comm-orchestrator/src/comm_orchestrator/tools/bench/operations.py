"""List what can be measured: operations, reductions and element types, by the names of torch and nccl-tests."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "ALIASES",
    "DTYPE_ALIASES",
    "IN_PLACE",
    "ITEM_BYTES",
    "OPERATIONS",
    "OUT_OF_PLACE",
    "REDUCTIONS",
    "Operation",
    "averages",
    "reduces",
]

OUT_OF_PLACE = "out_of_place"
IN_PLACE = "in_place"
REDUCTIONS = ("sum", "product", "min", "max", "avg")


@dataclass(frozen=True)
class Operation:
    """What is known of an operation.

    Attributes:
        source, target: elements of a rank's input and output, in parts where ``in_parts``, otherwise in wholes; an
            operation without a target works on its source.
        in_parts: a rank's part of the whole is the same for all, so the whole divides by the world size.
        repeatable: ways in which calling it again on what the last call left gives the same result.
    """

    name: str
    ways: tuple[str, ...]
    reduces: bool = False
    rooted: bool = False
    in_parts: bool = False
    whole_source: bool = True
    whole_target: bool = True
    repeatable: tuple[str, ...] = ()

    def elements(self, count: int, world_size: int) -> tuple[int, int]:
        """Elements of a rank's input and output for ``count``, as nccl-tests counts."""
        if not self.in_parts:
            return count, count
        whole = count * world_size
        return (whole if self.whole_source else count), (whole if self.whole_target else count)


_BOTH = (OUT_OF_PLACE, IN_PLACE)

OPERATIONS = {
    one.name: one
    for one in (
        Operation("all_reduce", (IN_PLACE,), reduces=True),
        Operation("reduce", (IN_PLACE,), reduces=True, rooted=True),
        Operation("broadcast", (IN_PLACE,), rooted=True, repeatable=(IN_PLACE,)),
        Operation("all_gather_into_tensor", _BOTH, in_parts=True, whole_source=False, repeatable=_BOTH),
        Operation(
            "reduce_scatter_tensor",
            _BOTH,
            reduces=True,
            in_parts=True,
            whole_target=False,
            repeatable=(OUT_OF_PLACE,),
        ),
        Operation("all_to_all_single", (OUT_OF_PLACE,), in_parts=True, repeatable=(OUT_OF_PLACE,)),
        Operation("gather", _BOTH, rooted=True, in_parts=True, whole_source=False, repeatable=_BOTH),
        Operation("scatter", _BOTH, rooted=True, in_parts=True, whole_target=False, repeatable=_BOTH),
        Operation("barrier", (OUT_OF_PLACE,)),
        Operation("send", (OUT_OF_PLACE,), repeatable=(OUT_OF_PLACE,)),
    )
}

ALIASES = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
    "alltoall": "all_to_all_single",
    "sendrecv": "send",
}


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
    """Whether anything can be reduced in it."""
    return not dtype.startswith("float8")


def averages(dtype: str) -> bool:
    """Whether averages exist in it."""
    return reduces(dtype) and "float" in dtype
