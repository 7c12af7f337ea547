"""Putting wrappers around the active backend and taking them off."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from comm_collectives.labels import labelled
from comm_collectives.recorded.backend import Observed
from comm_collectives.recorded.device_times import DeviceTimes
from comm_collectives.wrapping import bare_backend
from comm_utils.active import activate
from comm_utils.observability.comms_logger import CommsLogger

__all__ = ["bare_backend", "instrument", "labelled"]


# What is under way on devices outlives the wrapper.
_devices: WeakKeyDictionary[CommsLogger, DeviceTimes] = WeakKeyDictionary()


def instrument(observe: CommsLogger | None = None) -> None:
    """Make the active backend record into ``observe``; None takes the wrapper off, and what it costs."""
    backend = bare_backend()
    backend.fast_paths.clear()  # those with the wrapper, or without it
    if observe is None:
        activate(backend)
        return
    devices = _devices.setdefault(observe, DeviceTimes())
    observe.when_reading(devices.collect)
    activate(Observed(backend, observe, devices))
