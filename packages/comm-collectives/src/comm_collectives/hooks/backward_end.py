"""The end of a backward: a function that autograd calls when all gradients are there."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from comm_utils.errors import ArgumentError

__all__ = ["BackwardEnd"]


# Of torch._dynamo.compiled_autograd: on; and running what it compiled.
_FLAGS = ("compiled_autograd_enabled", "in_compiled_autograd_region")


def _is_compiled_autograd_on() -> bool:
    # Where its graph breaks, it runs hooks as they are and then drops what they queue.
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return any(getattr(module, name, False) for name in _FLAGS)


class _Callback:
    """Autograd alone keeps it, so that it is gone after a backward that failed."""

    def __init__(self, end: BackwardEnd) -> None:
        self._end = end

    def __call__(self) -> None:
        self._end.call()


class BackwardEnd:
    """Calls ``finish`` once at the end of each backward for which :meth:`expect` was called.

    Args:
        finish: called in the thread that called ``backward()``, which raises what it raises.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._callback: weakref.ref[_Callback] | None = None

    @property
    def is_expected(self) -> bool:
        """Return whether the backward whose end is to be noticed is still under way."""
        return self._callback is not None and self._callback() is not None

    @property
    def was_missed(self) -> bool:
        """Return whether the last backward failed before its end."""
        return self._callback is not None and self._callback() is None

    def expect(self) -> None:
        """Call ``finish`` at the end of the backward that is under way; to be called by a hook of it.

        Raises:
            ArgumentError: compiled autograd traces the backward, so that its hooks would run while it is compiled.
        """
        if torch.compiler.is_compiling() or _is_compiled_autograd_on():
            raise ArgumentError(
                "backward: got a backward under compiled autograd, which traces hooks; expected one without it: leave "
                "torch._dynamo.config.compiled_autograd off, and compile the model with torch.compile(model)"
            )
        callback = _Callback(self)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(callback)
        self._callback = weakref.ref(callback)

    def call(self) -> None:
        """Call ``finish`` now."""
        self._callback = None
        self._finish()
