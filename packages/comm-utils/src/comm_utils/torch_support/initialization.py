"""Initialise ``torch.distributed``, and look up the libraries and timeouts of its groups."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed import distributed_c10d as internals

from comm_utils.active import initializer
from comm_utils.backend import Availability, Setup
from comm_utils.errors import BackendUnavailableError, CommError, PeerLostError
from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.given import SHORTEST_TIMEOUT
from comm_utils.process_limits import GLOO_DESCRIPTORS, check_descriptors, check_threads, lack_of_threads
from comm_utils.threads import is_still_connecting
from comm_utils.torch_support.bounded_store import BoundedStore
from comm_utils.torch_support.device_calls import can_follow, keep_process_alive
from comm_utils.torch_support.failures import classify, is_exhausted, summarize
from comm_utils.torch_support.gloo_connections import opening_connections
from comm_utils.torch_support.group_agreement import WORLD, make_with_gloo
from comm_utils.torch_support.store_waits import StoreWait
from comm_utils.watch.uncaught import put_back_hook
from comm_utils.watch.watch import WATCH

__all__ = [
    "agrees_in_store",
    "availability",
    "check_available",
    "device_libraries",
    "gloo_refusal",
    "initialize",
    "timeout_of",
    "world_timeout",
]

_NOT_BUILT = "this build of torch ({}) was made without {}"


def availability() -> Mapping[str, Availability]:
    """Return every library that torch knows, and whether this build and this machine have it.

    Among them those that the program has registered with torch, except Intel's, of which packages know more.
    """
    version = torch.__version__
    gpu = torch.cuda.is_available()
    nccl = c10d.is_nccl_available()
    registered = [name for name in map(str.lower, c10d.Backend._plugins) if "ccl" not in name]
    return {
        **{name: Availability(True, "this program has registered it with torch") for name in registered},
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
    """Parse ``"cpu:gloo,cuda:nccl"`` to ``{"cpu": "gloo", "cuda": "nccl"}``; a bare name stands for all its devices.

    Raises:
        BackendUnavailableError: it is neither of these forms, or names a device twice.
    """
    if ":" in backend or "," in backend:
        pairs = [part.partition(":") for part in backend.lower().split(",")]
        found = {device: library for device, _, library in pairs}
        if len(found) < len(pairs) or not all(found) or not all(found.values()):
            raise BackendUnavailableError(
                f"backend {backend!r} does not name one library for each device; expected a form such as "
                "'cpu:gloo,cuda:nccl'"
            )
        return found
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
        if found is None and name.upper() not in c10d.Backend._plugins:
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
        PeerLostError: another rank ended meanwhile.
    """
    check_available(setup.backend)
    uses_nccl = "nccl" in device_libraries(setup.backend).values()
    if uses_nccl and setup.world_size > 1 and WATCH.settings.enabled and can_follow("cuda"):
        keep_process_alive(os.environ)

    def make() -> None:
        with opening_connections() as opened:
            put_back_hook()
            c10d.init_process_group(
                backend=setup.backend,
                store=setup.store,
                rank=setup.rank,
                world_size=setup.world_size,
                timeout=setup.timeout and max(setup.timeout, SHORTEST_TIMEOUT),
                device_id=setup.device,
            )
        opened.belong_to(internals._get_default_group())

    try:
        _make_world(setup, make)
    except (RuntimeError, MemoryError, OSError) as error:
        if isinstance(error, CommError):
            raise
        if is_exhausted(error):
            lack = lack_of_threads(error) or (
                f"the system refused what the {setup.backend} world group needs; raise the limits of descriptors "
                f"(ulimit -n) and of memory (ulimit -v) before the start [{summarize(error)}]"
            )
            raise BackendUnavailableError(f"rank {setup.rank} of {setup.world_size}: {lack}") from error
        kind = classify(error)
        if kind is None:
            raise
        happened = (
            f"another rank ended or gave up while the {setup.backend} world group was created"
            if kind is PeerLostError
            else f"not every rank joined the {setup.backend} world group in time"
        )
        raise kind(
            f"rank {setup.rank} of {setup.world_size}: {happened} ({summarize(error)}); check that all "
            f"{setup.world_size} processes run and can reach each other, and what they printed"
        ) from error


def agrees_in_store(setup: Setup) -> bool:
    """Return whether the ranks agree in the store to make a world, before the library waits for all of them."""
    libraries = {*device_libraries(setup.backend).values()}
    return setup.world_size > 1 and "gloo" in libraries and "ccl" not in libraries


def _make_world(setup: Setup, make: Callable[[], None]) -> None:
    call = initializer()
    refusal = gloo_refusal(f"{call}: rank {setup.rank}", setup.backend, setup.world_size)
    if not agrees_in_store(setup):
        if refusal is not None:
            raise refusal
        return make()
    if is_still_connecting("gloo"):  # and would make a world of its own when that succeeds
        raise PeerLostError(
            f"{call}: rank {setup.rank}: gloo still waits for connections of an earlier world, for up to "
            "five times its timeout; start this process again, or wait"
        )
    planned = RingGroup("world", tuple(range(setup.world_size)), "", setup.backend)
    limit = setup.timeout or internals._get_default_timeout(internals.Backend("gloo"))
    wait = StoreWait(call, "connecting", planned, setup.rank, limit.total_seconds(), is_alone=True)
    bounded = BoundedStore(setup.store, f"{call}: rank {setup.rank}", limit.total_seconds())
    return make_with_gloo(
        bounded, WORLD, wait, setup.rank, refusal, limit, make, lambda _: c10d.destroy_process_group()
    )


# Three of a group of gloo, and as many again, as those that were tried may still be ending.
_GLOO_THREADS = 6


def gloo_refusal(who: str, backend: str, world_size: int) -> BackendUnavailableError | None:
    """Return why this process cannot have what a group of gloo needs, None if it can.

    gloo connects every rank to every other, and starts threads of its own.
    """
    if "gloo" in device_libraries(backend).values():
        try:
            check_descriptors(who, GLOO_DESCRIPTORS + world_size)
            check_threads(who, _GLOO_THREADS)
        except BackendUnavailableError as error:
            return error
    return None


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
