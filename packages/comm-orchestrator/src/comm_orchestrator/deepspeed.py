"""Replacement of ``deepspeed.comm`` by this API, for DeepSpeed itself and for programs that use it.

import comm_orchestrator.deepspeed

comm_orchestrator.deepspeed.replace_comm()  # before the first import of deepspeed
import deepspeed
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from comm_orchestrator import facade
from comm_orchestrator.environment import apply_variables
from comm_orchestrator.facade import deepspeed_calls, deepspeed_compression
from comm_orchestrator.facade.deepspeed_compression import AMENDED, COMPRESSED, ON_OTHER_DEVICES
from comm_utils.errors import BackendUnavailableError, CommError

__all__ = ["AMENDED", "COMPRESSED", "GONE", "KEPT", "REPLACED", "ReplacementError", "replace_comm"]

_PACKAGE = "deepspeed.comm"
#: modules that are ours from then on
REPLACED = (_PACKAGE, f"{_PACKAGE}.comm", f"{_PACKAGE}.reduce_op")
#: modules that stay DeepSpeed's own: names and defaults of its configuration, and helpers without communication
KEPT = (f"{_PACKAGE}.config", f"{_PACKAGE}.constants", f"{_PACKAGE}.pg_utils", f"{_PACKAGE}.utils")
#: modules that cannot be imported then: what is inside of what was replaced
GONE = (f"{_PACKAGE}.backend", f"{_PACKAGE}.ccl", f"{_PACKAGE}.mori", f"{_PACKAGE}.torch")

#: modules of DeepSpeed that stay, and that have names which its own deepspeed.comm takes from them
_SOURCES = (f"{_PACKAGE}.constants", f"{_PACKAGE}.utils", "deepspeed.constants")

_LOGGER = "configure() turns the comms logger on and off, and log_rows() returns what it recorded"
#: what to use in place of public names that are not provided
_INSTEAD = {
    "CommsLogger": _LOGGER,
    "cdb": "is_initialized() says whether there is a world, and init_distributed() keeps one that is there",
    "comms_logger": _LOGGER,
    "timers": "log_rows() has the durations, once configure(enabled=True) was called",
}


class ReplacementError(CommError, RuntimeError):
    """``deepspeed.comm`` cannot be replaced any more."""


class _Replacing(MetaPathFinder, Loader):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in GONE:  # find_spec(), by which programs look for modules, does not raise
            return ModuleSpec(fullname, _Gone())
        if fullname in COMPRESSED or fullname in AMENDED:
            return self._find_in_runtime(fullname, path)
        if fullname not in REPLACED:
            return None
        spec = ModuleSpec(fullname, self, origin=facade.__file__, is_package=fullname == _PACKAGE)
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(str(self._folder))
        return spec

    def _find_in_runtime(self, fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
        own = PathFinder.find_spec(fullname, path)
        if own is None or own.origin is None:  # this release does not have it
            return None
        if fullname in COMPRESSED:
            return ModuleSpec(fullname, self, origin=deepspeed_compression.__file__)
        own.loader = _Amending(fullname, own.origin)
        return own

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = functools.partial(_explain, module.__name__)
        if (compressed := COMPRESSED.get(module.__name__)) is not None:
            setattr(module, compressed.__name__, compressed)
            module.__doc__ = f"{module.__name__}, replaced by comm_orchestrator."
            return
        names = ["ReduceOp"] if module.__name__.endswith(".reduce_op") else facade.__all__
        provided = {name: getattr(facade, name) for name in names}
        if "init_distributed" in names:
            provided.update(init_distributed=_init_distributed, all_gather=deepspeed_calls.all_gather)
        module.__dict__.update({name: deepspeed_calls.as_expected(value) for name, value in provided.items()})
        module.__doc__ = f"{module.__name__}, replaced by comm_orchestrator."


class _Gone(Loader):
    """Explains, when it is imported, where a module has gone."""

    def exec_module(self, module: ModuleType) -> None:
        raise ModuleNotFoundError(
            f"{module.__name__} is not there: comm_orchestrator.deepspeed.replace_comm() has replaced deepspeed.comm, "
            "and this is a part of its inside",
            name=module.__name__,
        )


class _Amending(SourceFileLoader):
    """Executes DeepSpeed's module, and replaces names in it."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        has_kernels = importlib.import_module("deepspeed.accelerator").get_accelerator().device_name() == "cuda"
        for name, value in AMENDED[module.__name__].items():
            if hasattr(module, name) and not (has_kernels and name in ON_OTHER_DEVICES):
                setattr(module, name, value)


@functools.wraps(facade.init_distributed)
def _init_distributed(*args: Any, **kwargs: Any) -> None:
    facade.init_distributed(*args, **kwargs)
    # DeepSpeed insists on it, in a process that nobody launched with others as well.
    local_rank = 0 if facade.get_world_size() == 1 else facade.get_local_rank()
    if local_rank >= 0 and "LOCAL_RANK" not in os.environ:
        with apply_variables({"LOCAL_RANK": str(local_rank)}):
            pass


def _explain(module: str, name: str) -> Any:
    reason = _INSTEAD.get(name) or _where(name) or "names inside of DeepSpeed's own implementation are not provided"
    raise AttributeError(f"{module}, which comm_orchestrator has replaced, has no {name!r}: {reason}")


def _where(name: str) -> str | None:
    """Return how to import ``name`` from a module of DeepSpeed that stays; None where none of them has it."""
    if name.startswith("_"):  # Python itself asks for these
        return None
    for source in _SOURCES:
        with suppress(ImportError):  # DeepSpeed is being imported, and the module not ready
            names = vars(importlib.import_module(source))
            if name in names and not isinstance(names[name], ModuleType):
                return f"import it from {source}, which stays DeepSpeed's own"
    return None


def replace_comm() -> None:
    """Make ``deepspeed.comm`` this API; called before ``deepspeed`` is imported, and on every rank.

    Calling it again does nothing. What is replaced are the modules in :data:`REPLACED`; those in :data:`KEPT` stay as
    they are, and those in :data:`GONE` cannot be imported any more. The modules in :data:`COMPRESSED`, by which 1-bit
    optimizers communicate, and names in those of :data:`AMENDED` are replaced where the release has them.

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
