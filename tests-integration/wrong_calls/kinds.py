"""The rows that follow for every operation from the wrong values of each role, in :mod:`wrong_calls.values`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from wrong_calls.right import MESSAGES, OBJECTS, REDUCING, TENSORS, Arguments, operation, places, right
from wrong_calls.values import (
    FLAGS,
    GROUP_ROOTS,
    GROUPS,
    LISTS,
    LOST_GROUPS,
    MODES,
    NEEDING_A_ROOT,
    NEVER_REDUCED,
    OPS,
    REFUSED_REDUCTIONS,
    ROOTS,
    TAGS,
    TENSOR_KINDS,
    TIMEOUTS,
    TRANSFORMS,
    TYPE,
    VALUE,
)

import comm_orchestrator as dist
from comm_utils.operations import Form, Role

__all__ = ["TENSOR_KINDS", "TYPE", "VALUE", "Row", "generated", "recast", "replaced"]


@dataclass(frozen=True)
class Row:
    """A call whose right arguments are changed so that it is wrong.

    Attributes:
        call: name of the operation.
        changes: (rank, world size) -> arguments that replace right ones.
        error: exactly this class.
        texts: what the message holds.
        ranks: those on which it is wrong; the others do not call, but for objects, where they get an error as well.
        around: calls a function within a mode or a transform of torch, and gives it the tensor for ``where``.
        where: keyword, with an index in a list, of the tensor that ``around`` replaces; none if empty.
    """

    call: str
    changes: Callable[[int, int], Arguments]
    error: type[Exception]
    texts: tuple[str, ...]
    ranks: tuple[int, ...] = (0, 1)
    around: Callable[[Callable[[Any], None]], None] | None = None
    where: str = ""


def recast(value: Any, dtype: torch.dtype) -> Any:
    """Return arguments with every tensor in another dtype, of bytes of 1 where torch does not convert to it."""
    if isinstance(value, torch.Tensor):
        if str(dtype).removeprefix("torch.") in NEVER_REDUCED:
            return torch.ones(value.numel() * dtype.itemsize, dtype=torch.uint8).view(dtype).view(value.shape)
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
            if not (kind.read_only if written else kind.written_only):
                some = "" if ranks == (0, 1) else f"-on-{ranks[0]}"
                texts = (f"{where}: got", *kind.texts)
                yield f"{where}-{label}{some}", Row(name, _spoil(name, where, kind.make), kind.error, texts, ranks)


def _tensors_under(name: str) -> Iterator[tuple[str, Row]]:
    for where, ranks, _ in places(name):
        for label, around in TRANSFORMS.items():
            some = "" if ranks == (0, 1) else f"-on-{ranks[0]}"
            texts = ("got called under a transform such as torch.vmap", "outside of these functions")
            yield f"{where}-under-{label}{some}", Row(name, _fixed(), VALUE, texts, ranks, around, where)


def _lists(name: str) -> Iterator[tuple[str, Row]]:
    for argument in operation(name).tensors:
        if argument.form in (Form.PER_RANK, Form.SEVERAL):
            ranks = (0,) if argument.at_root else (0, 1)
            texts = (f"{argument.name}: got", "expected a list")
            for label, make in LISTS.items():
                yield f"{argument.name}-list-{label}", Row(name, _made(argument.name, make), TYPE, texts, ranks)


def _made(name: str, make: Callable[[], Any]) -> Callable[[int, int], Arguments]:
    return lambda rank, W: {name: make()}


def _flags(name: str) -> Iterator[tuple[str, Row]]:
    for label, (value, text) in FLAGS.items():
        yield f"async-{label}", Row(name, _fixed(async_op=value), TYPE, (f"async_op: {text}", "expected True or False"))


def _timeouts(name: str) -> Iterator[tuple[str, Row]]:
    for label, (value, error, texts) in TIMEOUTS.items():
        yield f"timeout-{label}", Row(name, _fixed(timeout=value), error, (f"timeout: {texts[0]}", *texts[1:]))


def _modes(name: str) -> Iterator[tuple[str, Row]]:
    for label, (around, text) in MODES.items():
        yield f"mode-{label}", Row(name, _fixed(), VALUE, (text,), around=around)


def _ops(name: str) -> Iterator[tuple[str, Row]]:
    for label, (op, error, texts) in OPS.items():
        yield f"op-{label}", Row(name, _fixed(op=op), error, texts)
    for (op, dtype), refusal in REFUSED_REDUCTIONS.items():
        yield f"op-{op}-{dtype}", Row(name, _reduction(name, op, dtype), VALUE, refusal)
    for dtype_name in NEVER_REDUCED:
        dtype = getattr(torch, dtype_name)
        remedy = "torch.bfloat16" if dtype_name.startswith("float8") else "view(torch.uint8)"
        refusal = (f"{dtype} tensors can be moved but not reduced", remedy)
        yield f"op-sum-{dtype}", Row(name, _reduction(name, "sum", dtype), VALUE, refusal)


def _roots(name: str, key: str, local: str | None) -> Iterator[tuple[str, Row]]:
    for label, (value, error, texts) in ROOTS.items():
        yield f"{key}-{label}", Row(name, _fixed(**{key: value}), error, (f"{key}: {texts[0]}", *texts[1:]))
    if name in NEEDING_A_ROOT:
        missing = (f"{key}: missing", "expected the global rank")
        yield f"{key}-missing", Row(name, _fixed(**{key: None}), VALUE, missing)
    if local is not None:
        both = (f"both {key}=", f"{local}=1", "expected one of them")
        yield f"{local}-both", Row(name, _fixed(**{local: 1}), VALUE, both)
        for label, (value, error, *found) in GROUP_ROOTS.items():
            outside = (f"{local}: {found[0]}", found[1])
            yield f"{local}-{label}", Row(name, _fixed(**{key: None, local: value}), error, outside)
        if operation(name).pattern.is_message:
            itself = (f"{key}: got this rank itself", "another member")
            yield f"{key}-itself", Row(name, _own_rank(key), VALUE, itself)
            yield f"{local}-itself", Row(name, _own_rank(local, **{key: None}), VALUE, itself)


def _tags(name: str) -> Iterator[tuple[str, Row]]:
    for label, (tag, error) in TAGS.items():
        expected = "0 to 2147483647" if label in ("huge", "beyond-int") else "0 or more"
        texts = ("tag: got" if error is TYPE else f"tag: got {tag}", f"expected an integer of {expected}")
        yield f"tag-{label}", Row(name, _fixed(tag=tag), error, texts)


def _groups(name: str) -> Iterator[tuple[str, Row]]:
    expected = ("expected a process group from new_group()", "None for the world group")
    for label, (group, text) in GROUPS.items():
        yield f"group-{label}", Row(name, _fixed(group=group), TYPE, (f"group: {text}", *expected))
    for label, make in LOST_GROUPS.items():
        gone = ("this process group no longer exists", "new_group()")
        yield f"group-{label}", Row(name, _made("group", make), dist.NotInitializedError, gone)


def generated(names: Sequence[str] = (*TENSORS, *OBJECTS)) -> dict[str, Row]:
    """Return a row for every wrong value of every argument: ``"all_reduce-tensor-sparse"`` and so on."""
    rows: dict[str, Row] = {}
    for name in names:
        found: dict[str, Row] = {**dict(_groups(name)), **dict(_timeouts(name)), **dict(_modes(name))}
        row = operation(name)
        root, local = row.argument(Role.ROOT), row.argument(Role.GROUP_ROOT)
        if name in TENSORS:
            found.update(_tensors(name))
            found.update(_tensors_under(name))
            found.update(_lists(name))
        if row.argument(Role.ASYNC_OP) is not None:
            found.update(_flags(name))
        if name in REDUCING:
            found.update(_ops(name))
        if root is not None:
            found.update(_roots(name, root.name, local.name if local is not None else None))
        if name in MESSAGES:
            found.update(_tags(name))
        rows.update({f"{name}-{label}": row for label, row in found.items()})
    return rows
