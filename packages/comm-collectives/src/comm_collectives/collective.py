"""The head of every public function: what happens before a call is checked.

``@collective`` puts a head in front of a function that holds the checked path alone. In this order, the head

1. understands what callers of DeepSpeed and of older torch write (:mod:`.argument_names`);
2. under ``torch.compile``, calls the form that goes into a graph, or breaks the graph (:mod:`.graph_breaks`);
3. looks up the fast path of the backend and takes it (:class:`comm_utils.fast_path.FastPathCache`);
4. calls the function, and asks the backend for a fast path for later calls of this kind.

The head is a real function with the signature, docstring and source of what it stands before. Its code is generated, as
that of dataclasses is: a closure would take ``*args``, and cost more than the look-up (decision 3).
"""

from __future__ import annotations

import functools
import inspect
import linecache
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.compiler import is_dynamo_compiling
from torch.distributed import ProcessGroup

from comm_collectives import graph_breaks, traced
from comm_collectives.argument_names import LABELS, MISSING, call_with, refuse_incomplete
from comm_collectives.arguments import as_flag
from comm_collectives.compression.selection import PLAIN, simplify
from comm_collectives.derived_fast_path import fast_path_of
from comm_collectives.graph_operators import FORMS
from comm_collectives.help_texts import COLLECTIVE_ERRORS, OBJECT_ERRORS, WRONG_ARGUMENTS, with_full_help
from comm_utils.active import slot
from comm_utils.fast_path import FastPath, FastPathKey
from comm_utils.reduce_op import ReduceOp
from comm_utils.torch_support.uncompiled import uncompiled

__all__ = ["INLINE", "collective"]

P = ParamSpec("P")
T = TypeVar("T")

#: For ``compiled``: torch.compile traces the function itself.
INLINE = "the function itself"
# A number, of Python's or NumPy's, may equal an enumerator of torch's, and is no op all the same.
_OPS = frozenset((str, ReduceOp, torch.distributed.ReduceOp, torch.distributed.ReduceOp.RedOpType))

_UNDERSTAND = """\
    if more or named:
        return call_with(head, positional, labels, {by_name}, more, named)
"""
_COMPILED = """\
    if {is_compiling}():
        return {compiled}
"""
_FLAG = """\
    if async_op is not False and async_op is not True:
        async_op = as_flag({name!r}, "async_op", async_op)
"""
_FAST = """\
    if {usual}:
        try:
            key = {key}
            fast = (slot.fast_paths.asynchronous if async_op else slot.fast_paths.synchronous).get(key)
        except Exception:  # not hashable, so neither an op nor a group: the checked path refuses it
            fast = None
        if fast is not None:
            outcome = fast({tensors})
            if outcome:
                return outcome if async_op else {result}
        {call}
        if fast is None:
            settle(key, async_op)
        return outcome
"""
_CHECKED = """\
    if {missing}:
        refuse_incomplete(head, {by_name})
"""


