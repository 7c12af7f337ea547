"""The state of one rank, and its last calls: read from its ring, or sent by it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from comm_utils.flight_recorder.calls import UNKNOWN_GROUP, Call, Failure, RingGroup, RingHeader, Stack
from comm_utils.flight_recorder.layout import IN_BACKGROUND, LANES, ON_DEVICE
from comm_utils.flight_recorder.rank_ranges import LARGEST_GROUP, MOST_RANKS, packed_ranks, unpacked_ranks
from comm_utils.flight_recorder.reader import RingError, RingReader
from comm_utils.flight_recorder.scanning import open_numbers
from comm_utils.oom_kills import OOM_KILLS
from comm_utils.process_descriptors import ProcessDescriptor
from comm_utils.process_state import GONE, debugger_of, describe_end, process_state, signal_name, wait_status

__all__ = ["RECENT", "RankSnapshot", "decode_snapshot", "encode_snapshot", "take_snapshot"]

#: So many of the latest calls of each lane a snapshot has.
RECENT = 256
_SENT = 64
# A watch looks around several times a second, unless its thread does not run.
_SILENT_NS = 1_500_000_000
# Calls under way that are older than these, and for which nobody waits.
_MOST_OTHERS = 256
# Of calls in these states, there may be very many.
_MANY = frozenset((IN_BACKGROUND, ON_DEVICE))
_LARGEST_SNAPSHOT_BYTES = 1 << 20
# Of 64 bits, with a sign or without one.
_WORDS = range(-(1 << 63), 1 << 64)


@dataclass(frozen=True)
class RankSnapshot:
    """The state of one rank.

    Attributes:
        process: ``"running"``, ``"stopped"``, ``"ended"``, ``"replaced"`` (by another program), ``"left"`` (it runs,
            and has ended communication) or ``"unknown"``.
        calls: its latest ones, in the order of their beginnings.
        stack: where it was in Python, if it was written down since its last call began.
        taken_ns: when, by the monotonic clock of its host.
        threads: so many have made calls.
        debugger: holds its process, which is stopped; empty where none is known to.
        looked_ns: when its watch last looked around, by the same clock; 0 is unknown.
        oom_kills: of a rank of this host that is lost, so many processes the kernel has killed for lack of memory since
            the world of this process began.
        wait_status: of the same, how it has ended, in the form of ``os.waitpid``; None is unknown.
    """

    header: RingHeader
    process: str
    calls: tuple[Call, ...]
    failures: tuple[Failure, ...] = ()
    stack: Stack | None = None
    taken_ns: int = 0
    threads: int = 1
    debugger: str = ""
    looked_ns: int = 0
    oom_kills: int = 0
    wait_status: int | None = None

    @property
    def rank(self) -> int:
        """Return the global rank."""
        return self.header.rank

    @property
    def where(self) -> str:
        """Return its process, for messages."""
        return f"pid {self.header.pid} on {self.header.host or 'an unknown host'}"

    @property
    def is_lost(self) -> bool:
        """Return whether its process has ended and did not say that it was to, nor was asked to by a signal."""
        return self.process in GONE and self.header.state == 0 and not self.header.signal

    @property
    def is_gone(self) -> bool:
        """Return whether it makes no call any more."""
        return self.process in GONE or self.process == "left"

    @property
    def silent_ns(self) -> int:
        """Return for how long the watch of a process that runs has given no sign; 0 where it gives signs."""
        age_ns = self.taken_ns - self.looked_ns
        return age_ns if self.process == "running" and self.looked_ns and age_ns > _SILENT_NS else 0

    @property
    def may_be_killed(self) -> bool:
        """Return whether SIGKILL may have ended the process, as far as is known."""
        status = self.wait_status
        return status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)

    @property
    def end(self) -> str:
        """Return how it has gone, as the end of a sentence that begins with its name."""
        raised = next((one for one in reversed(self.failures) if not one.group), None)
        if raised is not None:
            because = f" with {raised.error}" + (f": {raised.text}" if raised.text else "")
        elif self.header.signal:
            because = f" by {signal_name(self.header.signal)}"
        elif self.wait_status is not None:
            because = f" {describe_end(self.wait_status)}"
        else:
            because = ""
        if self.process == "replaced":
            return f"has replaced its program (exec){because}"
        if self.process == "ended":
            return f"has ended{because}"
        if raised is None and self.header.signal:  # by which it is about to end, unless that is held up
            return f"was sent {signal_name(self.header.signal)}"
        return f"has left the world or is ending{because}"

    def open_calls(self) -> list[Call]:
        """Return its calls under way, the oldest first."""
        return [call for call in self.calls if call.is_open]

    def waiting_calls(self) -> list[Call]:
        """Return its calls under way that somebody waits for, the oldest first; of those on a device, one a group."""
        found: list[Call] = []
        on_device: set[str] = set()
        for call in self.calls:
            if not call.is_open or not call.is_waited_for:
                continue
            if call.is_on_device:
                if call.group.name in on_device:  # comes after the first one
                    continue
                on_device.add(call.group.name)
            found.append(call)
        return found

    def calls_on_device(self, group: str) -> list[Call]:
        """Return its calls on the group of that name that a device may not have completed, the oldest first.

        Neighbours share an event, so the device may have completed the first ones.
        """
        return [call for call in self.calls if call.is_open and call.is_on_device and call.group.name == group]

    def collectives(self, group: str) -> list[Call]:
        """Return its latest collectives on the group of that name."""
        return [call for call in self.calls if call.group.name == group and not call.is_message]


def take_snapshot(
    reader: RingReader, is_local: bool = True, recent: int = RECENT, descriptor: ProcessDescriptor | None = None
) -> RankSnapshot:
    """Read what a rank does from its ring.

    Args:
        is_local: its process can be seen from here, if it lives.
        recent: so many of the latest calls of each lane, beside earlier ones that are under way.
        descriptor: of its process, where this process has one.
    """
    reader.refresh()
    calls = [call for lane in range(LANES) for call in reader.calls(lane, most=recent)]
    known = {(call.lane, call.number) for call in calls}
    earlier = [call for lane in range(LANES) for call in _earlier_open(reader, lane, recent)]
    calls += [call for call in earlier if (call.lane, call.number) not in known]
    calls.sort(key=lambda call: call.begin_ns)
    header = reader.header
    process = process_state(*header.process) if is_local else "unknown"
    if header.state in (1, 2) and process != "ended":
        process = "left"
    debugger = debugger_of(header.pid) if process == "stopped" else ""
    taken, failures, stack = time.perf_counter_ns(), tuple(reader.failures), reader.stack()
    if stack is not None and calls and stack.at_ns < calls[-1].begin_ns:
        stack = None  # the rank has left that place
    threads, looked_ns = reader.word("threads"), reader.word("looked_at")
    found = RankSnapshot(header, process, tuple(calls), failures, stack, taken, threads, debugger, looked_ns)
    if not is_local or not found.is_lost:
        return found
    status = wait_status(header.pid, header.started) if descriptor is None else descriptor.wait_status()
    return replace(found, oom_kills=OOM_KILLS.since_begin(), wait_status=status)


def _earlier_open(reader: RingReader, lane: int, recent: int) -> list[Call]:
    """Return the calls under way before the ``recent`` latest ones: all that somebody waits for, and others."""
    before = reader.count(lane) - recent + 1
    earlier = [(number, end) for number, end in open_numbers(reader, lane) if number < before]
    awaited = [number for number, end in earlier if end not in _MANY]
    others = [number for number, end in earlier if end in _MANY]
    calls = (reader.call(lane, number) for number in (*awaited, *others[:_MOST_OTHERS]))
    return [call for call in calls if call is not None and call.is_open]


def _most_telling(calls: Sequence[Call]) -> list[Call]:
    """Return the latest calls, and the earlier ones that somebody waits for."""
    earlier = [call for call in calls[:-_SENT] if call.is_open and call.is_waited_for]
    return [*earlier[:_SENT], *calls[-_SENT:]]


def encode_snapshot(snapshot: RankSnapshot) -> bytes:
    """Return a snapshot as JSON, for ranks of other hosts."""
    calls = _most_telling(snapshot.calls)
    groups = {call.group.name: call.group for call in calls}
    content = {
        "header": asdict(snapshot.header),
        "process": snapshot.process,
        "groups": [{**group.__dict__, "ranks": packed_ranks(group.ranks)} for group in groups.values()],
        "calls": [{**call.__dict__, "group": call.group.name} for call in calls],
        "failures": [asdict(failure) for failure in snapshot.failures[-4:]],
        "stack": None if snapshot.stack is None else asdict(snapshot.stack),
        "taken_ns": snapshot.taken_ns,
        "threads": snapshot.threads,
        "debugger": snapshot.debugger,
        "looked_ns": snapshot.looked_ns,
    }
    return json.dumps(content, separators=(",", ":")).encode()


def decode_snapshot(data: bytes) -> RankSnapshot:
    """Read what :func:`encode_snapshot` wrote.

    Raises:
        RingError: it is malformed.
    """
    if len(data) > _LARGEST_SNAPSHOT_BYTES:
        raise RingError(f"a snapshot of {len(data)} bytes; expected at most {_LARGEST_SNAPSHOT_BYTES}")
    try:
        return _decoded(json.loads(data))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise RingError(f"malformed snapshot: {type(error).__name__}: {error!s:.100}") from None


def _decoded(content: Any) -> RankSnapshot:
    groups: dict[str, RingGroup] = {}
    more = MOST_RANKS
    for one in content["groups"]:
        ranks = unpacked_ranks(one["ranks"], min(LARGEST_GROUP, more))
        more -= len(ranks)
        group = RingGroup(
            _text(one["name"]), tuple(map(_number, ranks)), _text(one["description"]), _text(one["backend"])
        )
        groups[group.name] = group
    calls = []
    for one in content["calls"]:
        fields = {name: _as(kind, one[name]) for name, kind in Call.__annotations__.items() if name in one}
        calls.append(Call(**{**fields, "group": groups.get(_text(one["group"]), UNKNOWN_GROUP)}))
    return RankSnapshot(
        RingHeader(**{name: _as(kind, content["header"][name]) for name, kind in RingHeader.__annotations__.items()}),
        _text(content["process"]),
        tuple(calls),
        tuple(
            Failure(**{name: _as(kind, one[name]) for name, kind in Failure.__annotations__.items()})
            for one in content["failures"]
        ),
        None
        if content["stack"] is None
        else Stack(_text(content["stack"]["text"]), _as("int", content["stack"]["at_ns"])),
        _as("int", content["taken_ns"]),
        _as("int", content["threads"]),
        _text(content.get("debugger", "")),
        _as("int", content.get("looked_ns", 0)),
    )


def _as(kind: str, value: Any) -> Any:
    """Return ``value`` if it is of the annotated kind."""
    expected = {"int": int, "str": str, "bool": bool}.get(kind)
    if expected is not None:
        if type(value) is not expected:
            raise TypeError(f"{value!r:.40} is no {kind}")
        return _text(value) if kind == "str" else _number(value) if kind == "int" else value
    if kind.startswith("tuple[int"):
        return None if value is None else _numbers(value)
    return value


def _text(value: object) -> str:
    """Return ``value`` as text that can be printed: JSON can hold halves of characters."""
    return str(value).encode("utf-8", "replace").decode()


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(one) is not int for one in values):
        raise TypeError("expected a list of integers")
    return tuple(_number(one) for one in values)


def _number(value: Any) -> int:
    if type(value) is not int or value not in _WORDS:
        raise ValueError(f"{str(value)[:40]} has more than 64 bits")
    return value
