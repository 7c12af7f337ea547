"""Intel's own bindings, discontinued and not on PyPI, for who has them and names them.

They register the name ``"ccl"`` with ``torch.distributed`` too, so a process has either them or this package's engine.
They average nothing and send no messages between CPUs: averages are built above, as for every backend, and CPU tensors
travel by gloo beside them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import replace

import torch.distributed as c10d

from comm_backend_ccl.process_group import NAME, CclProcessGroup
from comm_backend_ccl.registration import unregister
from comm_utils.backend import Availability, Setup
from comm_utils.errors import BackendUnavailableError

__all__ = ["BINDINGS", "activate", "availability"]

BINDINGS = "oneccl_bindings_for_pytorch"
_PLACES = "cpu:gloo,xpu:ccl"


def availability() -> Availability | None:
    """None where they are not installed, which is nothing to tell."""
    if importlib.util.find_spec(BINDINGS) is None:
        return None
    try:
        version = importlib.metadata.version(BINDINGS)
    except importlib.metadata.PackageNotFoundError:
        version = "of an unknown version"
    return Availability(True, f"{BINDINGS} {version}, discontinued by Intel; serves XPU tensors, gloo those on the CPU")


def activate(setup: Setup) -> Setup:
    """Load the bindings; return what is to be initialised in place of ``setup``.

    Raises:
        BackendUnavailableError: they cannot be loaded, or a group of this package's engine exists.
    """
    if c10d.is_initialized() and isinstance(c10d.distributed_c10d._get_default_group(), CclProcessGroup):
        raise BackendUnavailableError(
            f"backend {BINDINGS!r} cannot be used beside groups of {NAME!r}; destroy them first"
        )
    unregister()
    try:
        importlib.import_module(BINDINGS)
    except Exception as error:
        raise BackendUnavailableError(
            f"backend {BINDINGS!r} cannot be used: {type(error).__name__}: {error}; it has to match the release of "
            f"torch, use {NAME!r} or 'xccl' instead"
        ) from error
    return replace(setup, backend=_PLACES)
