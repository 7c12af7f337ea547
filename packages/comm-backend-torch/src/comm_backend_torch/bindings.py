"""Intel's own bindings of oneCCL, discontinued and not on PyPI, for users who have them.

At import they register the name ``"ccl"`` with ``torch.distributed``, as ``comm-backend-ccl`` does, so a
process has one of the two. They average nothing, which is built above, and send no messages between CPUs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as c10d

from comm_utils.active import initializer
from comm_utils.backend import Availability, Setup
from comm_utils.errors import BackendUnavailableError

__all__ = ["BINDINGS", "activate", "availability", "of_group"]

BINDINGS = "oneccl_bindings_for_pytorch"
#: The name that they register.
_NAME = "ccl"
#: The package that registers it, too.
_OTHER = "comm_backend_ccl"


def availability() -> Mapping[str, Availability]:
    """Return the bindings by name; nothing where they are not installed."""
    if BINDINGS not in sys.modules and importlib.util.find_spec(BINDINGS) is None:
        return {}
    version = _version()
    wanted, found = version.split(".")[:2], torch.__version__.split(".")[:2]
    if version and wanted != found:
        # They call torch's C++ functions, and importing those of another release may crash the process.
        reason = f"{BINDINGS} {version} is for torch {'.'.join(wanted)}, this is torch {torch.__version__}"
        return {BINDINGS: Availability(False, reason, "install the release for this torch, or use 'xccl' on XPUs")}
    text = f"{BINDINGS} {version or 'of an unknown version'}, discontinued by Intel"
    return {BINDINGS: Availability(True, text)}


def _version() -> str:
    try:
        return importlib.metadata.version(BINDINGS)
    except importlib.metadata.PackageNotFoundError:
        return ""


def activate(setup: Setup) -> Setup:
    """Import the bindings if ``setup`` names them; return it with the name that they have registered.

    Raises:
        BackendUnavailableError: they are missing, cannot be imported or register nothing.
    """
    parts = setup.backend.split(",")
    if not any(part.rpartition(":")[2] == BINDINGS for part in parts):
        return setup
    found = availability().get(BINDINGS, Availability(False, "it is not installed", "use 'xccl' on XPUs, or 'gloo'"))
    if not found.usable:
        raise BackendUnavailableError(f"backend {BINDINGS!r} cannot be used: {found.reason}; {found.remedy}")
    _free_name()
    _register()
    return replace(setup, backend=setup.backend.replace(BINDINGS, _NAME))


def of_group(backend: str | None) -> str | None:
    """Return the library of a new group by the name that it has registered, if it has to be imported for that.

    ``"ccl"`` stands for the bindings where they are installed and nothing else has registered it.

    Raises:
        BackendUnavailableError: the bindings are named and missing, cannot be imported or register nothing, or another
            library has registered their name.
    """
    if backend is None:
        return None
    parts = [part.rpartition(":") for part in backend.lower().split(",")]
    owner = _owner()
    if any(name == BINDINGS for _, _, name in parts) and owner == _OTHER:
        raise BackendUnavailableError(
            f"new_group: backend {BINDINGS!r} cannot be used: {_OTHER} has registered {_NAME!r}, which is their name, "
            f"in this process; use backend={_NAME!r}, or {initializer()} with backend={BINDINGS!r} in a new process"
        )
    theirs = {BINDINGS} if owner is not None else {BINDINGS, _NAME}
    found = availability().get(BINDINGS)
    if found is None or not any(name in theirs for _, _, name in parts):
        return backend
    if not found.usable:
        raise BackendUnavailableError(f"new_group: backend {backend!r} cannot be used: {found.reason}; {found.remedy}")
    _register()
    return ",".join(f"{device}{colon}{_NAME if name in theirs else name}" for device, colon, name in parts)


def _register() -> None:
    try:
        importlib.import_module(BINDINGS)
    except Exception as error:
        raise BackendUnavailableError(
            f"backend {BINDINGS!r} cannot be used: {type(error).__name__}: {error}; install the release for torch "
            f"{torch.__version__}, or use 'xccl' on XPUs"
        ) from error
    if c10d.Backend._plugins.get(_NAME.upper()) is None:
        raise BackendUnavailableError(
            f"backend {BINDINGS!r} cannot be used: importing it did not register {_NAME!r} with torch.distributed; "
            "start a new process to use it"
        )


def _free_name() -> None:
    """Take the name from ``comm-backend-ccl``, which registers it again when it is chosen."""
    backend: Any = c10d.Backend
    if _owner() != _OTHER:
        return
    del backend._plugins[_NAME.upper()]
    delattr(backend, _NAME.upper())
    backend.backend_list.remove(_NAME)
    for table in (backend.backend_capability, backend.backend_type_map):
        table.pop(_NAME, None)


def _owner() -> str | None:
    """Return the package that has registered the name, "" where that is not known, None where none has."""
    plugin = c10d.Backend._plugins.get(_NAME.upper())
    # Functions of a C++ extension may have no module.
    return None if plugin is None else (getattr(plugin.creator_fn, "__module__", None) or "").partition(".")[0]
