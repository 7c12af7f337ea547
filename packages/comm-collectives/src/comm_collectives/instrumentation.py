"""Putting wrappers around the active backend and taking them off."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from comm_collectives.device_times import DeviceTimes
from comm_collectives.observed import Observed
from comm_collectives.observing import labelled
from comm_utils.active import activate, active_backend
from comm_utils.backend import Backend
from comm_utils.comms_logger import CommsLogger

__all__ = ["bare_backend", "instrument", "labelled"]


def bare_backend() -> Backend:
    """The active backend without wrappers."""
    backend = active_backend()
    while isinstance(backend, Observed):
        backend = backend.inner
    return backend


# What is under way on devices outlives the wrapper.
_devices: WeakKeyDictionary[CommsLogger, DeviceTimes] = WeakKeyDictionary()


def instrument(observe: CommsLogger | None = None) -> None:
    """Make the active backend record into ``observe``; None takes the wrapper off, and what it costs."""
    backend = bare_backend()
    backend.prepared.clear()  # what was prepared with the wrapper, or without it
    if observe is None:
        activate(backend)
        return
    devices = _devices.setdefault(observe, DeviceTimes())
    observe.when_reading(devices.collect)
    activate(Observed(backend, observe, devices))
