"""Numbers of calls, by which the same call is found on other ranks."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator

__all__ = ["EPOCH", "SequenceCounters", "epoch_of"]

#: Numbers of one epoch are below this; the next epoch begins at its next multiple.
EPOCH = 1 << 32
# Channels whose numbers are known; the one that was made first is forgotten first.
_MOST_CHANNELS = 65536
_UNKNOWN = -1


def epoch_of(sequence: int) -> int:
    """Return the epoch in which ``sequence`` was given."""
    return sequence // EPOCH


class SequenceCounters:
    """Counts the calls of each channel: the collectives of a group, or the messages from one rank to another.

    Whenever recording begins, a new epoch does, as other ranks may have gone on meanwhile. Numbers of one epoch are
    compared with those of the same epoch of other ranks alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: OrderedDict[Hashable, Iterator[int]] = OrderedDict()
        self._vague: set[Hashable] = set()
        self.epoch = 0

    def counter(self, channel: Hashable, within: Hashable = None) -> Iterator[int]:
        """Return the numbers of ``channel``, until the epoch ends; -1 for ever where ``within`` is vague."""
        with self._lock:
            if within is not None and within in self._vague:
                return itertools.repeat(_UNKNOWN)
            found = self._channels.get(channel)
            if found is None:
                found = self._channels[channel] = itertools.count(self.epoch * EPOCH)
                if len(self._channels) > _MOST_CHANNELS:
                    self._channels.popitem(last=False)
            return found

    def make_vague(self, within: Hashable) -> bool:
        """Nobody can tell any more which message is which; whether that is news."""
        with self._lock:
            if within in self._vague:
                return False
            self._vague.add(within)
            return True

    def begin_epoch(self, epoch: int) -> None:
        """Count anew, in counters that are then asked for."""
        with self._lock:
            self.epoch = epoch
            self._channels.clear()
            self._vague.clear()
