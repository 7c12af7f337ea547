"""Wrong values of each role that an argument can have, and the rows that follow for every operation.

A row here is one line: :data:`TENSOR_KINDS`, :data:`OPS` and the like are tried in every argument of that role.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as c10d
from wrong_calls.right import MESSAGES, OBJECTS, REDUCING, TENSORS, Arguments, ones, operation, places, right

import comm_orchestrator as dist
from comm_utils.errors import ArgumentTypeError
from comm_utils.operations import Role

__all__ = ["TENSOR_KINDS", "TYPE", "VALUE", "Row", "generated", "recast", "replaced"]

VALUE, TYPE = dist.ArgumentError, ArgumentTypeError


@dataclass(frozen=True)
class Row:
    """A call whose right arguments are changed so that it is wrong.

    Attributes:
        call: name of the operation.
        changes: (rank, world size) -> arguments that replace right ones.
        error: exactly this class.
        texts: what the message holds.
        ranks: those on which it is wrong; the others do not call, but for objects, where they get an error as well.
    """

    call: str
    changes: Callable[[int, int], Arguments]
    error: type[Exception]
    texts: tuple[str, ...]
    ranks: tuple[int, ...] = (0, 1)


@dataclass(frozen=True)
class TensorKind:
    """A value that cannot be communicated; with ``written_only``, one that can be read but not written."""

    make: Callable[[], Any]
    error: type[Exception]
    texts: tuple[str, ...]
    written_only: bool = False


def _quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer releases of torch announce their end
        return torch.quantize_per_tensor(ones(), 0.1, 0, torch.quint8)


TENSOR_KINDS = {
    "none": TensorKind(lambda: None, TYPE, ("got None", "expected a")),
    "string": TensorKind(lambda: "weights", TYPE, ("got 'weights' of type str", "expected a")),
    "number": TensorKind(lambda: 1.5, TYPE, ("got 1.5 of type float", "expected a")),
    "numpy": TensorKind(lambda: ones().numpy(), TYPE, ("of type ndarray", "expected a")),
    "meta": TensorKind(lambda: ones().to("meta"), VALUE, ("got a tensor on meta", "of this group serves cpu", "move")),
    "sparse": TensorKind(lambda: ones().to_sparse(), TYPE, ("got a sparse tensor", "sparse_coo", "to_dense()")),
    "nested": TensorKind(lambda: torch.nested.nested_tensor([ones()]), TYPE, ("got a nested tensor",)),
    "quantized": TensorKind(_quantized, TYPE, ("got a quantized tensor", "quint8", "int_repr()")),
    "expanded": TensorKind(
        lambda: ones(1).expand(4), VALUE, ("shape (4,)", "strides (0,)", "gaps or overlaps"), written_only=True
    ),
    "strided": TensorKind(
        lambda: ones(8)[::2], VALUE, ("shape (4,)", "strides (2,)", "contiguous or dense"), written_only=True
    ),
    "overlapping": TensorKind(
        lambda: ones(3).as_strided((2, 2), (1, 1)), VALUE, ("shape (2, 2)", "strides (1, 1)"), written_only=True
    ),
    "conjugated": TensorKind(
        lambda: ones(4, torch.complex64).conj(), VALUE, ("lazily conjugated", "resolve_conj()"), written_only=True
    ),
    "negated": TensorKind(
        lambda: torch._neg_view(ones()), VALUE, ("lazily negated", "resolve_neg()"), written_only=True
    ),
}

_OPS = "'sum', 'product', 'min', 'max', 'band', 'bor', 'bxor', 'avg'"
OPS: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "mean": ("mean", VALUE, ("op: got 'mean'", _OPS)),
    "typing-error": ("prodct", VALUE, ("op: got 'prodct'", "did you mean 'product'?")),
    "empty": ("", VALUE, ("op: got ''", _OPS)),
    "none": (None, TYPE, ("op: got None of type NoneType", _OPS)),
    "number": (2.5, TYPE, ("op: got 2.5 of type float", _OPS)),
    "list": (["sum"], TYPE, ("op: got ['sum'] of type list", _OPS)),
    "unused": (dist.ReduceOp.UNUSED, VALUE, ("op: got <ReduceOp.UNUSED", _OPS)),
    "premul-sum": (c10d.ReduceOp.PREMUL_SUM, VALUE, ("op: got <RedOpType.PREMUL_SUM", _OPS)),
}
#: op, dtype of every tensor -> what the message holds.
REFUSED_REDUCTIONS = {
    ("band", torch.float32): ("op 'band' is not defined for torch.float32", "integer or bool"),
    ("bor", torch.float16): ("op 'bor' is not defined for torch.float16", "integer or bool"),
    ("bxor", torch.bfloat16): ("op 'bxor' is not defined for torch.bfloat16", "integer or bool"),
    ("avg", torch.int64): ("op 'avg' is not defined for torch.int64", "'sum'", "float"),
    ("avg", torch.uint8): ("op 'avg' is not defined for torch.uint8", "'sum'", "float"),
    ("avg", torch.bool): ("op 'avg' is not defined for torch.bool", "'sum'", "float"),
    ("min", torch.complex64): ("op 'min' is not defined for torch.complex64", "'sum' and 'avg'"),
    ("max", torch.complex128): ("op 'max' is not defined for torch.complex128", "'sum' and 'avg'"),
    ("product", torch.complex64): ("op 'product' is not defined for torch.complex64", "'sum' and 'avg'"),
    ("band", torch.complex64): ("op 'band' is not defined for torch.complex64", "'sum' and 'avg'"),
    ("sum", torch.float8_e4m3fn): ("torch.float8_e4m3fn tensors can be moved but not reduced", "bfloat16"),
    ("avg", torch.float8_e5m2): ("torch.float8_e5m2 tensors can be moved but not reduced", "bfloat16"),
    ("max", torch.float8_e4m3fnuz): ("torch.float8_e4m3fnuz tensors can be moved but not reduced", "bfloat16"),
}

ROOTS: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "outside": (2, VALUE, ("got rank 2", "not in the group", "[0, 1]")),
    "negative": (-1, VALUE, ("got rank -1", "not in the group", "[0, 1]")),
    "string": ("0", TYPE, ("got '0' of type str", "expected an integer")),
    "float": (1.0, TYPE, ("got 1.0 of type float", "expected an integer")),
    "bool": (True, TYPE, ("got True of type bool", "expected an integer")),
}
GROUP_ROOTS = {"outside": (2, "got 2"), "negative": (-1, "got -1")}
#: Calls whose root has no default.
NEEDING_A_ROOT = ("broadcast", "reduce", "send", "isend", "send_object_list")

TAGS: dict[str, tuple[Any, type[Exception]]] = {
    "negative": (-1, VALUE),
    "string": ("first", TYPE),
    "float": (1.5, TYPE),
    "none": (None, TYPE),
    "bool": (True, TYPE),
    "huge": (2**70, VALUE),
}
GROUPS: dict[str, tuple[Any, str]] = {
    "string": ("world", "got 'world' of type str"),
    "ranks": ([0, 1], "got a list of 2"),
    "number": (0, "got 0 of type int"),
}


def recast(value: Any, dtype: torch.dtype) -> Any:
    """Return arguments with every tensor in another dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype)
    if isinstance(value, dict):
        return {name: recast(entry, dtype) for name, entry in value.items()}
    return [recast(entry, dtype) for entry in value] if isinstance(value, list) else value


