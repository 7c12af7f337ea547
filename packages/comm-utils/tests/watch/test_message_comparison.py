"""Messages are compared with what their receivers expect, as far as their numbers tell which belong together."""

from __future__ import annotations

import pytest

from comm_utils.errors import CollectiveMismatchError
from comm_utils.testing.ring import Ring
from comm_utils.watch import message_comparison
from comm_utils.watch.message_comparison import MessageComparison
from comm_utils.watch.trouble import Trouble
from comm_utils.watch.world_view import WorldView


class Pair:
    """Rank 0, which compares, and the others, which it can see."""

    def __init__(self, records: int = 1024, world_size: int = 2) -> None:
        self.rings = [Ring(rank, records, world_size) for rank in range(world_size)]
        for ring in self.rings:
            ring.group()
        view = WorldView(0, world_size, self.rings[0].reader)
        self.comparison = MessageComparison(view, self.rings[0].reader, ())
        view.local.readers.update({rank: ring.reader for rank, ring in enumerate(self.rings) if rank})

    def send(self, source: int, target: int, sent: int, received: int, tag: int = 0, **other: str) -> None:
        """Record a message on both sides."""
        self.rings[source].call("send", sent, peer=target, tag=tag)
        self.rings[target].call("recv", received, peer=source, tag=tag, **other)

    def found(self, everything: bool = False) -> list[Trouble]:
        assert self.rings[0].reader
        return [trouble for _, trouble in self.comparison.look(everything)]


def test_equal_messages_are_right() -> None:
    pair = Pair()
    for number in range(1, 50):
        pair.send(0, 1, number, number, tag=number % 3)
        pair.send(1, 0, 2 * number, 2 * number)
        assert pair.found() == []
    pair.rings[0].call("send", 7, peer=1)  # its receive is still to come
    assert pair.found() == []


def test_the_first_that_differs_is_named_to_both_ends() -> None:
    for source, target in ((0, 1), (1, 0)):
        pair = Pair()
        pair.send(source, target, 3, 3)
        pair.send(source, target, 10, 20)
        pair.send(source, target, 3, 3)
        (trouble,) = pair.found()
        assert trouble.kind is CollectiveMismatchError
        assert trouble.ranks == (0, 1)
        assert f"message 2 from rank {source} to rank {target}" in trouble.text
        assert "send(10 elements of float32" in trouble.text
        assert "recv(20 elements of float32" in trouble.text


def test_a_message_that_may_be_moving_is_reported_a_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.rings[0].call("send", 10, peer=1)
    pair.rings[1].begin("recv", 20, peer=0)
    assert pair.found() == pair.found() == []
    monkeypatch.setattr(message_comparison, "_MOVES_NS", 0)
    (trouble,) = pair.found()  # though neither has made a call since
    assert "send(10 elements of float32" in trouble.text
    monkeypatch.undo()
    assert pair.found(everything=True) == [trouble]  # as the world ends


def test_dtypes_and_tags() -> None:
    pair = Pair()
    pair.send(0, 1, 4, 4, tag=1)
    pair.send(0, 1, 4, 4, tag=2**33, dtype="int32")
    (trouble,) = pair.found()
    assert f"tag {2**33}" in trouble.text
    assert "of int32" in trouble.text


def test_who_has_received_from_any_rank_is_not_compared() -> None:
    pair = Pair()
    pair.rings[1].call("send", 1, peer=0)
    pair.rings[0].call("recv", 1, peer=-1)
    pair.send(1, 0, 2, 2)
    pair.send(1, 0, 3, 3)
    assert pair.found() == []
    pair.send(0, 1, 2, 3)
    assert [trouble.ranks for trouble in pair.found()] == [(0, 1)]


def test_what_was_overwritten() -> None:
    pair = Pair(records=64)
    pair.send(0, 1, 2, 3)
    for _ in range(100):
        pair.send(0, 1, 4, 4)
    (trouble,) = pair.found()
    assert "at or before message" in trouble.text


def test_a_sender_far_ahead_is_compared_at_the_end() -> None:
    pair = Pair()
    pair.send(0, 1, 2, 3)
    pair.rings[0].call("send", 4, times=600, peer=1)
    assert pair.found() == []
    assert len(pair.found(everything=True)) == 1


def test_all_ranks_have_their_turn() -> None:
    count = 3 * message_comparison._PEERS_AT_ONCE
    pair = Pair(world_size=count + 1)
    for rank in range(1, count + 1):
        pair.send(0, rank, 1, 2 if rank == count else 1)
    found = [trouble for _ in range(3) for trouble in pair.found()]
    assert [trouble.ranks for trouble in found] == [(0, count)]
