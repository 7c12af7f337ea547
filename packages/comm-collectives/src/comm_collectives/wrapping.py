"""Backends that wrap a backend, and the bare one below them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar, cast

from torch.distributed import ProcessGroup

from comm_utils import operations
from comm_utils.active import active_backend
from comm_utils.backend import Backend
from comm_utils.fast_path import FastPath
from comm_utils.operations.table import ROWS

__all__ = ["BackendWrapper", "Wrapper", "bare_backend"]

#: Makes a wrapper around a backend: a subclass of :class:`BackendWrapper`, or a function that calls one.
Wrapper: TypeAlias = Callable[[Backend], Backend]

W = TypeVar("W", bound="BackendWrapper")

# Asynchronous messages have methods of their own.
_HOOKED = tuple(row.name for row in ROWS if row.primitive or (row.pattern.is_message and row.recorded))
_HOOKED += ("batch_isend_irecv",)
# Parameters of the contract that are tensors or lists of them; they come first in every operation.
_TENSORS = frozenset(one.name for row in ROWS if row.primitive for one in row.tensors)


def bare_backend() -> Backend:
    """Return the active backend without wrappers."""
    backend = active_backend()
    while (inner := getattr(backend, "inner", None)) is not None:
        backend = inner
    return backend


class BackendWrapper:
    """Base of a backend that wraps another one; ``comm_collectives.instrument`` puts it around the active backend.

    Override the operations of ``comm_utils.backend.Backend`` that are to do something else; everything that is not
    overridden is the wrapped backend's own, and costs what it costs there. Or override :meth:`around` alone, which then
    gets every operation that moves data. Calls of what is overridden have no fast path, unless the subclass overrides
    ``fast_path`` as well; the others have the wrapped backend's.

    Args:
        inner: the wrapped backend.

    Attributes:
        inner: the wrapped backend.
        call: the call of the user's in whose course this view is, such as ``"all_reduce"``; "" outside of any.
        fast_paths: the wrapped backend's own cache, so that it can empty it.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.call = ""
        self.fast_paths = inner.fast_paths
        self._views: dict[str, Any] = {}
        self._passed_on: list[str] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.around is not BackendWrapper.around:
            for operation in _HOOKED:
                if not hasattr(cls, operation):
                    setattr(cls, operation, _through_hook(operation))
        if not hasattr(cls, "fast_path"):
            setattr(cls, "fast_path", _fast_path)  # noqa: B010  # mypy knows no such attribute here

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "inner" not in self.__dict__:  # while it is copied
            raise AttributeError(name)
        found = getattr(self.inner, name)
        if callable(found):  # the next look-up costs what it would cost there
            self._passed_on.append(name)  # first: a view that another thread makes leaves these out
            self.__dict__[name] = found
        return found

    def around(
        self, operation: str, group: ProcessGroup | None, tensors: tuple[Any, ...], proceed: Callable[..., Any]
    ) -> Any:
        """See and change every operation; a subclass overrides it.

        With this overridden, calls take the checked path, so that every operation comes through here once, unless the
        subclass has a :meth:`fast_path` of its own. Operations are those that travel: an ``all_to_all`` of lists is an
        ``"all_to_all_single"``; ``self.call`` is the call of the user's.

        Args:
            operation: an operation of ``comm_utils.backend.Backend``.
            group: None for the world group.
            tensors: its tensors and lists of tensors in the order of its parameters, None where one is not given; of
                ``"batch_isend_irecv"`` the tensors of all messages.
            proceed: does the operation on such tensors, of which others of the same shapes may be given, and returns
                what the operation returns: None, or its handle.

        Returns:
            what the caller is to get, usually the outcome of ``proceed(*tensors)``.
        """
        return proceed(*tensors)

    def during(self: W, call: str, timeout: timedelta | None = None) -> W:
        """Return the same wrapper around the wrapped backend in the course of ``call``; see ``Backend.during``."""
        if timeout is not None:
            return self._view(self.inner.during(call, timeout), call)
        view: W | None = self._views.get(call)
        if view is None:
            view = self._views[call] = self._view(self.inner.during(call), call)
        return view

    def _view(self: W, inner: Backend, call: str) -> W:
        """Return a copy around ``inner``; it shares what the attributes of this one are."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        for name in self._passed_on:
            view.__dict__.pop(name, None)
        view.inner, view.call, view._views, view._passed_on = inner, call, {}, []
        return view


def _fast_path(
    self: BackendWrapper,
    operation: str,
    detail: object = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> FastPath | None:
    """Have calls take the checked path where what they do is overridden."""
    if any(hasattr(type(self), one) for one in (operation, *operations.get(operation).travels_as)):
        return None
    return self.inner.fast_path(operation, detail, group, async_op)


def _through_hook(operation: str) -> Callable[..., Any]:
    """Make the method of a wrapper that gives ``operation`` to :meth:`BackendWrapper.around`."""
    if operation == "batch_isend_irecv":
        return _batch_through_hook
    names = list(inspect.signature(getattr(Backend, operation)).parameters)[1:]
    count = sum(name in _TENSORS for name in names)

    def method(self: BackendWrapper, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = tuple(given.pop(name, None) for name in names[:count])
        inner = getattr(self.inner, operation)
        return self.around(operation, given.get("group"), tensors, lambda *others: inner(*others, **given))

    method.__name__ = operation
    return method


def _batch_through_hook(self: BackendWrapper, p2p_op_list: Sequence[Any]) -> Any:
    def proceed(*tensors: Any) -> Any:
        for message, tensor in zip(p2p_op_list, tensors, strict=True):
            message.tensor = tensor
        return self.inner.batch_isend_irecv(list(p2p_op_list))

    tensors = tuple(message.tensor for message in p2p_op_list)
    group = cast("ProcessGroup | None", p2p_op_list[0].group)
    return self.around("batch_isend_irecv", group, tensors, proceed)
