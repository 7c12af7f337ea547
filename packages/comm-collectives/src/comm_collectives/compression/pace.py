"""Choose how two ranks exchange encoded pieces, by the times of earlier calls.

Messages, whose receives are posted ahead, keep a slow link busy where ranks are not in step. Each costs more of the
processor's time than a step of a collective; so they lose where encoding takes about as long as the link.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple, TypeAlias

from torch.distributed import ProcessGroup

from comm_collectives.by_group import GroupRecords

__all__ = ["Choice", "Key", "choose", "forget", "note"]

# Where a link is faster, the processor's time counts, and less of it is spent where a thread of the library sends.
_SLOW_BYTES_PER_S = 250e6
# What is smaller says little.
_LEAST_BYTES = 1 << 20
# Measured calls of each way before the first choice, and those that a choice looks at.
_FEWEST, _MOST = 2, 3
# Of so many calls, two are measured again, one each way.
_PERIOD = 64

#: A compression, and the bits of the number of elements: what calls have to share to take about the same time.
Key: TypeAlias = tuple[str, int]


class Choice(NamedTuple):
    """A way for a call to exchange what it encodes."""

    #: As messages, if the other rank chooses so too.
    messages: bool
    #: The call waits for the other rank, and then takes its own time.
    measured: bool


@dataclass
class _Calls:
    """The calls of one key."""

    number: int = 0
    #: Seconds of measured calls, as messages and otherwise.
    times: dict[bool, deque[float]] = field(
        default_factory=lambda: {messages: deque(maxlen=_MOST) for messages in (False, True)}
    )


@dataclass
class _Known:
    """Findings of the calls of a group."""

    slow: bool = False
    calls: dict[Key, _Calls] = field(default_factory=dict)


_known = GroupRecords(_Known)


def forget() -> None:
    """Find out anew in the world to come."""
    _known.forget()


def choose(group: ProcessGroup | None, key: Key) -> Choice:
    """Return how the next call of ``group`` with this key exchanges its pieces.

    Ranks count their calls alike, and so measure in the same ones. They may find different times; then one of them
    does not choose messages, and neither uses them.
    """
    known = _known.of(group)
    calls = known.calls.setdefault(key, _Calls())
    number, calls.number = calls.number, calls.number + 1
    if not known.slow:
        return Choice(messages=False, measured=False)
    if number % _PERIOD < 2 or any(len(times) < _FEWEST for times in calls.times.values()):
        return Choice(messages=number % 2 == 1, measured=True)
    return Choice(messages=median_low(calls.times[True]) < median_low(calls.times[False]), measured=False)


def note(
    group: ProcessGroup | None,
    key: Key,
    received_bytes: int,
    waited_s: float,
    took_s: float,
    measured_messages: bool | None = None,
) -> None:
    """Note what a call received, how long this rank has waited for it, and how long the call took.

    A call that computes for most of its time says nothing of a slow link, and waits for little on any.

    Args:
        measured_messages: of a measured call, whether both ranks used messages.
    """
    known = _known.of(group)
    if measured_messages is not None:
        known.calls.setdefault(key, _Calls()).times[measured_messages].append(took_s)
    if received_bytes < _LEAST_BYTES:
        return
    if waited_s * _SLOW_BYTES_PER_S > received_bytes:
        known.slow = True
    elif took_s * _SLOW_BYTES_PER_S < received_bytes:
        known.slow = False
