"""The binary layout of a ring file, in which a rank records its calls.

A file has, one after the other: a header; two lanes of records; the memory of split sizes; the entries, which name
groups, kinds of calls and callers once; and the last Python stacks. The first lane has the calls that Python makes,
which Python or native code for it writes; the second has those of the engine in shared memory, written by itself.
All numbers are little-endian, as all supported processors are. Native code includes the same layout
(``comm-backend-ccl``: ``native/shared_memory/recorder/layout.hpp``), and a test compares both.

A record is eight words of 64 bits:

====  =========================================================================================================
word  content
====  =========================================================================================================
0     the number of the record in its lane, from 1; 0, or that of another call, while the others change
1     when the call began, in ticks of the lane's clock
2     when it ended; 0 while it is under way; bit 63 says that it failed; bit 62 alone says that it is under way and
      that nobody waits for it yet (an asynchronous call before its ``wait()``); bit 61 alone that it is under way
      and has a timeout of its own; bit 60 alone that the caller has gone on, and a device has not completed it yet
3     the kind of call in bits 0 to 31, the caller in bits 32 to 63 (indices of entries; 0 is unknown)
4     elements: of the whole tensor, or of a rank's part where the operation has parts
5     the number of the call among the collectives of its group, or among the messages of one pair, direction and tag
6     a digest of this call and of all before it that word 5 counts
7     where its split sizes are in their memory, plus 1; 0 is none; the tag of a message is in bits 32 to 63; where
      bit 63 is set, of a collective with several tensors in one, their number in bits 48 to 62, and in the other
      bits a digest of their sizes
====  =========================================================================================================

The kind of a record of native code has bit 31 set and names operation, dtype, reduce op and group by codes
(:func:`packed_kind`); an entry of type :attr:`EntryType.CODES` has the names of these codes. Its root is in bits 0 to
15 of word 7, plus 1, and the code of the user's call, where that is not the operation, in bits 16 to 31.
"""

from __future__ import annotations

import struct
from enum import IntEnum

__all__ = [
    "CLOCK",
    "CODES",
    "ENTRY",
    "FAILED",
    "HEADER",
    "HEADER_BYTES",
    "IN_BACKGROUND",
    "JOINED",
    "LANES",
    "LANE_OFFSETS",
    "LARGEST_ENTRY_BYTES",
    "LARGEST_RECORDS",
    "LIMITED",
    "MAGIC",
    "MARGIN",
    "MOST_NATIVE_GROUPS",
    "NATIVE_KIND",
    "ON_DEVICE",
    "RECORD",
    "RECORD_BYTES",
    "STACK_HEAD",
    "WORDS",
    "EntryType",
    "packed_kind",
    "unpacked_kind",
]

MAGIC = b"COMMFR01"
HEADER_BYTES = 4096

#: magic; records in a lane; rank, world size, pid, image of the process; its start in clock ticks since boot; wall
#: clock and monotonic clock in nanoseconds at the opening; offsets of splits, entries and stack, and the file's size.
HEADER = struct.Struct("<8s Q 4I Q 2Q 4Q")
#: Of each lane in the header: its number of records so far; ticks and nanoseconds at the opening; nanoseconds a tick.
CLOCK = struct.Struct("<Q Q Q d")
LANE_OFFSETS = (512, 640)
LANES = 2
#: More words of the header, by their offset in bytes.
WORDS = {
    "entries_used": 768,  # bytes
    "splits_used": 776,  # words so far; the memory is written round and round
    "state": 784,  # 0: the process runs; 1: it ended cleanly; 2: it ended after a failure
    "looked_at": 792,  # when the watch thread last ran, by the monotonic clock
    "recorded": 800,  # 1: this process makes records; 0: recording is off
    "threads": 808,  # so many threads have made calls
    "signal": 816,  # the number of the signal by which the process is about to end, such as SIGTERM; 0: none
    "listed_at": 824,  # when the watch has last looked for rings of other ranks, by the monotonic clock
    "rewritten": 832,  # rises by 2 where entries were left out and the others moved; odd meanwhile
}

RECORD = struct.Struct("<8Q")
RECORD_BYTES = RECORD.size
FAILED = 1 << 63
IN_BACKGROUND = 1 << 62
LIMITED = 1 << 61
#: Of word 7.
JOINED = 1 << 63
ON_DEVICE = 1 << 60

#: The type of an entry, the bytes of its text after the head, and its index. The text is JSON.
ENTRY = struct.Struct("<HHI")
LARGEST_ENTRY_BYTES = 32 << 10
#: Odd while it is written; bytes of text; when it was taken, by the monotonic clock.
STACK_HEAD = struct.Struct("<Q Q Q")

LARGEST_RECORDS = 1 << 20
#: So many of the oldest records may be rewritten while a reader reads them.
MARGIN = 8


class EntryType(IntEnum):
    """The type of an entry."""

    #: ``{"name", "ranks", "description", "backend", "timeout_s"}``: a group; the name is the same on all members. Here
    #: and in failures, ranks are numbers, or ``[begin, count, step]`` (:mod:`.rank_ranges`).
    GROUP = 1
    #: ``{"operation", "call", "dtype", "op", "root", "group", "peer", "tag"}``: a kind of call; ``"tag"`` only where
    #: its records do not have it, as it has more than 32 bits or is negative.
    KIND = 2
    #: ``"file:line function"``.
    CALLER = 3
    #: ``{"group", "error", "text", "ranks", "at"}``: what this rank raised, and the ranks that are the cause.
    FAILURE = 4
    #: ``{"operations": [...], "dtypes": [...], "ops": [...], "calls": [...]}``: names of the codes in records of native
    #: code; call 0 is the operation.
    CODES = 5
    #: ``{"host", "identity", "job", "backend", "version", "python"}``: of the process.
    PROCESS = 6


NATIVE_KIND = 1 << 31
#: Bits of operation, dtype, op and group in the kind of a native record, and where they begin.
CODES = {"group": (0, 12), "op": (12, 4), "dtype": (16, 6), "operation": (22, 6), "asynchronous": (28, 1)}
#: Records of native code can name groups with smaller indices.
MOST_NATIVE_GROUPS = 1 << CODES["group"][1]


def packed_kind(operation: int, dtype: int, op: int, group: int, asynchronous: bool = False) -> int:
    """Return the kind of a record of native code."""
    values = {"operation": operation, "dtype": dtype, "op": op, "group": group, "asynchronous": int(asynchronous)}
    return NATIVE_KIND | sum(values[name] << begin for name, (begin, _) in CODES.items())


def unpacked_kind(kind: int) -> dict[str, int]:
    """Return the codes in a kind of native code by name."""
    return {name: kind >> begin & ((1 << bits) - 1) for name, (begin, bits) in CODES.items()}
