"""``torch.ops.comm_collectives.NAME``: synchronous collectives as operators, which ``torch.compile`` puts into graphs.

An operator calls the public function of its name. So a call within a graph is that call: it takes the fast path, is
checked, recorded, logged and compared, and raises the usual errors. Its schema follows from the row of the operation in
the table of operations: it has the arguments of the row, and writes the tensors that the row says.

Every operator also says that it writes one more tensor, :data:`ORDER`, which all of them share and none of them
touches. Compilers keep the order of what writes the same tensor, and drop none of it. So calls stay in the program's
order, also on independent tensors; two calls with equal inputs stay two; and a call whose result nobody reads is made.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch.distributed import ProcessGroup

from comm_collectives.call_sites import calling_from
from comm_collectives.labels import labelled
from comm_utils.active import slot
from comm_utils.errors import ArgumentError, NotInitializedError
from comm_utils.operations import registry
from comm_utils.operations.table import ROWS
from comm_utils.operations.types import Argument, Form, OperationSpec, Role
from comm_utils.process_locks import ProcessLock
from comm_utils.torch_support import factories

__all__ = ["FORMS", "ORDER", "define", "is_coalescing", "token_of"]

_NAMESPACE = "comm_collectives"

#: The types of arguments in schemas; an operation with an argument of another role has no operator.
_TYPES = {
    Role.OP: "str",
    Role.ROOT: "SymInt?",
    Role.GROUP_ROOT: "SymInt?",
    Role.INPUT_SPLITS: "SymInt[]?",
    Role.OUTPUT_SPLITS: "SymInt[]?",
    Role.GROUP: "str",
    Role.TIMEOUT: "float?",
    Role.COMPRESSION: "str?",
}
#: After the arguments of the operation: its label for the comms logger, the line of the program, and :data:`ORDER`.
_MORE = "str? log_name, bool prof, str line, Tensor(order!) order"


def _arguments(row: OperationSpec) -> tuple[Argument, ...]:
    """Return the arguments of the operator of an operation; none where it can have none.

    Messages have none, as two ranks alone know of them; nor have operations that write no tensor of the caller.
    """
    arguments = tuple(one for one in row.arguments if one.role is not Role.ASYNC_OP)
    if row.pattern.is_message or not any(one.is_written for one in arguments):
        return ()
    if not all(one.role is Role.TENSOR or one.role in _TYPES for one in arguments):
        return ()
    return arguments


def _kind(argument: Argument) -> str:
    if argument.role is not Role.TENSOR:
        return argument.role.name
    if argument.form in (Form.SINGLE, Form.FLAT):
        return "TENSOR"
    if argument.form is Form.SEVERAL:
        return "ANY_TENSORS"
    return "TENSORS_AT_ROOT" if argument.at_root else "TENSORS"


#: Of each operation that has an operator, its arguments in order, each a name and a kind: the name of its role, and of
#: tensors ``TENSOR``, ``TENSORS`` (one for each rank), ``TENSORS_AT_ROOT`` or ``ANY_TENSORS``, of any dtypes.
FORMS: dict[str, tuple[tuple[str, str], ...]] = {
    row.name: tuple((one.name, _kind(one)) for one in _arguments(row)) for row in ROWS if _arguments(row)
}

#: The tensor that orders the calls. No mode of the program that imports this has a say in it.
with torch.inference_mode(False), torch.device("cpu"):
    ORDER = factories.zeros(1)

_turn = ProcessLock(threading.Lock)
_library: Any = None
_numbers = itertools.count(1)
_tokens: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()
_groups: WeakValueDictionary[str, ProcessGroup] = WeakValueDictionary()


def token_of(group: ProcessGroup | None) -> str:
    """Return the name by which a graph knows ``group``, and does not hold it; "" is the world at the time of a call."""
    if group is None:
        return ""
    with _turn.lock:
        found = _tokens.get(group)
        if found is None:
            found = _tokens[group] = str(next(_numbers))
            _groups[found] = group
        return found


def is_coalescing() -> bool:
    """Return whether this thread is in a ``coalescing()`` block."""
    return slot.fast_paths.collects_here


def define() -> None:
    """Define the operators, once."""
    global _library
    if _library is None:
        with _turn.lock:
            if _library is None:
                _library = _define()


def _define() -> Any:
    make: Any = torch.library.Library
    library = make(_NAMESPACE, "FRAGMENT")
    # A tensor that is contiguous in the program has to be so in the graph.
    exact: Any = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
    for row in ROWS:
        if row.name in FORMS:
            library.define(f"{row.name}({_schema(row)}, {_MORE}) -> ()", tags=(exact,))
            library.impl(row.name, _kernel(row), "CompositeExplicitAutograd")
            library._register_fake(row.name, _nothing)
    return library


def _schema(row: OperationSpec) -> str:
    written = []
    for place, one in enumerate(_arguments(row)):
        kind = _TYPES.get(one.role)
        if kind is None:
            kind = f"Tensor(t{place}!)" if one.is_written else "Tensor"
            if one.form not in (Form.SINGLE, Form.FLAT):
                kind += "[]"
        written.append(f"{kind} {one.name}")
    return ", ".join(written)


def _nothing(*_: object) -> None:
    """Do what a call does to tensors that have no elements."""


def _kernel(row: OperationSpec) -> Callable[..., None]:
    name, names = row.name, tuple(one for one, _ in FORMS[row.name])
    function = registry.function_of(row)
    at_root = tuple(one for one, kind in FORMS[row.name] if kind == "TENSORS_AT_ROOT")

    def kernel(*arguments: Any) -> None:
        given = dict(zip(names, arguments, strict=False))
        log_name, prof, line, _ = arguments[len(names) :]
        if given["group"]:
            given["group"] = _group_of(name, given["group"])
        else:
            given["group"] = None
        for one in at_root:
            given[one] = given[one] or None
        if is_coalescing():
            raise ArgumentError(
                f"{name}: got called in a graph of torch.compile within coalescing(), at whose end the graph no longer "
                "has its tensors; call the compiled function outside of the block"
            )
        call = calling_from(line)
        if prof or log_name is not None:
            with labelled(log_name, prof):
                call(function, given)
        else:
            call(function, given)

    return kernel


def _group_of(name: str, token: str) -> ProcessGroup:
    group = _groups.get(token)
    if group is None:
        raise NotInitializedError(f"{name}: this process group no longer exists; make a new one with new_group()")
    return group
