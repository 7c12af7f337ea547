"""Codes of operations, dtypes and reductions are the same in C++, in Python and in the table of operations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from comm_backend_ccl.tables import DTYPES, MESSAGE_DTYPES, ONECCL_DTYPES, ONECCL_OPS, OPS, Operation
from comm_utils import operations
from comm_utils.reduce_op import ReduceOp

NATIVE = Path(__file__).resolve().parents[1] / "native"
REDUCE_OPS = {
    "sum": ReduceOp.SUM,
    "product": ReduceOp.PRODUCT,
    "minimum": ReduceOp.MIN,
    "maximum": ReduceOp.MAX,
    "average": ReduceOp.AVG,
    "bit_and": ReduceOp.BAND,
    "bit_or": ReduceOp.BOR,
    "bit_xor": ReduceOp.BXOR,
}
#: What the native library tells apart and programs call by one name: exchanges with and without split sizes.
ONLY_NATIVE = {"ALL_TO_ALL_V"}


def enums(name: str) -> dict[str, list[str]]:
    """Return the enumerators of each C++ enum ``name``, by file; a last one with its plural counts them."""
    found = {}
    for path in [*NATIVE.rglob("*.hpp"), *NATIVE.rglob("*.cpp")]:
        text = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
        for body in re.findall(rf"\benum\s+(?:class\s+)?{name}\b[^{{;]*\{{([^}}]*)\}}", text):
            members = [one.strip() for one in body.split(",") if one.strip()]
            assert not any("=" in one for one in members), f"{path}: expected consecutive codes, got {members}"
            found[str(path)] = [one for one in members if one != f"{name.lower()}s"]
    return found


def test_operations_are_numbered_alike() -> None:
    found = enums("Operation")
    assert len(found) == 2, f"expected one enum for shared memory and one for oneCCL, got {list(found)}"
    expected = [one.name.lower() for one in sorted(Operation)]
    shorter, longer = sorted(found.values(), key=len)
    assert longer == expected
    assert shorter == expected[: len(shorter)]


@pytest.mark.parametrize(("name", "python"), [("Dtype", DTYPES), ("Op", OPS)])
def test_dtypes_and_reductions_are_numbered_alike(name: str, python: dict[object, int]) -> None:
    ((path, members),) = enums(name).items()
    known = {**REDUCE_OPS, "boolean": torch.bool}
    found = {known.get(member, getattr(torch, member, None)): code for code, member in enumerate(members)}
    assert found == python, path


def test_both_engines_agree() -> None:
    assert ONECCL_DTYPES.items() <= DTYPES.items()
    assert ONECCL_OPS.items() <= OPS.items()


def test_every_dtype_of_torch_has_a_code_in_messages() -> None:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    missing = found - set(MESSAGE_DTYPES)
    # A later torch may have more, which messages take for "another dtype".
    assert not missing or tuple(map(int, torch.__version__.split(".")[:2])) > (2, 15), missing
    assert set(MESSAGE_DTYPES) <= found
    assert len(set(MESSAGE_DTYPES.values())) == len(MESSAGE_DTYPES)


def test_the_table_has_the_native_codes() -> None:
    table = {row.native_code: row.name for row in operations.rows() if row.native_code >= 0}
    assert {int(one) for one in Operation if one.name not in ONLY_NATIVE} == set(table)
    for code, name in table.items():
        native = Operation(code).name.lower()
        row = operations.get(name)
        assert native in (row.name, row.pattern.name) or (native == "receive" and row.pattern.is_receive)
