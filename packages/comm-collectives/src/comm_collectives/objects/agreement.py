"""Records that ranks exchange before any object is sent, so that either all of them continue or all raise.

Each rank sends one record: its call, whether and how much it sends, and what it accepts. The records show every rank
the same differences: other calls, objects that cannot be encoded, messages that are not accepted. A rank with an error
takes part in this exchange, so no rank is left waiting and the group stays usable.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

from comm_collectives.object_codec import (
    HEADER_BYTES,
    HOW_TO_ALLOW_PICKLE,
    ObjectDecodeError,
    ObjectExchangeError,
    is_pickled,
    object_policy,
)
from comm_collectives.objects.channel import INLINE_BYTES, Channel
from comm_utils import operations
from comm_utils.errors import CollectiveMismatchError, CommError
from comm_utils.reduce_op import ReduceOp

__all__ = ["FAILED", "MISUSED", "Misuse", "Offer", "agree", "check_offer", "record_of"]

# Changes with the meaning of the records.
_PROTOCOL = 2 << 32
# Calls of objects that no row of the table has.
_OTHER_CALLS = ("log_summary", "start_trace", "stop_trace")
# Sizes that are none: what it has cannot be sent; its own arguments are wrong.
FAILED, MISUSED = -1, -2
_PICKLED, _UNPICKLES = 1, 2
_MOST_CALLS_NAMED, _MOST_RANKS_NAMED = 4, 16


class Misuse(Exception):
    """Holds the error about this rank's own arguments until the other ranks know that there is one."""

    def __init__(self, error: CommError) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True)
class Offer:
    """The content of one rank's record.

    Attributes:
        call: which function, in which release of the protocol.
        root: group rank of the one source or destination, -1 where there is none.
        detail: what else must be the same everywhere, such as the length of a list.
        size: bytes of the largest message it sends; FAILED if it cannot, MISUSED if it was called wrongly.
        flags: whether that is pickled, and whether it unpickles what it receives.
        max_bytes: the largest message it accepts.
        message: what it sends; None where that does not fit into a record and is still to come.
    """

    call: int
    root: int
    detail: int
    size: int
    flags: int
    max_bytes: int
    message: memoryview | None = field(default=None, kw_only=True)

    @property
    def pickled(self) -> bool:
        return bool(self.flags & _PICKLED)

    @property
    def unpickles(self) -> bool:
        return bool(self.flags & _UNPICKLES)

    def described(self) -> str:
        """Return the call, as in ``gather_object (root 1)``."""
        name = _names().get(self.call - _PROTOCOL, "something else")
        root = f"root {self.root}" if self.root >= 0 else ""
        facts = ", ".join(filter(None, (root, self._described_detail(name))))
        return f"{name} ({facts})" if facts else name

    def _described_detail(self, name: str) -> str:
        if name in ("broadcast_object_list", "send_object_list"):
            return f"length {self.detail}"
        if name == "reduce_object":
            op = next((op for op in ReduceOp if op.value == self.detail), None)
            return f"op {op.name.lower()!r}" if op is not None else "a function as op"
        return ""


def _number(call: str) -> int:
    """Return the number of a call in records; allgather_object and all_gather_object have the same."""
    return crc32(call.replace("_", "").encode())


@functools.cache
def _names() -> dict[int, str]:
    names = [row.name for row in operations.rows()]
    return {_number(name): name for name in (*sorted(names, reverse=True), *_OTHER_CALLS)}


def record_of(
    call: str,
    root: int,
    detail: int,
    messages: Sequence[bytearray] | None,
    allow_pickle: bool,
    failure: Exception | None = None,
) -> tuple[int, ...]:
    """Return this rank's record.

    Args:
        messages: what it sends, empty if nothing; None if it should send and cannot.
        failure: why it cannot go on.
    """
    size = FAILED if messages is None else max(map(len, messages), default=0)
    if isinstance(failure, Misuse):
        size = MISUSED
    flags = (_PICKLED if messages and any(map(is_pickled, messages)) else 0) | (_UNPICKLES if allow_pickle else 0)
    return (_PROTOCOL + _number(call), root, detail, size, flags, object_policy().max_bytes)


