"""The end of a backward, which autograd calls when all gradients are there, and the turns of handles until then."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch

from comm_collectives.annotations import Group
from comm_collectives.groups import get_process_group_ranks
from comm_utils.errors import ArgumentError
from comm_utils.weak_collections import members_of

__all__ = ["BackwardEnd"]


# Of torch._dynamo.compiled_autograd: on; and running what it compiled.
_FLAGS = ("compiled_autograd_enabled", "in_compiled_autograd_region")


def _is_compiled_autograd_on() -> bool:
    # Where its graph breaks, it runs hooks as they are and then drops what they queue.
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return any(getattr(module, name, False) for name in _FLAGS)


class _Callback:
    """Autograd alone keeps it, so that it is gone after a backward that failed."""

    def __init__(self) -> None:
        self.ends: list[BackwardEnd] = []

    def __call__(self) -> None:
        endings = [end.ending() for end in sorted(self.ends, key=_place)]
        for ending in endings:
            next(ending)
        for ending in endings:
            next(ending, None)


# By the number of the backward.
_callbacks: WeakValueDictionary[int, _Callback] = WeakValueDictionary()
_ends: WeakSet[BackwardEnd] = WeakSet()
_numbers = count()


class BackwardEnd:
    """Runs ``finish`` once at the end of each backward for which :meth:`expect` was called.

    Several handles may reduce gradients over the same ranks in one backward, and those of one may be complete first on
    one rank, and those of another on the next. So handles take turns in one order, that of their registration from the
    last to the first: a handle starts reductions once the handles before it have started all of theirs, or at the end.

    Args:
        finish: starts what was not started, yields once, and waits for all. It runs in the thread that called
            ``backward()``, which raises what it raises. All handles start before the first one waits.
        group: where gradients are reduced.
        start: starts reductions that are complete; called when the turn of this handle has come.
        is_first: come before all handles without it, which wait for the end: this one starts at places of its own.
        on_failure: called when a backward has failed before its end; reductions that it started may go on.
    """

    def __init__(
        self,
        finish: Callable[[], Iterator[None]],
        group: Group,
        start: Callable[[], None],
        is_first: bool = False,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        self._finish, self._start, self._on_failure = finish, start, on_failure
        self._ranks = get_process_group_ranks(group)
        self.place = (not is_first, -next(_numbers))
        self._callback: weakref.ref[_Callback] | None = None
        self._has_started_all = False
        _ends.add(self)

    @property
    def is_expected(self) -> bool:
        """Return whether the backward whose end is to be noticed is still under way."""
        return self._callback is not None and self._callback() is not None

    @property
    def was_missed(self) -> bool:
        """Return whether the last backward failed before its end."""
        return self._callback is not None and self._callback() is None

    @property
    def may_start(self) -> bool:
        """Return whether the handles before this one have started all of their reductions."""
        return all(one.is_expected and one._has_started_all for one in self._others() if one.place < self.place)

    def pass_turn(self) -> None:
        """Let the handles behind this one start: it has started all of its reductions."""
        self._has_started_all = True
        for one in self._others():
            if one.place > self.place and one.is_expected:
                one._start()

    def _others(self) -> list[BackwardEnd]:
        return sorted((one for one in members_of(_ends) if one is not self and one._ranks == self._ranks), key=_place)

    def expect(self) -> None:
        """Run ``finish`` at the end of the backward that is under way; to be called by a hook of it.

        Raises:
            ArgumentError: compiled autograd traces the backward, so that its hooks would run while it is compiled.
        """
        if torch.compiler.is_compiling() or _is_compiled_autograd_on():
            raise ArgumentError(
                "backward: got a backward under compiled autograd, which traces hooks; expected one without it: leave "
                "torch._dynamo.config.compiled_autograd off, and compile the model with torch.compile(model)"
            )
        torch_c: Any = torch._C
        number = torch_c._current_graph_task_id()
        callback = _callbacks.get(number)
        if callback is None:
            callback = _Callback()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(callback)
            _callbacks[number] = callback
        callback.ends.append(self)
        self._callback = weakref.ref(callback, self._missed)
        self._has_started_all = False

    def ending(self) -> Iterator[None]:
        """Run ``finish``."""
        self._callback = None
        try:
            yield from self._finish()
        except BaseException:  # also where the end of another handle has failed
            self._missed(None)
            raise

    def _missed(self, _: object) -> None:
        if self._on_failure is not None:
            self._on_failure()

    def release(self) -> None:
        """Let no other handle wait for this one any more."""
        _ends.discard(self)


def _place(end: BackwardEnd) -> tuple[bool, int]:
    return end.place
