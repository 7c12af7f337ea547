"""Functions for operations that other packages add to the table, made from their rows.

:func:`collective_of` checks the arguments of a call by their roles, as the functions of this package do, and calls the
method of that name of the backend. :func:`recorded_method` records it where the backend is observed.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from comm_collectives.arguments import (
    check_dtype,
    check_list,
    check_numel,
    check_tensor,
    describe,
    enter,
    group_rank_of,
)
from comm_collectives.work import deliver
from comm_utils import operations
from comm_utils.backend import Backend
from comm_utils.errors import ArgumentError, ArgumentTypeError, BackendUnavailableError
from comm_utils.operations import Argument, Form, OperationSpec, Role
from comm_utils.operations.calls import DEFAULTS
from comm_utils.reduce_op import parse_reduce_op

__all__ = ["collective_of", "recorded_method"]

_REQUIRED = inspect.Parameter.empty
# A backend gets them through ``during``, or never.
_OF_THE_CALL = frozenset((Role.TIMEOUT, Role.COMPRESSION))


def collective_of(row: OperationSpec) -> Callable[..., Any]:
    """Make the function of an operation that backends implement.

    Its parameters are those of the row, by position or by name, other names included. Tensors that are written have to
    be contiguous; those that are only read are copied where they are not. With ``async_op=True`` it returns a handle.

    Args:
        row: a primitive operation with tensors; its method of a backend takes the arguments of the row but for
            ``timeout``, roots as group ranks under the name of the role GROUP_ROOT if it has one.

    Raises:
        ArgumentError: backends do not implement the operation.
    """
    if not row.primitive or row.name not in row.travels_as:
        raise ArgumentError(f"collective_of: got {row.name}, which backends do not implement; expected primitive=True")
    signature = _signature(row)

    def collective(*args: Any, **kwargs: Any) -> Any:
        given = _bind(row, signature, args, kwargs)
        return _call(row, given)

    collective.__name__ = collective.__qualname__ = row.name
    collective.__doc__ = f"Call ``{row.name}`` of the active backend; see its row in ``comm_utils.operations``."
    collective.__signature__ = signature  # type: ignore[attr-defined]
    return collective


def recorded_method(name: str, call: Callable[..., Any], observe: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call``, a method of a backend, so that it is recorded if a row of the table has its name.

    Args:
        observe: ``TimedCalls._observe``.
    """
    row = operations.find(name)
    if row is None or not row.recorded:
        return call
    arguments = [one for one in row.arguments if one.role not in _OF_THE_CALL]
    signature = inspect.Signature([_parameter(one) for one in arguments])

    def recorded(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = {role: bound.arguments.get(one.name) for role in Role if (one := row.argument(role)) is not None}
        return observe(
            name,
            given.get(Role.GROUP),
            _counted(row, bound.arguments),
            call,
            bound.args,
            given.get(Role.OP),
            (given.get(Role.ROOT), given.get(Role.GROUP_ROOT)),
            given.get(Role.TAG) or 0,
            bool(given.get(Role.ASYNC_OP)),
        )

    return recorded


def _counted(row: OperationSpec, given: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the tensor whose size the operation is accounted under; of a whole, one rank's part."""
    found: list[torch.Tensor] = []
    for one in row.counted:
        value = given[one.name]
        if one.form is Form.FLAT and row.pattern.whole_array:
            W = dist.get_world_size(given.get("group"))
            value = value.reshape(-1)[: value.numel() // W]
        found.append(value[0] if isinstance(value, list | tuple) else value)
    return max(found, key=lambda tensor: tensor.nbytes, default=None)


def _signature(row: OperationSpec) -> inspect.Signature:
    usual = [_parameter(one) for one in row.arguments if one.role not in _OF_THE_CALL]
    timeout = inspect.Parameter("timeout", inspect.Parameter.KEYWORD_ONLY, default=None)
    return inspect.Signature([*usual, timeout])


def _parameter(one: Argument) -> inspect.Parameter:
    required = one.role is Role.TENSOR and not one.at_root
    default = _REQUIRED if required else DEFAULTS.get(one.role)
    return inspect.Parameter(one.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)


def _bind(
    row: OperationSpec, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    named = {row.aliases.get(name, name): value for name, value in kwargs.items()}
    for name in named.keys() - signature.parameters.keys():
        near = difflib.get_close_matches(name, signature.parameters, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ArgumentTypeError(f"{row.name}: got the keyword {name!r}; expected {row.name}{signature}{hint}")
    try:
        bound = signature.bind(*args, **named)
    except TypeError as error:
        raise ArgumentTypeError(f"{row.name}: {error}; expected {row.name}{signature}") from None
    bound.apply_defaults()
    return bound.arguments


def _call(row: OperationSpec, given: dict[str, Any]) -> Any:
    name, group = row.name, given.get("group")
    backend = enter(name, group, given.pop("timeout"))
    if backend is None:
        return None
    method = getattr(backend, name, None)
    if method is None:
        raise BackendUnavailableError(
            f"{name}: got backend {backend.get_backend(group)!r}, which does not have it; expected one that implements "
            f"{name}; initialise with that backend"
        )
    root = _check_root(row, given, backend)
    tensors = _check_tensors(row, given, backend, root)
    _check_op(row, given, backend, tensors[0])
    work = method(*(given[one.name] for one in row.arguments if one.role not in _OF_THE_CALL))
    async_op = bool(given.get("async_op"))
    written = [given[one.name] for one in row.tensors if one.is_written]
    return deliver([work], None, written[0] if len(written) == 1 else written, async_op)


def _check_root(row: OperationSpec, given: dict[str, Any], backend: Backend) -> int | None:
    """Return the group rank of the root, which takes the place of a global one."""
    root, group_root = row.argument(Role.ROOT), row.argument(Role.GROUP_ROOT)
    if root is None:
        return None
    by_group = None if group_root is None else given[group_root.name]
    position = group_rank_of(row.name, root.name, backend, given.get("group"), given[root.name], by_group)
    if group_root is not None:
        given[root.name], given[group_root.name] = None, position
    return position


def _check_tensors(row: OperationSpec, given: dict[str, Any], backend: Backend, root: int | None) -> list[torch.Tensor]:
    group = given.get("group")
    W, rank = backend.get_world_size(group), backend.get_rank(group)
    found: list[torch.Tensor] = []
    part: torch.Tensor | None = None
    for one in row.tensors:
        value = given[one.name]
        if one.at_root and root != rank:
            if value is not None:
                raise ArgumentError(f"{row.name}: {one.name}: got {describe(value)}; expected None, except on the root")
            continue
        if one.form in (Form.PER_RANK, Form.SEVERAL):
            count = W if one.form is Form.PER_RANK or not isinstance(value, list | tuple) else len(value)
            like = found[0] if found else None
            check_list(row.name, one.name, value, count, backend, group, like=like, written=one.is_written)
            given[one.name] = [_contiguous(row, one, tensor) for tensor in value]
            found.extend(given[one.name])
            continue
        check_tensor(row.name, one.name, value, backend, group, written=one.is_written)
        if found:
            check_dtype(row.name, one.name, value, found[0])
        if one.form is Form.FLAT and value.numel() % W:
            raise ArgumentError(
                f"{row.name}: {one.name}: got {value.numel()} elements (shape {tuple(value.shape)}), which does not "
                f"divide by the world size of {W}; pad it"
            )
        given[one.name] = _contiguous(row, one, value)
        found.append(given[one.name])
        part = given[one.name] if one.form is Form.SINGLE else part
    if part is not None and not row.pattern.uneven:
        _check_sizes(row, given, part, W)
    return found


def _check_sizes(row: OperationSpec, given: Mapping[str, Any], part: torch.Tensor, W: int) -> None:
    for one in row.tensors:
        value = given[one.name]
        if one.form is Form.FLAT:
            check_numel(row.name, one.name, value, W * part.numel(), f"{W} times the size of a rank's part")
        elif one.form is Form.SINGLE:
            check_numel(row.name, one.name, value, part.numel(), "the size of a rank's part")
        elif one.form is Form.PER_RANK and value is not None:
            for place, tensor in enumerate(value):
                check_numel(row.name, f"{one.name}[{place}]", tensor, part.numel(), "the size of a rank's part")


def _contiguous(row: OperationSpec, one: Argument, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor
    if one.is_written:
        raise ArgumentError(
            f"{row.name}: {one.name}: got a tensor that is not contiguous (strides {tensor.stride()}); expected a "
            f"contiguous one, as it is written: pass {one.name}.contiguous() and copy back"
        )
    return tensor.contiguous()


def _check_op(row: OperationSpec, given: dict[str, Any], backend: Backend, tensor: torch.Tensor) -> None:
    argument = row.argument(Role.OP)
    if argument is None:
        return
    op = given[argument.name] = parse_reduce_op(given[argument.name], row.name)
    native = backend.capabilities(given.get("group"), tensor.device.type).reductions
    if (op, tensor.dtype) not in native:
        raise ArgumentError(
            f"{row.name}: op: got {op.name.lower()} of {tensor.dtype}, which backend "
            f"{backend.get_backend(given.get('group'))!r} does not reduce; expected another op or dtype"
        )
