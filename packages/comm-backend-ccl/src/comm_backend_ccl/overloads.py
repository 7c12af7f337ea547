"""The forms in which a process group's methods may be called: with c10d's options, or with their fields one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any

from torch._C import _distributed_c10d as c10d

from comm_utils.errors import ArgumentTypeError
from comm_utils.given import shown
from comm_utils.reduce_op import ReduceOp, parse_reduce_op

__all__ = ["Fields", "overloaded"]

_OPTIONS = frozenset(
    found
    for name, found in vars(c10d).items()
    if name.endswith("Options") and isinstance(found, type) and hasattr(found, "timeout")
)


@dataclass(frozen=True)
class Fields:
    """The options of a call that passed them one by one, under the names that c10d's options have."""

    reduceOp: ReduceOp = ReduceOp.SUM
    rootRank: int = 0
    timeout: timedelta | None = None


def overloaded(call: str, arguments: tuple[tuple[str, ...], ...], *fields: str) -> Callable[[Callable[..., Any]], Any]:
    """Have a method take its options in every form that ``torch.distributed.ProcessGroup`` takes.

    Args:
        call: the method's name, for messages.
        arguments: the names of each argument before the options, in every overload.
        fields: of ``root``, ``op`` and ``timeout``, those that may stand instead of options, in their order.
    """
    count = len(arguments)

    def decorate(method: Callable[..., Any]) -> Any:
        @wraps(method)
        def call_method(self: Any, *args: Any, **named: Any) -> Any:
            if not named and len(args) == count + 1 and type(args[count]) in _OPTIONS:
                return method(self, *args)
            given = list(args[:count])
            for names in arguments[len(given) :]:
                name = next((name for name in names if name in named), None)
                if name is None:
                    raise ArgumentTypeError(f"{call}: expected an argument {' or '.join(names)}")
                given.append(named.pop(name))
            return method(self, *given, _options(call, fields, args[count:], named))

        return call_method

    return decorate


def _options(call: str, fields: tuple[str, ...], rest: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if len(rest) == 1 and not named and (type(rest[0]) in _OPTIONS or isinstance(rest[0], Fields)):
        return rest[0]
    if not rest and named.keys() == {"opts"}:
        return named["opts"]
    found = dict(zip(fields, rest, strict=False))
    unknown = [shown(one) for one in rest[len(fields) :]]
    unknown += [f"{name}={shown(one)}" for name, one in named.items() if name not in fields or name in found]
    if unknown:
        accepted = " ".join(("", "or", " and ".join(f"{name}=" for name in fields))) if fields else ""
        raise ArgumentTypeError(f"{call}: got {', '.join(unknown)}; expected options of c10d (opts=){accepted}")
    return _fields(call, {**found, **named})


def _fields(call: str, found: dict[str, Any]) -> Fields:
    op, root, timeout = found.get("op"), found.get("root", 0), found.get("timeout")
    if type(root) is not int:
        raise ArgumentTypeError(f"{call}: root: got {shown(root)}; expected a rank of the group, an int")
    if not isinstance(timeout, timedelta | None):
        raise ArgumentTypeError(f"{call}: timeout: got {shown(timeout)}; expected a timedelta or None")
    return Fields(ReduceOp.SUM if op is None else parse_reduce_op(op, call), root, timeout)
