"""The pieces in which a compressed tensor travels."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comm_collectives.compression.link import Link, Sizes
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


@pytest.mark.parametrize("granularity", [1, 10, 24, 256])
def test_slices_begin_at_whole_units_of_a_codec_of_another_package(granularity: int) -> None:
    codec: Any = SimpleNamespace(granularity=granularity)
    counts = Sizes(codec, 3, 0).slices(900)
    assert sum(counts) == 900
    assert counts[0] % granularity == 0
    assert counts[0] % 16 == 0  # so that float32 of every slice are aligned


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


@pytest.mark.parametrize(("served_by_gloo", "longest"), [(False, 16 << 20), (True, 1 << 20)])
def test_pieces_are_longer_on_devices_that_have_a_library_of_their_own(served_by_gloo: bool, longest: int) -> None:
    """Where gloo serves them, another rank may have its tensor on the CPU, and has to cut it alike."""
    backend: Any = SimpleNamespace(
        get_world_size=lambda _: 2,
        get_rank=lambda _: 0,
        capabilities=lambda *_: SimpleNamespace(messages_from_host=served_by_gloo),
    )
    codec = make_codec("int8")
    found = Link(backend, None, codec).pieces(64 << 20, torch.device("meta"))
    assert 0.9 * longest < codec.encoded_bytes(found[0].stop) <= 1.1 * longest
