"""Provide :class:`CclBackend` to the selector; named by the entry point ``comm_utils.backends: ccl``."""

from __future__ import annotations

from collections.abc import Mapping

from comm_backend_ccl import oneccl_library, registration, shared_memory
from comm_backend_ccl.backend import CclBackend
from comm_backend_ccl.process_group import NAME
from comm_utils.backend import Availability, Backend, Setup
from comm_utils.errors import BackendUnavailableError
from comm_utils.torch_support import initialization

__all__ = ["adopt", "adopts", "availability", "initialize"]


def availability() -> Mapping[str, Availability]:
    """See ``BackendProvider.availability``."""
    return {NAME: _own()}


def _own() -> Availability:
    reason = _unavailable_reason()
    if reason is not None:
        return Availability(False, *reason)
    details: dict[str, str] = {}
    parts = []
    without_memory, without_oneccl = shared_memory.unavailable_reason(), oneccl_library.unavailable_reason()
    if without_memory is None:
        details |= shared_memory.facts()
        parts.append("shared memory within a host")
    else:
        details["shared memory"] = without_memory[0]
    if without_oneccl is None:
        facts = oneccl_library.facts()
        details |= facts
        version = facts["oneCCL"].split()[0].removeprefix("Gold-")
        parts.append(f"oneCCL {version} over libfabric's {facts['fabric provider']}")
    else:
        details["oneCCL"] = without_oneccl[0]
    return Availability(
        True, ", ".join(parts), details=details, within_host=without_oneccl[0] if without_oneccl else ""
    )


def _unavailable_reason() -> tuple[str, str] | None:
    """Return why another library has the name or no engine can be used, and the remedy; None where one can."""
    taken = registration.unavailable_reason()
    if taken is not None:
        return taken
    reason, without_memory = oneccl_library.unavailable_reason(), shared_memory.unavailable_reason()
    if reason is None or without_memory is None:
        return None
    if without_memory[0] == shared_memory.NEEDS_PROC:
        return f"{without_memory[0]}, and {reason[0]}", without_memory[1]
    return reason


def initialize(setup: Setup) -> Backend:
    """See ``BackendProvider.initialize``."""
    reason = _unavailable_reason()
    if reason is not None:
        raise BackendUnavailableError(f"backend {NAME!r} cannot be used: {reason[0]}; {reason[1]}")
    registration.register()
    initialization.initialize(setup)
    return CclBackend(setup.timeout)


def adopts(backend: str) -> bool:
    """See ``BackendProvider.adopts``."""
    return backend == NAME and registration.unavailable_reason() is None


def adopt() -> CclBackend:
    """See ``BackendProvider.adopt``."""
    return CclBackend(initialization.world_timeout())
