"""Initialise ``torch.distributed``, and look up the libraries and timeouts of its groups."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed import distributed_c10d as internals

from comm_utils.backend import Availability, Setup
from comm_utils.errors import BackendUnavailableError, CommError, CommTimeoutError
from comm_utils.torch_support.failures import classify, summarize

__all__ = ["availability", "check_available", "device_libraries", "initialize", "timeout_of", "world_timeout"]

_NOT_BUILT = "this build of torch ({}) was made without {}"


def availability() -> Mapping[str, Availability]:
    """Return every library that torch knows, and whether this build and this machine have it."""
    version = torch.__version__
    gpu = torch.cuda.is_available()
    nccl = c10d.is_nccl_available()
    return {
        "gloo": _built("gloo", c10d.is_gloo_available(), "install torch from PyPI"),
        "nccl": Availability(True, f"torch {version} has NCCL and sees {torch.cuda.device_count()} GPUs")
        if nccl and gpu
        else Availability(False, "torch sees no CUDA device", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
        if nccl
        else _built("NCCL", False, "install a CUDA build of torch"),
        "mpi": _built("MPI", c10d.is_mpi_available(), "build torch from source beside an MPI, or use gloo"),
        "ucc": _built("UCC", c10d.is_ucc_available(), "use a build of torch that has UCC"),
        "xccl": _built("XCCL", getattr(c10d, "is_xccl_available", bool)(), "install an XPU build of torch"),
    }


def _built(library: str, available: bool, remedy: str) -> Availability:
    if available:
        return Availability(True, f"torch {torch.__version__} has {library}")
    return Availability(False, _NOT_BUILT.format(torch.__version__, library), remedy)


def device_libraries(backend: str) -> dict[str, str]:
    """Parse ``"cpu:gloo,cuda:nccl"`` to ``{"cpu": "gloo", "cuda": "nccl"}``; a bare name stands for all its devices."""
    if ":" in backend:
        return dict(part.split(":", 1) for part in backend.lower().split(","))
    name = backend.lower()
    devices = c10d.Backend.backend_capability.get(name, ["cpu"])
    return dict.fromkeys(devices, name)


def check_available(backend: str) -> None:
    """Check that every library that ``backend`` names can be used.

    Raises:
        BackendUnavailableError: names the first that cannot, and the remedy.
    """
    known = availability()
    for name in device_libraries(backend).values():
        found = known.get(name)
        if found is None and name not in c10d.Backend.backend_list:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise BackendUnavailableError(
                f"backend {name!r} is not known to torch; expected one of {sorted(known)}{hint}"
            )
        if found is not None and not found.usable:
            raise BackendUnavailableError(f"backend {name!r} cannot be used: {found.reason}; {found.remedy}")


def initialize(setup: Setup) -> None:
    """Create the world group.

    Raises:
        BackendUnavailableError: a library that ``setup.backend`` names cannot be had.
        CommTimeoutError: not every rank arrived in time.
    """
    check_available(setup.backend)
    try:
        c10d.init_process_group(
            backend=setup.backend,
            store=setup.store,
            rank=setup.rank,
            world_size=setup.world_size,
            timeout=setup.timeout,
            device_id=setup.device,
        )
    except RuntimeError as error:
        if isinstance(error, CommError) or classify(error) is None:
            raise
        raise CommTimeoutError(
            f"rank {setup.rank} of {setup.world_size}: not every rank joined the {setup.backend} world group in time "
            f"({summarize(error)}); check that all {setup.world_size} processes run and can reach each other"
        ) from error


def world_timeout() -> timedelta | None:
    """Return the timeout of the world group; None where its library does not expose it."""
    return timeout_of(internals._get_default_group())


def timeout_of(group: Any) -> timedelta | None:
    """Return the timeout of ``group``; None where its library does not expose it."""
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    timeout = getattr(group, "timeout", None)  # of a process group written in Python
    return timeout if isinstance(timeout, timedelta) else None
