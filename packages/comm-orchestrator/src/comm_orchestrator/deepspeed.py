"""Replacement of ``deepspeed.comm`` by this API, for DeepSpeed itself and for programs that use it.

import comm_orchestrator.deepspeed

comm_orchestrator.deepspeed.replace_comm()  # before the first import of deepspeed
import deepspeed
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from comm_orchestrator import facade
from comm_orchestrator.environment import apply_variables
from comm_utils.errors import BackendUnavailableError, CommError

__all__ = ["GONE", "KEPT", "REPLACED", "ReplacementError", "replace_comm"]

_PACKAGE = "deepspeed.comm"
#: modules that are ours from then on
REPLACED = (_PACKAGE, f"{_PACKAGE}.comm", f"{_PACKAGE}.reduce_op")
#: modules that stay DeepSpeed's own: names and defaults of its configuration, and helpers without communication
KEPT = (f"{_PACKAGE}.config", f"{_PACKAGE}.constants", f"{_PACKAGE}.utils")
#: modules that cannot be imported then: what is inside of what was replaced
GONE = (f"{_PACKAGE}.backend", f"{_PACKAGE}.ccl", f"{_PACKAGE}.mori", f"{_PACKAGE}.torch")


class ReplacementError(CommError, RuntimeError):
    """``deepspeed.comm`` cannot be replaced any more."""


class _Replacing(MetaPathFinder, Loader):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in GONE:
            raise ModuleNotFoundError(
                f"{fullname} is not there: comm_orchestrator.deepspeed.replace_comm() has replaced deepspeed.comm, and "
                "this is a part of its inside",
                name=fullname,
            )
        if fullname not in REPLACED:
            return None
        spec = ModuleSpec(fullname, self, origin=facade.__file__, is_package=fullname == _PACKAGE)
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(str(self._folder))
        return spec

    def exec_module(self, module: ModuleType) -> None:
        names = ["ReduceOp"] if module.__name__.endswith(".reduce_op") else facade.__all__
        for name in names:
            setattr(module, name, getattr(facade, name))
        if "init_distributed" in names:
            module.__dict__["init_distributed"] = _init_distributed
        module.__doc__ = f"{module.__name__}, replaced by comm_orchestrator."
        module.__dict__["__getattr__"] = _explain


@functools.wraps(facade.init_distributed)
def _init_distributed(*args: Any, **kwargs: Any) -> None:
    facade.init_distributed(*args, **kwargs)
    # DeepSpeed insists on it, in a process that nobody launched with others as well.
    local_rank = 0 if facade.get_world_size() == 1 else facade.get_local_rank()
    if local_rank >= 0 and "LOCAL_RANK" not in os.environ:
        with apply_variables({"LOCAL_RANK": str(local_rank)}):
            pass


def _explain(name: str) -> Any:
    raise AttributeError(
        f"deepspeed.comm, which comm_orchestrator has replaced, has no {name!r}: names inside of DeepSpeed's own "
        "implementation are not provided"
    )


def replace_comm() -> None:
    """Make ``deepspeed.comm`` this API; called before ``deepspeed`` is imported, and on every rank.

    Calling it again does nothing. What is replaced are the modules in :data:`REPLACED`; those in :data:`KEPT` stay as
    they are, and those in :data:`GONE` cannot be imported any more.

    Raises:
        BackendUnavailableError: DeepSpeed is not installed.
        ReplacementError: DeepSpeed has been imported already, and holds on to its own functions.
    """
    if any(isinstance(finder, _Replacing) for finder in sys.meta_path):
        return
    if "deepspeed" in sys.modules:
        raise ReplacementError(
            "replace_comm: deepspeed has been imported already and holds on to its own functions; call replace_comm() "
            "before the first import of deepspeed"
        )
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        raise BackendUnavailableError("replace_comm: DeepSpeed is not installed; pip install deepspeed")
    sys.meta_path.insert(0, _Replacing(Path(spec.submodule_search_locations[0], "comm")))