def collective(
    tensors: Sequence[str] | None = None,
    detail: str | tuple[str, str] | None = None,
    operation: str | None = None,
    result: str = "None",
    compiled: str = graph_breaks.NEVER,
    labels: bool = True,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make the decorator for a public function.

    Args:
        tensors: its parameters that a fast path takes, in this order; None if it has no fast path.
        detail: its op, its root, or its root and its op: see ``Backend.fast_path``.
        operation: the backend's name of it, where that is another one.
        result: the parameter that the synchronous call returns.
        compiled: the reason why a call breaks the graph of ``torch.compile``, where it has no form in graphs
            (:data:`.graph_operators.FORMS`); or :data:`INLINE`.
        labels: it takes DeepSpeed's labels for the comms logger.
    """

    def decorate(body: Callable[P, T]) -> Callable[P, T]:
        settled = _Settled(body.__name__, operation or body.__name__)
        return cast("Callable[P, T]", _make_head(body, tensors, detail, settled, result, compiled, labels))

    return decorate


class _Settled:
    """Asks the backend for the fast path of a kind of call that was checked in full."""

    def __init__(self, name: str, operation: str) -> None:
        self._name, self._operation = name, operation

    def __call__(self, key: FastPathKey, async_op: bool) -> None:
        _, detail, group = key
        if group is not None and not isinstance(group, ProcessGroup):
            return  # this rank is not a member
        view = slot.backend.during(self._name)

        def make() -> FastPath:
            return fast_path_of(view, self._operation, detail, group, bool(async_op)) or _refuse

        slot.fast_paths.keep(key, async_op, make)


def _refuse(*_: object) -> bool:
    """Stand for the fast path of a kind of call that has none."""
    return False


def _make_head(
    body: Callable[..., Any],
    tensors: Sequence[str] | None,
    detail: str | tuple[str, str] | None,
    settle: Callable[..., None],
    result: str,
    compiled: str,
    labels: bool,
) -> Callable[..., Any]:
    name, parameters = body.__name__, list(inspect.signature(body).parameters.values())
    default_op = next((one.default for one in parameters if one.name == "op"), None)
    required = [one.name for one in parameters if one.default is one.empty]
    positional = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
    by_keyword = ", ".join(one.name if one.name in positional else f"{one.name}={one.name}" for one in parameters)
    by_name = "{" + ", ".join(f"{one.name!r}: {one.name}" for one in parameters) + "}"
    source = _head_line(name, parameters)
    source += _UNDERSTAND.format(by_name=by_name)
    known: dict[str, Any] = {
        "MISSING": MISSING,
        "PLAIN": PLAIN,
        # No __name__: torch.compile would look for these in the module of that name.
        "__package__": "comm_collectives",
        "_OPS": _OPS,
        "as_flag": as_flag,
        "body": body,
        "call_with": call_with,
        "default_key": (name, default_op if detail else None, None),
        "default_op": default_op,
        "defaults": [one.default for one in parameters],
        "graph_breaks": graph_breaks,
        "is_dynamo_compiling": is_dynamo_compiling,
        "labels": LABELS if labels else (),
        "positional": positional,
        "refuse_incomplete": refuse_incomplete,
        "settle": settle,
        "simplify": simplify,
        "slot": slot,
        "torch": torch,
    }
    if compiled is not INLINE:
        # torch looks at the code of a function that gets no tensor only where it mentions a module of torch, and would
        # otherwise trace what that calls.
        asks = "is_dynamo_compiling" if tensors else "torch.compiler.is_dynamo_compiling"
        calls = f"graph_breaks.{name}({by_keyword})"
        if name in FORMS:
            known["traced"], calls = traced, f"traced.call({name!r}, {by_name})"
        source += _COMPILED.format(is_compiling=asks, compiled=calls)
    if "async_op" in (one.name for one in parameters):
        source += _FLAG.format(name=name)
    is_complete = " or ".join(f"{one} is MISSING" for one in required)
    checked = _CHECKED.format(missing=is_complete, by_name=by_name) if required else ""
    call = f"outcome = body({by_keyword})"
    if tensors is not None:
        if required:
            call = f"outcome = refuse_incomplete(head, {by_name}) if {is_complete} else body({by_keyword})"
        source += _FAST.format(
            usual=_usual(name, parameters, tensors, detail),
            key=_key(name, detail),
            tensors=", ".join(tensors),
            result=result,
            call=call,
        )
    source += checked
    source += f"    return body({by_keyword})\n"
    filename = f"<head of comm_collectives.{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), known)
    head: Callable[..., Any] = functools.wraps(body)(known[name])
    # A call that is not traced into the graph of its caller gains nothing from a graph of its own.
    known["head"] = uncompiled(head)
    names = {one.name for one in parameters}
    errors = COLLECTIVE_ERRORS if "timeout" in names else WRONG_ARGUMENTS
    with_full_help(head, OBJECT_ERRORS if "allow_pickle" in names else errors)
    head.takes_labels = labels  # type: ignore[attr-defined]
    if compiled is not INLINE:
        graph_breaks.add(name, head, graph_breaks.WHOLE if name in FORMS else compiled)
    return head


def _head_line(name: str, parameters: Sequence[inspect.Parameter]) -> str:
    """Write the first line: every parameter has a default, so that it may be given under another name."""
    written: list[str] = []
    for place, one in enumerate(parameters):
        if one.kind is one.KEYWORD_ONLY and "*more" not in written:
            written.append("*more")
        default = "MISSING" if one.default is one.empty else f"defaults[{place}]"
        written.append(f"{one.name}={default}")
    if "*more" not in written:
        written.append("*more")
    return f"def {name}({', '.join(written)}, **named):\n"


def _key(name: str, detail: str | tuple[str, str] | None) -> str:
    """Write the key of the cache: of most calls a constant, which costs less to make, and to find, than a tuple."""
    if isinstance(detail, tuple):
        return f"({name!r}, ({', '.join(detail)}), group)"
    key = f"({name!r}, {detail}, group)"
    if detail not in (None, "op"):
        return key
    return f"default_key if group is None{' and op is default_op' if detail else ''} else {key}"


def _usual(
    name: str, parameters: Sequence[inspect.Parameter], tensors: Sequence[str], detail: str | tuple[str, str] | None
) -> str:
    """Write the condition under which the cache is asked: nothing is given that its keys do not tell."""
    roles = (detail,) if isinstance(detail, str) else detail or ()
    conditions, names = [], [one.name for one in parameters]
    for one in parameters:
        if one.name in tensors or one.name in ("group", "async_op"):
            continue
        if one.name == "op":
            conditions.append("(op is default_op or type(op) is str or type(op) in _OPS)")
        elif one.name in roles:
            # True equals 1, and NumPy's integers equal Python's.
            has_default = one.name in ("src", "dst") and len(tensors) == 2
            conditions.append(f"(type({one.name}) is int{f' or {one.name} is None' if has_default else ''})")
        elif one.name == "compression":
            op = "op" if "op" in names else "None"
            simplified = f"simplify({name!r}, compression, {op}, group, ({', '.join(tensors)},))"
            # Calls that are collected are made later, by the default.
            plain = f"not slot.fast_paths.collects_here and (compression := {simplified}) is PLAIN"
            conditions.append(f"(compression is None or ({plain}))")
        elif one.default is None:
            conditions.append(f"{one.name} is None")
        else:
            conditions.append(f"type({one.name}) is {type(one.default).__name__} and {one.name} == {one.default!r}")
    return " and ".join(conditions)
