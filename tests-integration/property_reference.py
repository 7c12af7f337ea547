"""What a reduction has to give: exact where arithmetic is exact, otherwise within the rounding of a float64 reference.

Nothing here uses the packages under test.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from property_tensors import as_memory, generator, random_bits

__all__ = ["assert_reduced", "is_defined", "operand"]

_HALF = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALF, torch.float32, torch.float64)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_ON_INTEGERS: dict[str, Callable[..., Any]] = {
    "sum": operator.add,
    "product": operator.mul,
    "min": np.minimum,
    "max": np.maximum,
    "band": operator.and_,
    "bor": operator.or_,
    "bxor": operator.xor,
}
_ON_BOOLS: dict[str, Callable[..., Any]] = {
    "sum": np.logical_or,
    "product": np.logical_and,
    "min": np.logical_and,
    "max": np.logical_or,
    "band": np.logical_and,
    "bor": np.logical_or,
    "bxor": np.logical_xor,
}
_ON_FLOATS: dict[str, Callable[..., Any]] = {
    "sum": operator.add,
    "avg": operator.add,
    "product": operator.mul,
    "min": np.minimum,
    "max": np.maximum,
}


def is_defined(op: str, dtype: torch.dtype) -> bool:
    """Whether tensors of ``dtype`` can be reduced with ``op``."""
    if dtype in _COMPLEX:
        return op in ("sum", "avg")
    if dtype in _FLOATS:
        return op in _ON_FLOATS
    return op != "avg" and not dtype.is_floating_point  # the remaining floats are of 8 bits


def operand(shape: Sequence[int], dtype: torch.dtype, op: str, exact: bool, *key: object) -> torch.Tensor:
    """One rank's input; ``exact`` floats have sums and products without rounding, in any order, of up to 4 of them."""
    if dtype in _COMPLEX:
        real = torch.view_as_real(torch.empty(tuple(shape), dtype=dtype)).dtype
        return torch.view_as_complex(operand((*shape, 2), real, op, exact, *key))
    if dtype not in _FLOATS:
        return random_bits(shape, dtype, *key)
    random = generator(key)
    if not exact:
        values = torch.randn(tuple(shape), dtype=torch.float64, generator=random)
    elif op == "product":
        values = torch.randint(-1, 2, tuple(shape), dtype=torch.float64, generator=random) * 2.0
    elif op == "avg" and dtype in _HALF:
        # Full mantissas of neighbouring binades: exact in float32, and rounded when the result goes back to 16 bits.
        largest = 2048 if dtype == torch.float16 else 256
        values = torch.randint(1 - largest, largest, tuple(shape), dtype=torch.float64, generator=random)
        values *= 2.0 ** -torch.randint(5, tuple(shape), dtype=torch.float64, generator=random)
    else:
        values = torch.randint(-32, 33, tuple(shape), dtype=torch.float64, generator=random) / 4
    return values.to(dtype)


def assert_reduced(found: torch.Tensor, inputs: Sequence[torch.Tensor], op: str, exact: bool, what: str) -> None:
    """``found``, of any layout, is what ``op`` makes of ``inputs``, which are contiguous."""
    found = found.detach().contiguous().view(-1)
    inputs = [tensor.view(-1) for tensor in inputs]
    assert all(tensor.dtype == found.dtype and tensor.shape == found.shape for tensor in inputs), what
    if found.dtype in _COMPLEX:
        found, *inputs = (torch.view_as_real(tensor).reshape(-1) for tensor in (found, *inputs))
    if found.dtype == torch.bool:
        _assert_bools(found, inputs, op, what)
    elif found.dtype in _FLOATS:
        _assert_floats(found, inputs, op, exact, what)
    else:
        _assert_integers(found, inputs, op, what)


def _assert_bools(found: torch.Tensor, inputs: Sequence[torch.Tensor], op: str, what: str) -> None:
    expected = reduce(_ON_BOOLS[op], [tensor.numpy() for tensor in inputs])
    _assert_equal(as_memory(found).numpy(), expected.astype(np.uint8), what)


def _assert_integers(found: torch.Tensor, inputs: Sequence[torch.Tensor], op: str, what: str) -> None:
    modulus = 2 ** (8 * found.element_size())
    expected = reduce(_ON_INTEGERS[op], [_python_integers(tensor) for tensor in inputs])
    _assert_equal(_python_integers(found) % modulus, expected % modulus, what)


def _python_integers(tensor: torch.Tensor) -> Any:
    name = str(tensor.dtype).removeprefix("torch.")
    return as_memory(tensor).numpy().view(name).astype(object)


def _assert_floats(found: torch.Tensor, inputs: Sequence[torch.Tensor], op: str, exact: bool, what: str) -> None:
    W = len(inputs)
    wide = [tensor.double().numpy().astype(np.longdouble) for tensor in inputs]
    total = reduce(_ON_FLOATS[op], wide)
    result = found.double().numpy()
    if op in ("min", "max") or (exact and op in ("sum", "product")):
        _assert_equal(result, total.astype(np.float64), what)
        return
    if op == "avg" and exact and found.dtype in _HALF:
        once = (torch.from_numpy(total.astype(np.float32)) / W).to(found.dtype)
        _assert_equal(result, once.double().numpy(), what)
        return
    eps = torch.finfo(found.dtype).eps
    if op == "product":
        bound = W * eps * np.abs(total)
    elif op == "sum":
        bound = W * eps * sum(np.abs(values) for values in wide)
    elif found.dtype in _HALF:  # accumulated in float32 and rounded once
        bound = eps / 2 * np.abs(total) / W + W * 2.0**-23 * sum(np.abs(values) for values in wide)
    else:
        bound = W * eps * sum(np.abs(values) for values in wide) / W
    expected = total / W if op == "avg" else total
    wrong = np.abs(result - expected) > bound + torch.finfo(found.dtype).tiny
    assert not wrong.any(), f"{what}: {_first(wrong, result, expected)}"


def _assert_equal(found: Any, expected: Any, what: str) -> None:
    wrong = np.asarray(found != expected)
    assert not wrong.any(), f"{what}: {_first(wrong, found, expected)}"


def _first(wrong: Any, found: Any, expected: Any) -> str:
    at = int(np.flatnonzero(wrong)[0])
    return (
        f"{int(wrong.sum())} of {wrong.size} elements differ; element {at} is {found[at]!r}, expected {expected[at]!r}"
    )
