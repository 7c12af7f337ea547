"""What ranks tell each other before any object moves, so that all of them go on or all of them raise.

Every rank sends one record: what it called, whether and how much it sends, and what it accepts. The records show every
rank the same: who called something else, who could not encode its object, who would not accept whose message. A rank
that cannot go on takes part in this exchange, so nobody is left waiting and the group stays usable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from comm_collectives.object_codec import (
    HEADER_BYTES,
    HOW_TO_ALLOW_PICKLE,
    ObjectDecodeError,
    ObjectExchangeError,
    is_pickled,
    object_policy,
)
from comm_collectives.objects.channel import INLINE_BYTES, Channel
from comm_utils.errors import CollectiveMismatchError

__all__ = ["FAILED", "Offer", "agree", "check_offer", "record_of"]

# Changes with the meaning of the records.
_PROTOCOL = 1 << 32
# Positions are part of the protocol.
_CALLS = (
    "all_gather_object",
    "broadcast_object",
    "broadcast_object_list",
    "gather_object",
    "reduce_object",
    "scatter_object_list",
    "send_object_list",
)
_SAME_AS = {"allgather_object": "all_gather_object"}
FAILED = -1
_PICKLED, _UNPICKLES = 1, 2


@dataclass(frozen=True)
class Offer:
    """What one rank's record says.

    Attributes:
        call: which function, in which release of the protocol.
        root: group rank of the one source or destination, -1 where there is none.
        detail: what else must be the same everywhere, such as the length of a list.
        size: bytes of the largest message it sends; FAILED if it cannot.
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
        """The call, as in ``gather_object (root 1)``."""
        number = self.call - _PROTOCOL
        name = _CALLS[number] if 0 <= number < len(_CALLS) else "something else"
        root = f"root {self.root}" if self.root >= 0 else ""
        detail = f"detail {self.detail}" if self.detail else ""
        facts = ", ".join(filter(None, (root, detail)))
        return f"{name} ({facts})" if facts else name


def record_of(
    call: str, root: int, detail: int, messages: Sequence[bytearray] | None, allow_pickle: bool
) -> tuple[int, ...]:
    """This rank's record.

    Args:
        messages: what it sends, empty if nothing; None if it should send and cannot.
    """
    size = FAILED if messages is None else max(map(len, messages), default=0)
    flags = (_PICKLED if messages and any(map(is_pickled, messages)) else 0) | (_UNPICKLES if allow_pickle else 0)
    return (_PROTOCOL + _CALLS.index(_SAME_AS.get(call, call)), root, detail, size, flags, object_policy().max_bytes)


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
        failure: why this rank cannot send.
        root: the one sender, the one receiver where ``to_root``; -1 where every rank is both.

    Raises:
        Exception: ``failure``.
        CollectiveMismatchError: ranks called different functions, or with different roots or lengths.
        ObjectExchangeError: another rank cannot send, or does not accept.
        ObjectDecodeError: this rank does not accept.
    """
    if channel.W == 1:
        if failure is not None:
            raise failure
        return [Offer(*record, message=None if message is None else memoryview(message))]
    offers = [_offer(*received) for received in channel.exchange(record, message or b"")]
    if failure is not None:
        raise failure
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
    """Why ``receiver`` does not accept a message; None if it does."""
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
    mine = offers[channel.rank]
    same = (mine.call, mine.root, mine.detail)
    others = [rank for rank, offer in enumerate(offers) if (offer.call, offer.root, offer.detail) != same]
    if others:
        raise CollectiveMismatchError(
            f"{channel.call}: rank {channel.ranks[channel.rank]} called {mine.described()}, rank "
            f"{channel.ranks[others[0]]} called {offers[others[0]].described()}; every rank must call the same"
        )


def _check_sent(channel: Channel, offers: Sequence[Offer], senders: Sequence[int]) -> None:
    failed = [channel.ranks[rank] for rank in senders if offers[rank].size == FAILED]
    if failed:
        names = f"ranks {', '.join(map(str, failed))}" if len(failed) > 1 else f"rank {failed[0]}"
        raise ObjectExchangeError(
            f"{channel.call}: {names} could not send an object, as the error there says; no object was delivered and "
            "the group stays usable"
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
