"""The environment variables of the engine in shared memory."""

from __future__ import annotations

import functools
import os

from comm_utils.log import logger

__all__ = ["SETTINGS", "SWITCH", "TRANSFERS", "fixed_transfer", "is_off", "learns", "settings", "warn_of_values"]

#: The variable that turns it off.
SWITCH = "CCL_SHARED_MEMORY"
_KERNELS = "CCL_KERNELS"
_BUILDS = "avx512, avx2, neon, portable"
#: The variables that fix how data is moved.
SETTINGS = "CCL_SHARED_MEMORY_TRANSFER", "CCL_SHARED_MEMORY_LEARNING"
_TRANSFER, _LEARNING = SETTINGS
TRANSFERS = ("cached", "streamed", "single_copy")


def _value(variable: str) -> str:
    return os.environ.get(variable, "").strip()


def is_off() -> bool:
    """Return whether this process turns shared memory off."""
    return _value(SWITCH) == "0"


def settings() -> list[str]:
    """Return what the variables of this process that decide how its groups move data mean; "" is the default."""
    transfer, learning = map(_value, SETTINGS)
    return [transfer if transfer in TRANSFERS else "", learning if learning == "0" else ""]


def fixed_transfer() -> str:
    """Return the variable and value that fix how groups of this process move data; "" where nothing does."""
    value = _value(_TRANSFER)
    return f"{_TRANSFER}={value}" if value in TRANSFERS else ""


def learns() -> bool:
    """Return whether groups of this process choose among methods by measuring them."""
    return not fixed_transfer() and _value(_LEARNING) != "0"


def warn_of_values(kernels: str) -> None:
    """Warn of values that mean nothing, once each.

    Args:
        kernels: those in use.
    """
    _warn_of(*map(_value, (SWITCH, *SETTINGS)), os.environ.get(_KERNELS, ""), kernels)


@functools.cache
def _warn_of(switch: str, transfer: str, learning: str, wanted: str, found: str) -> None:
    if switch not in ("", "0", "1"):
        logger.warning("%s: got %r, expected 0 or 1; shared memory is used", SWITCH, switch)
    if transfer and transfer not in TRANSFERS:
        expected = ", ".join(TRANSFERS)
        logger.warning("%s: got %r, expected one of %s; the fastest is measured", _TRANSFER, transfer, expected)
    if learning not in ("", "0", "1"):
        logger.warning("%s: got %r, expected 0 or 1; the fastest is measured", _LEARNING, learning)
    if wanted and wanted != found:
        logger.warning(
            "%s: got %r, expected one of %s that this machine has; %s is used", _KERNELS, wanted, _BUILDS, found
        )
