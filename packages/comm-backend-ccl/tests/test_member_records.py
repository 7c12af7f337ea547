"""Records of a group's members and messages in its store, as another program may have written them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from comm_backend_ccl import member_records, store_messages
from comm_backend_ccl.any_source import AnySource
from comm_backend_ccl.store_messages import StoreMessages
from comm_utils.errors import BackendUnavailableError

MEMBER: dict[str, Any] = {
    "process": {"host": "node01", "machine": "id", "pid": 7},
    "unavailable": None,
    "failure": None,
    "settings": ["", "1"],
    "build": "release 0.1.0, layout 1",
    "place": ["0-3", 0, None, 0],
    "address": "10.0.0.1:4242",
}
ROW = ["all_reduce", 1024, False, True, "eager", 900]


def test_records_come_back() -> None:
    found = member_records.member(json.dumps(MEMBER).encode(), "rank 1")
    assert (found.process.host, found.process.pid, found.settings) == ("node01", 7, ["", "1"])
    assert (found.place.cpus, found.address) == ({0, 1, 2, 3}, "10.0.0.1:4242")
    memory = member_records.memory(json.dumps([5, 99, [ROW], True, "commctl tune"]).encode(), "rank 0")
    assert (memory.descriptor, memory.inode, memory.measures, memory.measured_by) == (5, 99, True, "commctl tune")
    assert [list(row) for row in memory.profile] == [ROW]
    assert member_records.problem(b"null", "rank 1") is None
    assert member_records.problem(b'["access", "why"]', "rank 1") == ("access", "why")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 10_000,
        b" " * (member_records.MOST_BYTES + 1),
        json.dumps({**MEMBER, "process": {**MEMBER["process"], "pid": -1}}).encode(),
        json.dumps({**MEMBER, "process": {**MEMBER["process"], "pid": 1 << 40}}).encode(),
        json.dumps({**MEMBER, "failure": 3}).encode(),
        json.dumps({**MEMBER, "settings": [None]}).encode(),
        json.dumps({**MEMBER, "address": 7}).encode(),
    ],
)
def test_what_no_member_writes_is_refused_with_its_name(text: bytes) -> None:
    for read in (member_records.member, member_records.memory):
        with pytest.raises(BackendUnavailableError, match="rank 1 of the group wrote the record") as caught:
            read(text, "rank 1 of the group")
        assert len(str(caught.value)) < 700


@pytest.mark.parametrize("found", [[5, -1, [], False, ""], [1 << 31, 0, [], False, ""], [5, 1, [[1]], False, ""], [5]])
def test_memory_that_no_member_has_is_refused(found: list[Any]) -> None:
    with pytest.raises(BackendUnavailableError, match="rank 0 wrote the record"):
        member_records.memory(json.dumps(found).encode(), "rank 0")


def receive(piece: bytes) -> torch.Tensor:
    """What a receive of four elements makes of a message, with the elements beside it."""
    tensor, store = torch.zeros(6, dtype=torch.uint8), HashStore()
    store.set("message/bytes", "4")
    sender = StoreMessages(store, 1, 2)
    sender.send(torch.arange(1, 5, dtype=torch.uint8), 0, 3)
    if piece:
        head = store.get("message/1/0/3/0/0")[:12]
        store.set("message/1/0/3/0/0", head[: len(piece)] if len(piece) < 4 else head + piece)  # type: ignore[arg-type]
    messages = StoreMessages(store, 0, 2)
    messages.within(messages.receive(tensor[1:5], 1, 3), 0.0)
    return tensor


def test_a_message_with_a_tag_arrives() -> None:
    assert receive(b"").tolist() == [0, 1, 2, 3, 4, 0]


@pytest.mark.parametrize(
    ("piece", "text"),
    [
        (b"x" * 5000, "found 5000 bytes in piece 0 of a message, where 4 are due, from rank 1 with tag 3"),
        (b"12345", "found 5 bytes in piece 0"),
        (b"x", "found 1 bytes at the head of a message from rank 1"),
    ],
)
def test_a_message_of_another_size_than_it_says_writes_nothing(piece: bytes, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        receive(piece)


class InterruptedStore(HashStore):
    """Let a signal handler raise once, when the method of this name has done its part."""

    interrupts = ""

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        self._interrupt("set")

    def add(self, key: str, amount: int) -> int:
        value = int(super().add(key, amount))
        self._interrupt("add")
        return value

    def _interrupt(self, method: str) -> None:
        if self.interrupts == method:
            self.interrupts = ""
            raise KeyboardInterrupt


@pytest.mark.parametrize("method", ["add", "set"])
def test_a_message_after_an_interrupted_one_arrives(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_messages, "_CHUNK_BYTES", 2)
    store, sent = InterruptedStore(), torch.arange(1, 5, dtype=torch.uint8)
    sender, receiver = StoreMessages(store, 1, 2), StoreMessages(store, 0, 2)
    store.interrupts = method
    with pytest.raises(KeyboardInterrupt):
        sender.send(sent, 0, 3)
    sender.send(sent, 0, 3)
    tensor = torch.zeros(4, dtype=torch.uint8)
    assert receiver.within(receiver.receive(tensor, 1, 3), 0.0)
    assert tensor.tolist() == sent.tolist()
    assert store.add("message/bytes", 0) == 0


def test_a_message_whose_announcement_was_interrupted_is_not_counted() -> None:
    store = InterruptedStore()
    sender = AnySource(store, 1, 2, lambda *_: None)
    store.interrupts = "set"
    with pytest.raises(KeyboardInterrupt):
        sender.announce(0)
    sender.announce(0)
    assert store.get("sent/1/0") == b"1"


def test_a_count_of_messages_that_is_none() -> None:
    store = HashStore()
    store.set("sent/1/0", "-3")
    with pytest.raises(RuntimeError, match="the store counts b'-3' messages from rank 1"):
        AnySource(store, 0, 2, lambda *_: None)._has_sent(1)  # type: ignore[arg-type,return-value]
