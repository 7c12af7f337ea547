"""The compressed all_reduce of two ranks, in half as many exchanges.

As each rank has one other, a sum goes to it in the same message as a later piece: what an exchange costs on the
processor is paid half as often, and nothing is copied to make a rank receive from itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from comm_collectives.buffers import Buffers
from comm_collectives.compression import pace
from comm_collectives.compression.feedback import Feedback, errors_of, keep_own_errors, own_errors
from comm_collectives.compression.link import Link, decode_into, sum_in
from comm_utils.backend import Work

__all__ = ["all_reduce_of_two"]

# A sum goes so many exchanges after its piece: as many are under way while one is prepared.
_LAG = 2
# Receives of messages are posted so many exchanges ahead. gloo sends only what the other rank has announced
# to receive, and an announcement waits behind what this rank sends; so the link is idle where ranks are not in step.
_AHEAD = 1
# Bytes on the wire of a piece then.
_MESSAGE_BYTES = 1 << 19
_NO_MESSAGES = pace.Choice(messages=False, measured=False)


@dataclass
class _Exchange:
    """An exchange that is under way, and the memory that it needs until it has arrived."""

    works: Sequence[Work]
    sent: torch.Tensor
    received: torch.Tensor
    #: Where the other's sum begins in ``received``.
    sum_at: int

    def wait(self) -> float:
        """Return how long that took."""
        begun = time.perf_counter()
        for work in self.works:
            work.wait()
        return time.perf_counter() - begun


class _Collectives:
    """Starts exchanges as collectives.

    Args:
        sizes: bytes that each exchange receives.
    """

    def __init__(self, link: Link, sizes: Sequence[int], buffers: Buffers) -> None:
        self._link, self._sizes, self._buffers = link, sizes, buffers

    def start(self, number: int, sent: torch.Tensor) -> tuple[torch.Tensor, list[Work]]:
        received, peer = self._buffers.take(self._sizes[number]), 1 - self._link.rank
        rows, columns = [0, 0], [0, 0]
        rows[peer], columns[peer] = sent.numel(), received.numel()
        return received, [self._link.exchange(received, sent, rows, columns, False)]


class _Messages:
    """Starts exchanges as messages, whose receives are posted ahead."""

    def __init__(self, link: Link, sizes: Sequence[int], buffers: Buffers) -> None:
        self._link, self._sizes, self._buffers = link, iter(sizes), buffers
        self._posted: deque[tuple[torch.Tensor, list[Work]]] = deque()

    def start(self, number: int, sent: torch.Tensor) -> tuple[torch.Tensor, list[Work]]:
        peer = 1 - self._link.rank
        for size in islice(self._sizes, 1 + _AHEAD - len(self._posted)):
            received = self._buffers.take(size)
            self._posted.append((received, [self._link.receive(received, peer)] if size else []))
        received, works = self._posted.popleft()
        return received, [*works, *([self._link.send(sent, peer)] if sent.numel() else [])]


def all_reduce_of_two(link: Link, slices: Sequence[torch.Tensor], average: bool, feedback: Feedback | None) -> None:
    """Overwrite ``slices``, two parts of a tensor, with their sum or average over both ranks.

    Args:
        slices: entry r is summed by rank r.
    """
    count, dtype = sum(one.numel() for one in slices), slices[0].dtype
    codec, key = link.codec, (link.compression, count.bit_length())
    choice = _NO_MESSAGES
    if link.has_messages(slices[0].device):
        choice = pace.choose(link.group, key)
    what = f"all_reduce{' (avg)' if average else ''} of {count} {dtype}"
    agreement = link.agree(what, number=0 if choice.messages else 1)
    has_messages = any(choice) and agreement.largest() == 0  # on both ranks
    peer, errors = 1 - link.rank, errors_of(feedback, slices)
    mine, others = slices[link.rank], slices[peer]
    own_lost = own_errors(feedback, slices, link.rank)
    most = max(mine.numel(), others.numel())
    device = mine.device
    pieces = link.pieces(most, device, _MESSAGE_BYTES) if has_messages else link.pieces(most, device)
    exchanges = len(pieces) + _LAG
    received_bytes, waited_s, begun = 0, 0.0, time.perf_counter()

    with Buffers(mine.device) as buffers:

        def encode(source: torch.Tensor, wire: torch.Tensor, error: torch.Tensor | None) -> None:
            if source.numel():
                codec.encode(buffers.float32(source), wire[: codec.encoded_bytes(source.numel())], error)

        def wire_sizes(number: int, first: torch.Tensor, second: torch.Tensor) -> tuple[int, int]:
            """Return the bytes of a piece of one slice, and of the sum of an earlier piece of another."""
            place, sum_place = _at(pieces, number), _at(pieces, number - _LAG)
            return link.wire_bytes(first[place].numel()), link.wire_bytes(second[sum_place].numel())

        to_receive = [sum(wire_sizes(number, mine, others)) for number in range(exchanges)]
        transport = (_Messages if has_messages else _Collectives)(link, to_receive, buffers)

        def start(number: int) -> _Exchange:
            """Send piece ``number`` of the other's slice, and the sum of an earlier piece of this rank's."""
            nonlocal waited_s
            place, sum_place = _at(pieces, number), _at(pieces, number - _LAG)
            piece_bytes, sum_bytes = wire_sizes(number, others, mine)
            sent = buffers.take(piece_bytes + sum_bytes)
            if errors is not None:  # which an encoding takes from, so that it has to be sent
                agreement.check()
            encode(others[place], sent, None if errors is None else errors[peer][place])
            agreement.check()
            if number >= _LAG:
                earlier = under_way[0]
                waited_s += earlier.wait()
                add(sum_place, earlier.received, sent[piece_bytes:])
            received, works = transport.start(number, sent)
            return _Exchange(works, sent, received, wire_sizes(number, mine, others)[0])

        def add(place: slice, received: torch.Tensor, wire: torch.Tensor) -> None:
            own = mine[place]
            if not own.numel():
                return
            total = sum_in(own, own, buffers)
            if own_lost is not None:
                total.add_(own_lost[place])
                own_lost[place].zero_()
            size = codec.encoded_bytes(own.numel())
            reduced = None if feedback is None else feedback.reduced[place]
            codec.decode_reduce_encode([received[:size]], total, 2 if average else 1, wire[:size], reduced)
            if total is not own:
                own.copy_(total)

        under_way: deque[_Exchange] = deque()
        for number in range(exchanges + _LAG):
            if number < exchanges:
                under_way.append(start(number))
            if number >= _LAG:
                arrived = under_way.popleft()
                waited_s += arrived.wait()
                received_bytes += arrived.received.numel()
                sum_place = _at(pieces, number - 2 * _LAG)
                decode_into(codec, arrived.received[arrived.sum_at :], others[sum_place], buffers)
                buffers.give_back(arrived.sent, arrived.received)
        agreement.check()
        took_s, messages = time.perf_counter() - begun, has_messages if choice.measured else None
        pace.note(link.group, key, received_bytes, waited_s, took_s, messages)
        keep_own_errors(feedback, slices, link.rank)


def _at(pieces: Sequence[slice], number: int) -> slice:
    """Return a piece, empty where there is none of this number."""
    return pieces[number] if 0 <= number < len(pieces) else slice(0, 0)
