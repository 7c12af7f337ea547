"""Collectives whose elements travel encoded, in pieces, so that encoding, transfer and decoding overlap.

Sums are made in float32, never in the format of the wire, and every rank gets the same bits. A tensor is cut into one
slice a rank. Each slice is sent to its owner, encoded; the owner adds those of the others to its own, which nobody has
encoded, in the order of their ranks; and the sum is sent to all, encoded once. This is the all_reduce of Tang et al.,
"1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML 2021, section 4, in
pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch

from comm_collectives.buffers import Buffers
from comm_collectives.compression.agreement import Agreement, sum_of_sizes
from comm_collectives.compression.feedback import Feedback, errors_of, keep_own_errors, own_errors
from comm_collectives.compression.link import Link, decode_into, sum_in
from comm_collectives.compression.two_ranks import all_reduce_of_two
from comm_collectives.memory import memory_view
from comm_utils.backend import Work
from comm_utils.errors import CollectiveMismatchError
from comm_utils.torch_support import factories

__all__ = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]

# Pieces whose parts are under way at the same time.
_DEPTH = 2


@dataclass
class _Piece:
    """A piece that is under way, and the memory that it needs until it has arrived."""

    place: slice
    work: Work
    sent: torch.Tensor
    received: torch.Tensor


def all_reduce(link: Link, elements: torch.Tensor, average: bool, feedback: Feedback | None) -> None:
    """Overwrite ``elements``, (n,), with their sum or average over all ranks."""
    size = link.slice_elements(elements.numel())
    begins = [min(rank * size, elements.numel()) for rank in range(link.size + 1)]
    slices = [elements[begin:end] for begin, end in pairwise(begins)]
    if link.size == 2:
        return all_reduce_of_two(link, slices, average, feedback)
    what = f"all_reduce{_of(average)} of {elements.numel()} {elements.dtype}"
    _reduce(link, slices, slices, average, feedback, what, True)


def reduce_scatter(
    link: Link, output: torch.Tensor, slices: Sequence[torch.Tensor], average: bool, feedback: Feedback | None
) -> None:
    """Overwrite ``output``, (m,), with the sum or average of this rank's entry of every rank's ``slices``."""
    counts = "x".join(str(one.numel()) for one in slices)
    targets = [output if rank == link.rank else output[:0] for rank in range(link.size)]
    _reduce(link, slices, targets, average, feedback, f"reduce_scatter{_of(average)} of {counts} {output.dtype}", False)


def _of(average: bool) -> str:
    return " (avg)" if average else ""


def _reduce(
    link: Link,
    slices: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    average: bool,
    feedback: Feedback | None,
    what: str,
    everywhere: bool,
) -> None:
    agreement = link.agree(what)
    mine, codec = slices[link.rank], link.codec
    pieces = link.pieces(max(one.numel() for one in slices), slices[0].device)
    errors, own_lost = errors_of(feedback, slices), own_errors(feedback, slices, link.rank)

    with Buffers(mine.device) as buffers:

        def send(place: slice) -> _Piece:
            rows = [link.wire_bytes(one[place].numel()) for one in slices]
            columns = [rows[link.rank]] * link.size
            sent, received = buffers.take(sum(rows)), buffers.take(sum(columns))
            at = 0
            if errors is not None:  # which an encoding takes from, so that it has to be sent
                agreement.check()
            for rank, one in enumerate(slices):
                source = one[place]
                if rank != link.rank and source.numel():
                    wire = sent[at : at + codec.encoded_bytes(source.numel())]
                    error = None if errors is None else errors[rank][place]
                    codec.encode(buffers.float32(source), wire, error)
                at += rows[rank]
            agreement.check()
            return _Piece(place, link.exchange(received, sent, rows, columns, len(set(rows)) == 1), sent, received)

        def add(one: _Piece) -> _Piece | None:
            place, received = one.place, one.received
            own = mine[place]
            target = targets[link.rank][place]
            total = sum_in(target, own, buffers)
            if own_lost is not None:
                total.add_(own_lost[place])
                own_lost[place].zero_()
            one.work.wait()
            step, size = link.wire_bytes(own.numel()), codec.encoded_bytes(own.numel())
            others = [rank * step for rank in range(link.size) if rank != link.rank and own.numel()]
            wires, divisor = [received[at : at + size] for at in others], link.size if average else 1
            if not everywhere:
                for wire in wires:
                    codec.decode(wire, total, add=True)
                if average:
                    total.div_(divisor)
                started = None
            else:
                longest = link.wire_bytes(slices[0][place].numel())
                wire, gathered = buffers.take(longest), buffers.take(longest * link.size)
                if own.numel():
                    error = None if feedback is None else feedback.reduced[place]
                    codec.decode_reduce_encode(wires, total, divisor, wire[:size], error)
                started = _Piece(place, link.gather(gathered, wire), wire, gathered)
            buffers.give_back(one.sent, received)
            if total is not target:
                target.copy_(total)
            return started

        def deliver(one: _Piece) -> None:
            one.work.wait()
            step = one.received.numel() // link.size
            for rank, target in enumerate(targets):
                if rank != link.rank:
                    decode_into(codec, one.received[rank * step :], target[one.place], buffers)
            buffers.give_back(one.sent, one.received)

        sending: deque[_Piece] = deque()
        gathering: deque[_Piece] = deque()
        for turn in range(len(pieces) + 2 * _DEPTH):
            if turn < len(pieces):
                sending.append(send(pieces[turn]))
            if sending and turn >= _DEPTH:
                summed = add(sending.popleft())
                if summed is not None:
                    gathering.append(summed)
            if gathering and turn >= 2 * _DEPTH:
                deliver(gathering.popleft())
        agreement.check()
        keep_own_errors(feedback, slices, link.rank)


def all_gather(link: Link, targets: Sequence[torch.Tensor], source: torch.Tensor) -> None:
    """Overwrite ``targets[r]``, (n,), with the ``source``, (n,), of rank r, as all ranks decode it."""
    what = f"all_gather of {source.numel()} {source.dtype} with {link.codec.describe()}"
    agreement, codec = Agreement(link.backend, link.group, what), link.codec
    with Buffers(source.device) as buffers:

        def send(place: slice) -> _Piece:
            own = source[place]
            wire = buffers.take(link.wire_bytes(own.numel()))
            gathered = buffers.take(wire.numel() * link.size)
            codec.encode(buffers.float32(own), wire[: codec.encoded_bytes(own.numel())])
            agreement.check()
            return _Piece(place, link.gather(gathered, wire), wire, gathered)

        for one in _overlapped(link.pieces(source.numel(), source.device), send):
            step = one.received.numel() // link.size
            for rank, target in enumerate(targets):
                decode_into(codec, one.received[rank * step :], target[one.place], buffers)
            buffers.give_back(one.sent, one.received)
        agreement.check()


def all_to_all(
    link: Link, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], least_bytes: int, gathers: bool
) -> bool:
    """Overwrite ``targets[r]`` with what rank r sends to this one: the entry for it of its ``sources``.

    Args:
        least_bytes: of W times the longest entry of all ranks, to be compressed.
        gathers: the entries of ``sources`` are all the same, and every rank gets what all decode.

    Returns:
        False, with nothing done, on all ranks, where that is smaller.

    Raises:
        CollectiveMismatchError: a rank sends another number of elements than the rank that gets them expects; on every
            rank, and before any element was sent.
    """
    dtype, codec = targets[0].dtype, link.codec
    sent, expected = [one.numel() for one in sources], [one.numel() for one in targets]
    # Nobody knows how much others exchange: all agree on the number of pieces.
    what, sums = f"all_to_all of {dtype} with {codec.describe()}", sum_of_sizes(link.rank, sent, expected)
    agreement = Agreement(link.backend, link.group, what, max(*sent, *expected), sums=sums)
    longest = agreement.largest()
    if not agreement.sizes_match:
        raise CollectiveMismatchError(_differing_sizes(link, sent, expected, sources[0].device))
    if longest * link.size * dtype.itemsize < least_bytes:
        return False

    def counts(tensors: Sequence[torch.Tensor], place: slice) -> list[int]:
        return [one[place].numel() for one in tensors]

    with Buffers(sources[0].device) as buffers:
        if gathers and link.size > 1:
            for place in link.pieces(longest, sources[0].device):
                part = sources[link.rank][place]
                wire = buffers.take(codec.encoded_bytes(part.numel()))
                if part.numel():
                    codec.encode(buffers.float32(part), wire)
                decode_into(codec, wire, targets[link.rank][place], buffers)
                buffers.give_back(wire)
        else:
            targets[link.rank].copy_(sources[link.rank])

        def send(place: slice) -> _Piece:
            rows = [0 if rank == link.rank else link.wire_bytes(n) for rank, n in enumerate(counts(sources, place))]
            columns = [0 if rank == link.rank else link.wire_bytes(n) for rank, n in enumerate(counts(targets, place))]
            sent, received = buffers.take(sum(rows)), buffers.take(sum(columns))
            at = 0
            for one, row in zip(sources, rows, strict=True):
                part = one[place]
                if row:
                    codec.encode(buffers.float32(part), sent[at : at + codec.encoded_bytes(part.numel())])
                at += row
            return _Piece(place, link.exchange(received, sent, rows, columns, False), sent, received)

        for arrived in _overlapped(link.pieces(longest, sources[0].device), send):
            at = 0
            for rank, target in enumerate(targets):
                part = target[arrived.place]
                if rank != link.rank and part.numel():
                    decode_into(codec, arrived.received[at:], part, buffers)
                    at += link.wire_bytes(part.numel())
            buffers.give_back(arrived.sent, arrived.received)
    return True


def _differing_sizes(link: Link, sent: Sequence[int], expected: Sequence[int], device: torch.device) -> str:
    """Return the text of an error that names the ranks whose sizes differ, from those of all ranks."""
    own = factories.tensor([sent, expected], dtype=torch.int64, device=device)
    every = own.new_empty(link.size, 2, link.size)
    link.gather(memory_view(every).view(torch.uint8), memory_view(own).view(torch.uint8)).wait()
    numbers, ranks = every.tolist(), link.backend.get_process_group_ranks(link.group)
    said = [
        f"rank {ranks[source]} sends {numbers[source][0][target]} elements to rank {ranks[target]}, which expects "
        f"{numbers[target][1][source]}"
        for source, target in product(range(link.size), repeat=2)
        if numbers[source][0][target] != numbers[target][1][source]
    ]
    return f"the ranks disagree about the sizes of an exchange, of which nothing was sent: {'; '.join(said[:4])}"


def _overlapped(pieces: Sequence[slice], send: Callable[[slice], _Piece]) -> Iterator[_Piece]:
    """Yield each piece once it has arrived, while the next ones are under way."""
    sending: deque[_Piece] = deque()
    for place in pieces:
        sending.append(send(place))
        if len(sending) > _DEPTH:
            sending[0].work.wait()
            yield sending.popleft()
    while sending:
        sending[0].work.wait()
        yield sending.popleft()
