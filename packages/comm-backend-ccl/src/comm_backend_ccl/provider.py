"""How the selector learns about oneCCL; named by the entry point ``comm_utils.backends: ccl``."""

from __future__ import annotations

from collections.abc import Mapping

from comm_utils.backend import Availability, Backend, Setup
from comm_utils.errors import BackendUnavailableError

__all__ = ["adopt", "adopts", "availability", "initialize"]

_REASON = "this release of comm-backend-ccl contains no oneCCL engine"
_REMEDY = "use dist_backend='gloo' for CPU tensors"


def availability() -> Mapping[str, Availability]:
    """See ``BackendProvider.availability``."""
    return {"ccl": Availability(False, _REASON, _REMEDY)}


def initialize(setup: Setup) -> Backend:
    """See ``BackendProvider.initialize``."""
    raise BackendUnavailableError(f"backend 'ccl' cannot be used: {_REASON}; {_REMEDY}")


def adopts(backend: str) -> bool:
    """See ``BackendProvider.adopts``."""
    return False


def adopt() -> Backend:
    """See ``BackendProvider.adopt``."""
    raise BackendUnavailableError(f"torch.distributed on 'ccl' cannot be adopted: {_REASON}")
