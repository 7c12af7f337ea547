"""Decoders of what stands in a store: anybody who can connect may have written it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import HashStore

from comm_backend_ccl import member_records, placement
from comm_backend_ccl.any_source import AnySource
from comm_backend_ccl.peers import this_process
from comm_backend_ccl.store_messages import StoreMessages
from comm_backend_ccl.tables import ONECCL_DTYPES
from comm_orchestrator.rendezvous import authentication, greeting, join, protocol
from comm_orchestrator.rendezvous.authentication import Seal
from comm_orchestrator.rendezvous.protocol import Deadline, RendezvousPoint, counted
from comm_orchestrator.rendezvous.records import (
    RankRecord,
    check_devices,
    check_record,
    device_indices,
    format_hosts,
    missing_ranks,
)
from comm_utils import topology
from comm_utils.errors import ArgumentError, BackendUnavailableError, CommError, LaunchError
from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.torch_support import group_agreement, monitored_barrier
from comm_utils.torch_support.bounded_store import BoundedStore
from comm_utils.torch_support.store_waits import StoreWait
from fuzz.bounds import Decoder

__all__ = ["DECODERS"]

_SECRET = b"s" * 32
_MINE = RankRecord(0, 2, "host-a", "id-a", 1, address="10.0.0.1", sources={"rank": "RANK"}, versions={"torch": "2"})
_OTHER = RankRecord(1, 2, "host-b", "id-b", 2, "train.py", None, 0, versions={"torch": "2"})
_PROBLEM = RankRecord(1, 2, "host-b", "id-b", 2, problem=["LaunchError", "no"], unavailable_reasons={"ccl": "no"})


def _stored(key: str, data: bytes) -> HashStore:
    found = HashStore()
    found.set(key, data)  # type: ignore[arg-type]  # torch takes bytes as well
    return found


# --- the rendezvous


def _point(key: str, data: bytes, seal: Seal) -> protocol._Rendezvous:
    point = RendezvousPoint(_stored(key, data), seal=seal)
    return protocol._Rendezvous(point, _MINE, Deadline(0.0), {})


def _record(data: bytes) -> None:
    new = _point("record/1", data, Seal()).record(1)
    refusal = check_record(_MINE, {0: _MINE}, new)
    if refusal is None:
        here = {0: _MINE, new.rank: new}
        str(missing_ranks(here, _MINE.world_size, 1.0)).encode()
        format_hosts(here.values()).encode()
        device_indices(list(here.values()))
        refusal = check_devices(list(here.values()), ("cuda",))
    if refusal is not None:
        raise LaunchError(refusal.message)


def _signed_record(data: bytes) -> None:
    _point("record/1", data, Seal(_SECRET, "here")).record(1)


def _verdict(data: bytes) -> None:
    found = _point("verdict", data, Seal()).read_verdict()
    if "agreed" in found:
        join._check_agreement(found["agreed"], 2)
        for process in join._processes(found["agreed"]):
            str(process).encode()


def _greeting(data: bytes) -> None:
    found = greeting.read_greeting(_stored("comm/server", data), Deadline(0.0))
    assert found is not None
    f"pid {found['pid']} on {found['host']:.60} {found['job']!r:.60} {found['id']}".encode()


def _sealed(*values: Any, secret: bytes | None = None) -> Sequence[bytes]:
    return [Seal(secret, "here" if secret else "").sign("record/1", one).encode() for one in values]


_AGREED = {
    "agreed": {
        "choice": {"backend": "gloo", "reason": "named"},
        "host_of": [0, 1],
        "devices": [0, 0],
        "addresses": ["10.0.0.1", None],
        "hosts": ["host-a", "host-b"],
        "pids": [12, 13],
        "started": [100, 0],
        "pid_spaces": ["id-1", ""],
        "pid_space_of": [0, 1],
    },
    "world_size": 2,
}
_SERVER = {"id": "7" * 32, "job": None, "pid": 1, "host": "host-a", "secret": "file", "ended": False}


# --- groups


def _member(data: bytes) -> None:
    found = member_records.member(data, "rank 1")
    topology.format_cpu_list(found.place.cpus)
    placement.reading_order([found.place, placement.mine()], 1)


def _members() -> Sequence[bytes]:
    mine = {
        "process": asdict(this_process()) | {"host": "host", "machine": "id"},
        "unavailable": None,
        "failure": "no",
        "settings": ["", "0"],
        "build": "release 0.1.0, layout 1",
        "place": ["0-3,8", 0, None, 0],
        "address": "10.0.0.1:4242",
    }
    return [json.dumps(mine).encode()]


_ROW = ["all_reduce", 1024, False, True, "eager", 900]


def _tagged_message(data: bytes) -> None:
    """The head and the pieces of a message, of which the first byte says where they are cut."""
    cut = data[0] * 8 if data else 0
    message, tensor = HashStore(), torch.zeros(6, dtype=torch.int32)
    message.set("message/bytes", "16")
    message.set("message/1/0/3/0/0", data[1 : 1 + cut])  # type: ignore[arg-type]
    message.set("message/1/0/3/0/1", data[1 + cut :])  # type: ignore[arg-type]
    messages = StoreMessages(message, 0, 2)
    messages.within(messages.receive(tensor[1:5], 1, 3), 0.0)
    assert tensor[0] == 0
    assert tensor[5] == 0


def _announced(data: bytes) -> None:
    AnySource(_stored("sent/1/0", data), 0, 2, lambda *_: None)._has_sent(1)  # type: ignore[arg-type,return-value]


def _barrier(data: bytes) -> None:
    position = monitored_barrier._Position.decoded(data)
    assert 0 <= position.oldest <= position.current
    stored = BoundedStore(_stored("comm/monitored_barrier/0/decision", data), "", 1.0)
    assert monitored_barrier._Round(stored, 0, 2).is_decided()


def _group(data: bytes) -> None:
    wait = StoreWait("new_group", "making", RingGroup("group", (1,)), 0, 1.0)
    group_agreement.agree(BoundedStore(_stored("key/1", data), "", 1.0), "key", wait, 0, None, timedelta(seconds=1))


def _secret_file(data: bytes) -> None:
    found = authentication._Written.decoded(data[: authentication._MOST_FILE_BYTES])
    assert found is None or len(found.secret) == 32


DECODERS = (
    Decoder(
        "secret-file",
        _secret_file,
        (),
        lambda: [authentication._Written(1, "pid:[1]", _SECRET).encoded()],
        "json",
    ),
    Decoder(
        "record",
        _record,
        (LaunchError,),
        lambda: _sealed(_MINE.to_plain(), _OTHER.to_plain(), _PROBLEM.to_plain(), []),
        "json",
    ),
    Decoder(
        "signed-record", _signed_record, (LaunchError,), lambda: _sealed(_MINE.to_plain(), 1, secret=_SECRET), "json"
    ),
    Decoder(
        "verdict", _verdict, (LaunchError,), lambda: _sealed(_AGREED, {"kind": "LaunchError", "message": "no"}), "json"
    ),
    Decoder("greeting", _greeting, (LaunchError,), lambda: _sealed(_SERVER, {**_SERVER, "job": "1.0"}), "json"),
    Decoder("counter", lambda data: counted(_stored("ranks", data), "ranks"), (LaunchError,), lambda: [b"2", b"-1"]),
    Decoder("group-member", _member, (BackendUnavailableError,), _members, "json"),
    Decoder(
        "group-memory",
        lambda data: member_records.memory(data, "rank 0"),
        (BackendUnavailableError,),
        lambda: [json.dumps([7, 1234, [_ROW], False, "commctl tune"]).encode(), b'[-1, 0, [], false, ""]'],
        "json",
    ),
    Decoder(
        "group-problem",
        lambda data: member_records.problem(data, "rank 0"),
        (BackendUnavailableError,),
        lambda: [b"null", b'["memory", "not enough"]'],
        "json",
    ),
    Decoder(
        "tagged-message",
        _tagged_message,
        (RuntimeError,),
        lambda: [
            b"\x04" + bytes([16, *bytes(7), ONECCL_DTYPES[torch.int32], 0, 0, 0]) + bytes(range(16)),
            b"\x01" + bytes(11),
        ],
    ),
    Decoder("announced", _announced, (RuntimeError,), lambda: [b"3", b"x"], "text"),
    Decoder("barrier", _barrier, (), lambda: [b"open", b"given up", b"0 2"], "text"),
    Decoder("group-agreement", _group, (CommError,), lambda: [b"ready id\thost\t10.0.0.1:4242", b"no GPU"], "text"),
    Decoder(
        "cpu-list",
        lambda data: topology.parse_cpu_list(data.decode("latin-1")),
        (ArgumentError,),
        lambda: [b"0-3,8", b"1,3,5-7", b""],
        "text",
    ),
)
