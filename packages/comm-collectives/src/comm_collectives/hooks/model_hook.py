"""Hooks of modules that are copied with their module, and refuse to be saved with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comm_utils.errors import ArgumentError

__all__ = ["ModelHook"]


class ModelHook:
    """A hook of a module, which belongs to this process.

    A copy of the module has the same hook, which leaves it alone. Saving the module raises an error that says what to
    save instead: it would hold one rank's part.

    Args:
        hook: what it calls.
        call: the user's call that registered it, for messages.
    """

    def __init__(self, hook: Callable[..., Any], call: str = "register_sharded_hooks") -> None:
        self._hook, self._call = hook, call

    def __call__(self, *args: Any) -> Any:
        return self._hook(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHook:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ArgumentError(
            f"pickle: got a model with the hooks of {self._call}(), which belong to this process; save "
            "handle.full_state_dict(), or remove() the hooks before"
        )
