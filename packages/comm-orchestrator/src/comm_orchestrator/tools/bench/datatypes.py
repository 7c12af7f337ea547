"""Types of elements, by the names of torch and of nccl-tests."""

from __future__ import annotations

__all__ = ["ALIASES", "ITEM_BYTES", "averages", "reduces"]

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

ALIASES = {
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
