"""The elements of a tensor that one rank encodes in a collective in steps.

The ranks of a host add up what they have first, and each of them exchanges a share of every piece of that. Error
feedback keeps as many losses as there are elements of its shares, in the order of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from comm_collectives.compression.link import Sizes
from comm_collectives.hierarchy.layout import Layout
from comm_utils.torch_support import factories

__all__ = ["Range", "Shares"]


class Range(NamedTuple):
    """Neighbours in a tensor, ``[begin:end]``, which are ``encoded`` elements with the zeros after them."""

    begin: int
    end: int
    encoded: int


@dataclass(frozen=True)
class Shares:
    """The shares of one rank.

    Attributes:
        count: elements of the tensor.
        ranks_per_host: how many have their elements in a share.
        sent: what this rank sends of each piece, to be summed.
        summed: whose sum it sends, of each piece; a reduce_scatter sends none.
    """

    count: int
    ranks_per_host: int
    sent: tuple[tuple[Range, ...], ...]
    summed: tuple[Range, ...]

    @classmethod
    def of_all_reduce(cls, layout: Layout, sizes: Sizes, count: int, pieces: Iterable[slice]) -> Shares:
        """Return those of an all_reduce of ``count`` elements, of which ``sizes`` tell what hosts exchange."""
        sent, summed = [], []
        for piece in pieces:
            length = -(-(piece.stop - piece.start) // layout.ranks_per_host)
            begin, unit = piece.start + layout.local * length, sizes.slice_elements(length)
            own = min(sizes.rank * unit, length)
            sent.append((_range(begin, length, piece.stop),))
            summed.append(_range(begin + own, min(unit, length - own), piece.stop))
        return cls(count, layout.ranks_per_host, tuple(sent), tuple(summed))

    @classmethod
    def of_reduce_scatter(cls, layout: Layout, row: int, pieces: Iterable[slice]) -> Shares:
        """Return those of a reduce_scatter of one row of ``row`` elements for each rank, in pieces of a row."""
        rows = [ranks[layout.local] for ranks in layout.hosts]
        sent = tuple(
            tuple(_range(rank * row + piece.start, piece.stop - piece.start, (rank + 1) * row) for rank in rows)
            for piece in pieces
        )
        count = row * len(layout.hosts) * layout.ranks_per_host
        return cls(count, layout.ranks_per_host, sent, (Range(0, 0, 0),) * len(sent))

    @property
    def sent_counts(self) -> list[int]:
        """Elements of each piece that this rank encodes."""
        return [sum(one.encoded for one in ranges) for ranges in self.sent]

    @property
    def summed_counts(self) -> list[int]:
        """Elements of each piece whose sum it encodes."""
        return [one.encoded for one in self.summed]

    def whole(self, local: torch.Tensor, reduced: torch.Tensor, average: bool, world_size: int) -> torch.Tensor:
        """Return what an element of one rank's tensor has to be larger by to make losses good, (count,), float32.

        Args:
            local: of what this rank sent.
            reduced: of the sums that it sent.
            average: these are averages, over the ranks of a host and over all ``world_size``.
        """
        found = factories.zeros(self.count, dtype=torch.float32, device=local.device)
        every = [one for ranges in self.sent for one in ranges]
        for losses, ranges, scale in ((local, every, self.ranks_per_host), (reduced, self.summed, world_size)):
            for part, (begin, end, _) in zip(torch.split(losses, [one.encoded for one in ranges]), ranges, strict=True):
                found[begin:end].add_(part[: end - begin], alpha=scale if average else 1)
        return found

    def saved(self) -> dict[str, Any]:
        """Return what :meth:`loaded` takes."""
        return {
            "count": self.count,
            "ranks_per_host": self.ranks_per_host,
            "sent": [[list(one) for one in ranges] for ranges in self.sent],
            "summed": [list(one) for one in self.summed],
        }

    @classmethod
    def loaded(cls, saved: Mapping[str, Any]) -> Shares:
        """Return those of a saved state.

        Raises:
            KeyError, TypeError, ValueError: it is no such state.
        """
        sent = tuple(tuple(_loaded(one) for one in ranges) for ranges in saved["sent"])
        summed = tuple(_loaded(one) for one in saved["summed"])
        found = cls(int(saved["count"]), int(saved["ranks_per_host"]), sent, summed)
        for begin, end, encoded in (*(one for ranges in sent for one in ranges), *summed):
            if not 0 <= begin <= end <= min(found.count, begin + encoded):
                raise ValueError(f"elements {begin} to {end} of {found.count}, as {encoded}")
        return found


def _range(begin: int, count: int, stop: int) -> Range:
    return Range(min(begin, stop), min(begin + count, stop), count)


def _loaded(saved: Sequence[int]) -> Range:
    begin, end, encoded = map(int, saved)
    return Range(begin, end, encoded)