def replaced(arguments: Arguments, where: str, value: Any) -> Arguments:
    """Return the one argument at ``where``, such as ``tensor_list[1]``, with ``value`` there."""
    name, _, position = where.rstrip("]").partition("[")
    if not position:
        return {name: value}
    changed = list(arguments[name])
    changed[int(position)] = value
    return {name: changed}


def _spoil(name: str, where: str, make: Callable[[], Any]) -> Callable[[int, int], Arguments]:
    return lambda rank, W: replaced(right(name, rank, W), where, make())


def _fixed(**changes: Any) -> Callable[[int, int], Arguments]:
    return lambda rank, W: dict(changes)


def _own_rank(key: str, **changes: Any) -> Callable[[int, int], Arguments]:
    return lambda rank, W: {**changes, key: rank}


def _reduction(name: str, op: str, dtype: torch.dtype) -> Callable[[int, int], Arguments]:
    return lambda rank, W: {**recast(right(name, rank, W), dtype), "op": op}


def _tensors(name: str) -> Iterator[tuple[str, Row]]:
    for where, ranks, written in places(name):
        for label, kind in TENSOR_KINDS.items():
            if written or not kind.written_only:
                some = "" if ranks == (0, 1) else f"-on-{ranks[0]}"
                texts = (f"{where}: got", *kind.texts)
                yield f"{where}-{label}{some}", Row(name, _spoil(name, where, kind.make), kind.error, texts, ranks)


