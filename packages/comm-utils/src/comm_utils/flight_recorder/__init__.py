"""The flight recorder: each rank's last calls, in a file that survives the process."""

from comm_utils.flight_recorder.calls import Call, Failure, RingGroup, RingHeader, Stack
from comm_utils.flight_recorder.directory import default_directory, rings_in
from comm_utils.flight_recorder.reader import RingError, RingReader, open_ring
from comm_utils.flight_recorder.recorder import RECORDER, FlightRecorder, Kind
from comm_utils.flight_recorder.settings import FlightRecorderSettings

__all__ = [
    "RECORDER",
    "Call",
    "Failure",
    "FlightRecorder",
    "FlightRecorderSettings",
    "Kind",
    "RingError",
    "RingGroup",
    "RingHeader",
    "RingReader",
    "Stack",
    "default_directory",
    "open_ring",
    "rings_in",
]
