"""Ranges of flattened tensors as blocks."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_collectives.hooks.sharded.rectangles import rectangles


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_blocks_hold_the_range_once_in_order(shape: list[int], data: st.DataObject) -> None:
    numel = prod(shape)
    begin = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(begin, numel))
    whole = torch.arange(numel).view(shape)
    found = rectangles(shape, begin, end)
    parts = []
    for block in found:
        index = tuple(slice(first, first + size) for first, size in zip(block.offsets, block.sizes, strict=True))
        part = whole[index].flatten()
        assert part[0] == block.start
        parts.append(part)
    together = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    assert together.tolist() == list(range(begin, end))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_a_tensor_without_elements_is_one_block() -> None:
    assert rectangles((2, 0, 3), 0, 0) == [((0, 0, 0), (2, 0, 3), 0)]
    assert rectangles((2, 3), 3, 3) == []
