"""The settings of the flight recorder of this process."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FlightRecorderSettings"]


@dataclass(frozen=True)
class FlightRecorderSettings:
    """The settings of the flight recorder.

    Attributes:
        enabled: whether calls are recorded.
        directory: the folder that has one folder for each job; None is ``comm-flight-UID`` in ``/dev/shm``, or in the
            folder for temporary files where there is no ``/dev/shm``.
        records: how many of its last calls each rank keeps; rounded up to a power of two.
        keep: how many folders of jobs that have ended stay, of those that ended after a failure.
        keep_clean: rings stay after a clean end, too.
    """

    enabled: bool = True
    directory: str | None = None
    records: int = 8192
    keep: int = 4
    keep_clean: bool = False
