"""The pieces in which a compressed tensor travels."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from comm_collectives.compression.link import Link
from comm_collectives.compression.registry import make_codec
from comm_collectives.pieces import pieces as cut

CODECS = [
    ("fp16", {}),
    ("int8", {}),
    ("int8", {"block_size": 64}),
    ("int4", {"block_size": 176}),
    ("onebit", {}),
    ("onebit", {"block_size": 48}),
    ("topk", {}),
]
COUNTS = [0, 1, 63, 1000, 100_003, 1 << 18, 1 << 20, (1 << 20) + 1, 5_000_000, 8 << 20]


def pieces(name: str, options: dict[str, int], count: int) -> tuple[Link, list[slice]]:
    link = object.__new__(Link)  # of no group
    link.codec = make_codec(name, **options)
    return link, link.pieces(count, torch.device("cpu"))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("name", "options"), CODECS)
def test_they_cover_the_tensor_in_whole_blocks(name: str, options: dict[str, int], count: int) -> None:
    link, found = pieces(name, options, count)
    assert [one.start for one in found] == [0, *(one.stop for one in found[:-1])][: len(found)]
    assert (found[-1].stop if found else 0) == count
    assert all(one.start % link.codec.granularity == 0 and one.stop > one.start for one in found)
    # As many bytes as the tensor at once, but for what aligns pieces.
    bytes_of_pieces = sum(link.codec.encoded_bytes(one.stop - one.start) for one in found)
    assert bytes_of_pieces <= link.codec.encoded_bytes(count) + 16 * len(found)


@pytest.mark.parametrize(("name", "options"), CODECS)
def test_the_last_are_short(name: str, options: dict[str, int]) -> None:
    lengths = [one.stop - one.start for one in pieces(name, options, 8 << 20)[1]]
    assert lengths[0] == max(lengths)
    assert max(lengths) >= 7 * lengths[-2]
    assert all(earlier >= later for earlier, later in pairwise(lengths))


def test_of_a_short_tensor_half_travels_first() -> None:
    lengths = [one.stop - one.start for one in pieces("fp16", {}, 1 << 18)[1]]
    assert lengths[0] == 1 << 17


def test_where_the_first_is_short_the_next_are_longer() -> None:
    lengths = [one.stop - one.start for one in cut(1000, 2, longest=200, shortest=20, first=20)]
    assert lengths == [20, 40, 80, 160, 200, 200, 150, 76, 38, 20, 16]