def _ops(name: str) -> Iterator[tuple[str, Row]]:
    for label, (op, error, texts) in OPS.items():
        yield f"op-{label}", Row(name, _fixed(op=op), error, texts)
    for (op, dtype), refusal in REFUSED_REDUCTIONS.items():
        yield f"op-{op}-{dtype}", Row(name, _reduction(name, op, dtype), VALUE, refusal)


def _roots(name: str, key: str, local: str | None) -> Iterator[tuple[str, Row]]:
    for label, (value, error, texts) in ROOTS.items():
        yield f"{key}-{label}", Row(name, _fixed(**{key: value}), error, (f"{key}: {texts[0]}", *texts[1:]))
    if name in NEEDING_A_ROOT:
        missing = (f"{key}: missing", "expected the global rank")
        yield f"{key}-missing", Row(name, _fixed(**{key: None}), VALUE, missing)
    if local is not None:
        both = (f"both {key}=", f"{local}=1", "expected one of them")
        yield f"{local}-both", Row(name, _fixed(**{local: 1}), VALUE, both)
        for label, (value, text) in GROUP_ROOTS.items():
            outside = (f"{local}: {text}", "expected 0 to 1 in a group of 2")
            yield f"{local}-{label}", Row(name, _fixed(**{key: None, local: value}), VALUE, outside)
        if operation(name).pattern.is_message:
            itself = (f"{key}: got this rank itself", "another member")
            yield f"{key}-itself", Row(name, _own_rank(key), VALUE, itself)
            yield f"{local}-itself", Row(name, _own_rank(local, **{key: None}), VALUE, itself)


def _tags(name: str) -> Iterator[tuple[str, Row]]:
    for label, (tag, error) in TAGS.items():
        expected = "0 to 2147483647" if label == "huge" else "0 or more"
        texts = (f"tag: got {tag!r}", f"expected an integer of {expected}")
        yield f"tag-{label}", Row(name, _fixed(tag=tag), error, texts)


def _groups(name: str) -> Iterator[tuple[str, Row]]:
    expected = ("expected a process group from new_group()", "None for the world group")
    for label, (group, text) in GROUPS.items():
        yield f"group-{label}", Row(name, _fixed(group=group), TYPE, (f"group: {text}", *expected))


def generated(names: Sequence[str] = (*TENSORS, *OBJECTS)) -> dict[str, Row]:
    """Return a row for every wrong value of every argument: ``"all_reduce-tensor-sparse"`` and so on."""
    rows: dict[str, Row] = {}
    for name in names:
        found: dict[str, Row] = dict(_groups(name))
        row = operation(name)
        root, local = row.argument(Role.ROOT), row.argument(Role.GROUP_ROOT)
        if name in TENSORS:
            found.update(_tensors(name))
        if name in REDUCING:
            found.update(_ops(name))
        if root is not None:
            found.update(_roots(name, root.name, local.name if local is not None else None))
        if name in MESSAGES:
            found.update(_tags(name))
        rows.update({f"{name}-{label}": row for label, row in found.items()})
    return rows
