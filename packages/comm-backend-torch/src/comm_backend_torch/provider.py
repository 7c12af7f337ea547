"""The provider of :class:`TorchBackend`; the entry point ``comm_utils.backends: torch`` names it."""

from __future__ import annotations

from collections.abc import Mapping

from comm_backend_torch import bindings
from comm_backend_torch.backend import TorchBackend
from comm_utils.backend import Availability, Setup
from comm_utils.torch_support import initialization

__all__ = ["adopt", "adopts", "availability", "initialize"]


def availability() -> Mapping[str, Availability]:
    """See ``BackendProvider.availability``."""
    return {**initialization.availability(), **bindings.availability()}


def initialize(setup: Setup) -> TorchBackend:
    """See ``BackendProvider.initialize``."""
    initialization.initialize(bindings.activate(setup))
    return TorchBackend(setup.timeout)


def adopts(backend: str) -> bool:
    """Any c10d backend; a package that knows one better is asked first."""
    return True


def adopt() -> TorchBackend:
    """Serve the world group that exists; groups made later inherit its timeout."""
    return TorchBackend(initialization.world_timeout())
