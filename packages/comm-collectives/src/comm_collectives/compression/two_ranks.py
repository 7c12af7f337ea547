"""The compressed all_reduce of two ranks, in half as many exchanges.

As each rank has one other, a sum goes to it in the same message as a later piece: what an exchange costs on the
processor is paid half as often, and nothing is copied to make a rank receive from itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from comm_collectives.buffers import Buffers
from comm_collectives.compression.feedback import Feedback, errors_of, keep_own_errors, own_errors
from comm_collectives.compression.link import Link, decode_into, sum_in
from comm_utils.backend import Work

__all__ = ["all_reduce_of_two"]

# A sum goes so many exchanges after its piece: as many are under way while one is prepared.
_LAG = 2


@dataclass
class _Exchange:
    """An exchange that is under way, and the memory that it needs until it has arrived."""

    work: Work
    sent: torch.Tensor
    received: torch.Tensor
    #: Where the other's sum begins in ``received``.
    sum_at: int


def all_reduce_of_two(link: Link, slices: Sequence[torch.Tensor], average: bool, feedback: Feedback | None) -> None:
    """Overwrite ``slices``, two parts of a tensor, with their sum or average over both ranks.

    Args:
        slices: entry r is summed by rank r.
    """
    count, dtype = sum(one.numel() for one in slices), slices[0].dtype
    agreement, codec = link.agree(f"all_reduce{' (avg)' if average else ''} of {count} {dtype}"), link.codec
    peer, errors = 1 - link.rank, errors_of(feedback, slices)
    mine, others = slices[link.rank], slices[peer]
    own_lost = own_errors(feedback, slices, link.rank)
    pieces = link.pieces(max(mine.numel(), others.numel()))

    with Buffers(mine.device) as buffers:

        def encode(source: torch.Tensor, wire: torch.Tensor, error: torch.Tensor | None) -> None:
            if source.numel():
                codec.encode(buffers.float32(source), wire[: codec.encoded_bytes(source.numel())], error)

        def start(number: int) -> _Exchange:
            """Send piece ``number`` of the other's slice, and the sum of an earlier piece of this rank's."""
            place, sum_place = _at(pieces, number), _at(pieces, number - _LAG)
            rows = [link.wire_bytes(others[place].numel()), link.wire_bytes(mine[sum_place].numel())]
            columns = [link.wire_bytes(mine[place].numel()), link.wire_bytes(others[sum_place].numel())]
            sent, received = buffers.take(sum(rows)), buffers.take(sum(columns))
            if errors is not None:  # which an encoding takes from, so that it has to be sent
                agreement.check()
            encode(others[place], sent, None if errors is None else errors[peer][place])
            agreement.check()
            if number >= _LAG:
                earlier = under_way[0]
                earlier.work.wait()
                add(sum_place, earlier.received, sent[rows[0] :])
            sizes = [0, 0], [0, 0]
            sizes[0][peer], sizes[1][peer] = sum(rows), sum(columns)
            return _Exchange(link.exchange(received, sent, *sizes, False), sent, received, columns[0])

        def add(place: slice, received: torch.Tensor, wire: torch.Tensor) -> None:
            own = mine[place]
            if not own.numel():
                return
            total = sum_in(own, own, buffers)
            if own_lost is not None:
                total.add_(own_lost[place])
                own_lost[place].zero_()
            codec.decode(received[: codec.encoded_bytes(own.numel())], total, add=True)
            if average:
                total.div_(2)
            encode(total, wire, None if feedback is None else feedback.reduced[place])
            decode_into(codec, wire, own, buffers)

        under_way: deque[_Exchange] = deque()
        for number in range(len(pieces) + 2 * _LAG):
            if number < len(pieces) + _LAG:
                under_way.append(start(number))
            if number >= _LAG:
                arrived = under_way.popleft()
                arrived.work.wait()
                sum_place = _at(pieces, number - 2 * _LAG)
                decode_into(codec, arrived.received[arrived.sum_at :], others[sum_place], buffers)
                buffers.give_back(arrived.sent, arrived.received)
        agreement.check()
        keep_own_errors(feedback, slices, link.rank)


def _at(pieces: Sequence[slice], number: int) -> slice:
    """Return a piece, empty where there is none of this number."""
    return pieces[number] if 0 <= number < len(pieces) else slice(0, 0)
