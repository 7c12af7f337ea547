"""Distributed environment utilities: what every layer shares, without torch."""

from comm_utils.active import activate, active_backend, deactivate, is_active, slot
from comm_utils.backend import Availability, Backend, BackendProvider, Capabilities, Setup, Work
from comm_utils.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendUnavailableError,
    BrokenGroupError,
    CollectiveMismatchError,
    CommError,
    CommTimeoutError,
    ConfigurationError,
    LaunchError,
    NotInitializedError,
    PeerLostError,
)
from comm_utils.reduce_op import ReduceOp, parse_reduce_op

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "Availability",
    "Backend",
    "BackendProvider",
    "BackendUnavailableError",
    "BrokenGroupError",
    "Capabilities",
    "CollectiveMismatchError",
    "CommError",
    "CommTimeoutError",
    "ConfigurationError",
    "LaunchError",
    "NotInitializedError",
    "PeerLostError",
    "ReduceOp",
    "Setup",
    "Work",
    "activate",
    "active_backend",
    "deactivate",
    "is_active",
    "parse_reduce_op",
    "slot",
]
