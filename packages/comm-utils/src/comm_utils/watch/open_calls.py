"""The calls of this rank that are under way, found without reading all records each time."""

from __future__ import annotations

from comm_utils.flight_recorder.calls import Call
from comm_utils.flight_recorder.layout import IN_BACKGROUND, LANES, ON_DEVICE
from comm_utils.flight_recorder.reader import RingReader
from comm_utils.flight_recorder.scanning import is_under_way, open_numbers

__all__ = ["OpenCalls"]

# A thread that was interrupted while it recorded a call writes that record after those of later calls.
_LATE = 64
# A look reads records from the oldest that was open on; where these are few among many, it asks each of them.
_FEW = 1 / 16
# A device may have thousands of calls to complete; the groups of the first ones are looked at.
_FIRST_ON_DEVICE = 16


class OpenCalls:
    """Follows the records of one ring, which bounds how many a look reads."""

    def __init__(self, ring: RingReader) -> None:
        self._ring = ring
        # Numbers in ascending order.
        self._open: list[list[int]] = [[] for _ in range(LANES)]
        self._seen = [0] * LANES

    def look(self) -> list[Call]:
        """Return the calls under way that somebody waits for, the oldest first; of those on a device, one a group."""
        found = []
        for lane in range(LANES):
            still = self._still_open(lane)
            self._open[lane] = [number for number, _ in still]
            groups: set[str] = set()
            left = _FIRST_ON_DEVICE
            for number, end in still:
                left -= end == ON_DEVICE
                if end == IN_BACKGROUND or (end == ON_DEVICE and left < 0):
                    continue
                call = self._ring.call(lane, number)
                if call is None or not call.is_open or (call.is_on_device and call.group.name in groups):
                    continue
                if call.is_on_device:
                    groups.add(call.group.name)
                found.append(call)
        return sorted(found, key=lambda call: call.begin_ns)

    def _still_open(self, lane: int) -> list[tuple[int, int]]:
        """Return number and word 2 of the records that are under way."""
        ring, known = self._ring, self._open[lane]
        new = max(1, self._seen[lane] + 1 - _LATE)
        self._seen[lane] = ring.count(lane)
        old = [number for number in known if number < new]
        if not old:
            return open_numbers(ring, lane, new)
        if len(old) > _FEW * (min(new - old[0], ring.records)):
            return open_numbers(ring, lane, old[0])
        ends = ((number, ring.end_word(lane, number)) for number in old)
        return [*((number, end) for number, end in ends if is_under_way(end)), *open_numbers(ring, lane, new)]
