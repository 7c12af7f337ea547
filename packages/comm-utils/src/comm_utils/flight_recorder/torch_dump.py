"""Write rings in the format of torch's flight recorder, which ``torch.distributed.flight_recorder.fr_trace`` reads.

The format is a pickled dict for each rank, version 2.10: ``torch/csrc/distributed/c10d/FlightRecorder.hpp`` of torch
2.13 writes it, ``torch/distributed/flight_recorder/components`` reads it. It has no place for some of what rings tell:

- fr_trace accepts few names of libraries, so every call is one of ``gloo``; the backend stands in the description of
  the group.
- It knows torch's operations only. A call is written as the operation of its pattern of communication; others are left
  out.
- It matches the ranks of a whole group, so the messages of each pair, direction and tag are in a group of those two.
  Native code gives messages no numbers, so they are counted here.
- A call in which a process ended is left out where the others made the same, so that the rank is found missing.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from comm_utils import operations
from comm_utils.errors import ArgumentError
from comm_utils.flight_recorder.calls import Call, RingGroup
from comm_utils.flight_recorder.snapshot import RankSnapshot
from comm_utils.flight_recorder.torch_matching import COLLECTIVES, Placed, described, place
from comm_utils.operations import patterns

__all__ = ["VERSION", "check_folder", "torch_dumps", "write_torch_dumps"]

VERSION = "2.10"
_PREFIX = "rank_"

#: Collectives of which only the root has the tensor with a part for each rank.
_AT_ROOT = (patterns.GATHER, patterns.SCATTER)
#: torch's names of dtypes in dumps.
_DTYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int8": "Char",
    "uint8": "Byte",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}


def torch_dumps(snapshots: Sequence[RankSnapshot]) -> dict[int, dict[str, Any]]:
    """Return the dump of each rank, by global rank.

    Args:
        snapshots: of one world; with ``recent`` as large as the rings, dumps are as long as they can be.
    """
    known = {one.rank: one for one in snapshots}
    placed = place(known)
    groups = _groups(placed)
    return {rank: _dump(one, placed[rank], groups) for rank, one in known.items()}


def check_folder(folder: Path) -> None:
    """Refuse a folder for dumps that has files.

    Raises:
        ArgumentError: names it.
        OSError: it cannot be listed.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ArgumentError(f"{folder}: got a folder with files; expected an empty one, as fr_trace reads all files")


def write_torch_dumps(snapshots: Sequence[RankSnapshot], folder: Path) -> list[Path]:
    """Write the dump of each rank to ``folder/rank_RANK``; return the files.

    Args:
        folder: is created; it has to be empty, as fr_trace reads all files in it.

    Raises:
        ArgumentError: ``folder`` has files.
        OSError: a file cannot be written.
    """
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for rank, dump in sorted(torch_dumps(snapshots).items()):
        path = folder / f"{_PREFIX}{rank}"
        path.write_bytes(pickle.dumps(dump, protocol=2))
        found.append(path)
    return found


def _groups(placed: dict[int, list[Placed]]) -> dict[str, RingGroup]:
    """Return the groups of all ranks; fr_trace wants one description of each."""
    found: dict[str, RingGroup] = {}
    for rank in sorted(placed):
        for one in placed[rank]:
            found.setdefault(one.group.name, one.group)
    return found


def _dump(snapshot: RankSnapshot, placed: Sequence[Placed], groups: dict[str, RingGroup]) -> dict[str, Any]:
    mine = {name: group for name, group in groups.items() if snapshot.rank in group.ranks}
    numbers = {name: number for number, name in enumerate(sorted(groups))}
    calls: dict[str, list[Call]] = defaultdict(list)
    for one in placed:
        calls[one.group.name].append(one.call)
    entries = [
        _entry(snapshot, one, record_id, numbers[one.group.name], described(groups[one.group.name]))
        for record_id, one in enumerate(sorted(placed, key=lambda one: one.call.begin_ns))
    ]
    return {
        "version": VERSION,
        "comm_lib_version": "",
        "pg_config": {
            name: {"name": name, "desc": described(group), "ranks": str(sorted(group.ranks))}
            for name, group in mine.items()
        },
        "pg_status": {str(numbers[name]): _status(calls[name]) for name in mine},
        "entries": entries,
    }


def _status(calls: Iterable[Call]) -> dict[str, int]:
    begun, done = -1, -1
    for call in calls:
        begun = max(begun, call.in_series)
        done = done if call.is_open or call.failed else max(done, call.in_series)
    return {
        "last_enqueued_collective": begun,
        "last_started_collective": begun,
        "last_completed_collective": done,
    }


def _entry(snapshot: RankSnapshot, one: Placed, record_id: int, group: int, description: str) -> dict[str, Any]:
    call, header = one.call, snapshot.header
    is_done = not call.is_open and not call.failed
    begin_ns = header.wall_ns + call.begin_ns - header.monotonic_ns
    end_ns = header.wall_ns + call.end_ns - header.monotonic_ns
    inputs, outputs = _elements(snapshot.rank, call, len(one.group.ranks))
    dtypes = [_DTYPES.get(call.dtype.removeprefix("torch."), call.dtype)] if call.dtype else []
    return {
        "record_id": record_id,
        "pg_id": group,
        "process_group": (one.group.name, description),
        "collective_seq_id": call.in_series,
        "p2p_seq_id": call.in_series if call.is_message else 0,
        "op_id": record_id + 1,
        "is_p2p": call.is_message,
        "profiling_name": one.name,
        "input_sizes": [inputs] if dtypes else [],
        "input_dtypes": dtypes,
        "output_sizes": [outputs] if dtypes else [],
        "output_dtypes": dtypes,
        "state": "completed" if is_done else "started",
        "time_created_ns": begin_ns,
        "time_discovered_started_ns": begin_ns,
        "time_discovered_completed_ns": end_ns if is_done else None,
        "retired": not call.is_open,
        "frames": _frames(call.caller),
        **({"duration_ms": (call.end_ns - call.begin_ns) / 1e6} if is_done else {}),
    }


def _elements(rank: int, call: Call, world_size: int) -> tuple[list[int], list[int]]:
    """Return the shapes of input and output; [] is none."""
    if call.is_message:
        return ([call.elements], []) if call.is_send else ([], [call.elements])
    pattern = operations.get(call.operation).pattern
    _, input_in_parts, output_in_parts = COLLECTIVES[pattern]
    inputs = call.elements * (world_size if input_in_parts else 1)
    outputs = call.elements * (world_size if output_in_parts else 1)
    if call.sent is not None:
        inputs, outputs = sum(call.sent), sum(call.received or ())
    has_both = pattern not in _AT_ROOT or call.root in (rank, -1)
    return ([inputs] if has_both or not input_in_parts else []), ([outputs] if has_both or not output_in_parts else [])


def _frames(caller: str) -> list[dict[str, Any]]:
    """Return the one frame that a ring has of ``file:line function``."""
    place, _, name = caller.rpartition(" ")
    file, _, line = place.rpartition(":")
    return [{"name": name, "filename": file, "line": int(line)}] if line.isdecimal() else []