def agree(
    channel: Channel,
    record: Sequence[int],
    message: bytearray | None,
    failure: Exception | None,
    root: int,
    to_root: bool = False,
) -> list[Offer]:
    """Exchange records; return when every message can be sent and will be accepted, else raise, on every rank.

    Args:
        record: this rank's, from :func:`record_of`.
        message: what this rank sends; None if nothing, or a part for each rank.
        failure: why this rank cannot send, or a :class:`Misuse`.
        root: the one sender, the one receiver where ``to_root``; -1 where every rank is both.

    Raises:
        Exception: ``failure``.
        CollectiveMismatchError: ranks called different functions, or with different roots or lengths.
        ObjectExchangeError: another rank cannot send, or does not accept.
        ObjectDecodeError: this rank does not accept.
    """
    if isinstance(failure, Misuse):
        failure = failure.error
    if channel.W == 1:
        if failure is not None:
            raise failure
        return [Offer(*record, message=None if message is None else memoryview(message))]
    offers = [_offer(*received) for received in channel.exchange(record, message or b"")]
    if failure is not None:
        raise failure
    _check_used(channel, offers)
    _check_same(channel, offers)
    every = range(channel.W)
    senders = every if root < 0 or to_root else [root]
    receivers = [root] if to_root else every
    _check_sent(channel, offers, senders)
    _check_accepted(channel, offers, senders, receivers)
    return offers


def _offer(numbers: Sequence[int], inline: memoryview) -> Offer:
    offer = Offer(*numbers)
    return replace(offer, message=inline[: offer.size]) if 0 < offer.size <= INLINE_BYTES else offer


def check_offer(offered: Offer, receiver: Offer) -> str | None:
    """Return why ``receiver`` does not accept a message; None if it does."""
    if offered.size < HEADER_BYTES:
        return f"an impossible {offered.size} bytes"
    if offered.size > receiver.max_bytes:
        return (
            f"{offered.size} bytes where at most {receiver.max_bytes} are accepted (configuration key "
            "objects.max_bytes, environment variable COMM_OBJECTS__MAX_BYTES)"
        )
    if offered.pickled and not receiver.unpickles:
        return (
            "a pickled object, by which it could run any code on the receiving rank, and that rank does not allow it; "
            f"if every rank is trusted, allow it there with {HOW_TO_ALLOW_PICKLE}"
        )
    return None


def _check_same(channel: Channel, offers: Sequence[Offer]) -> None:
    callers: dict[tuple[int, int, int], list[int]] = {}
    for rank, offer in enumerate(offers):
        callers.setdefault((offer.call, offer.root, offer.detail), []).append(rank)
    if len(callers) > 1:
        called = [
            f"{_named([channel.ranks[rank] for rank in ranks])} called {offers[ranks[0]].described()}"
            for ranks in callers.values()
        ]
        if len(called) > _MOST_CALLS_NAMED:
            called[_MOST_CALLS_NAMED:] = [f"{len(called) - _MOST_CALLS_NAMED} more calls differ"]
        raise CollectiveMismatchError(f"{channel.call}: {', '.join(called)}; every rank must call the same")


def _check_used(channel: Channel, offers: Sequence[Offer]) -> None:
    misused = [channel.ranks[rank] for rank, offer in enumerate(offers) if offer.size == MISUSED]
    if misused:
        raise ObjectExchangeError(
            f"{channel.call}: {_named(misused)} called with a wrong argument; see the error there. No object was "
            "delivered, and the group stays usable"
        )


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_MOST_RANKS_NAMED]))
    return f"ranks {shown}{'' if len(ranks) <= _MOST_RANKS_NAMED else f' and {len(ranks) - _MOST_RANKS_NAMED} more'}"


def _check_sent(channel: Channel, offers: Sequence[Offer], senders: Sequence[int]) -> None:
    failed = [channel.ranks[rank] for rank in senders if offers[rank].size == FAILED]
    if failed:
        raise ObjectExchangeError(
            f"{channel.call}: {_named(failed)} could not send an object; see the error there. No object was "
            "delivered and the group stays usable"
        )


def _check_accepted(
    channel: Channel, offers: Sequence[Offer], senders: Sequence[int], receivers: Sequence[int]
) -> None:
    strictest = replace(
        offers[receivers[0]],
        flags=_UNPICKLES if all(offers[rank].unpickles for rank in receivers) else 0,
        max_bytes=min(offers[rank].max_bytes for rank in receivers),
    )
    if all(check_offer(offers[sender], strictest) is None for sender in senders):
        return
    refusals = [
        (receiver, sender, reason)
        for receiver in receivers
        for sender in senders
        if receiver != sender and (reason := check_offer(offers[sender], offers[receiver])) is not None
    ]
    for receiver, sender, reason in sorted(refusals, key=lambda refusal: refusal[0] != channel.rank):
        rank, source = channel.ranks[receiver], channel.ranks[sender]
        if receiver == channel.rank:
            raise ObjectDecodeError(f"{channel.call}: rank {source} sends {reason}; no object was delivered")
        raise ObjectExchangeError(
            f"{channel.call}: rank {rank} does not accept what rank {source} sends: {reason}; no object was delivered"
        )
