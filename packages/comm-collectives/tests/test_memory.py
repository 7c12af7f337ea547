"""Views of memory, against looking at where every single element lies."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from comm_collectives.memory import (
    StagingBuffer,
    as_bytes,
    contiguous_elements,
    copy_back,
    copy_if_overlapping,
    is_dense,
    memory_view,
    overlapping,
)

ROOM = 4000
SHAPES = st.lists(st.integers(0, 4), max_size=4)


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any strides, also ones with gaps and overlaps, somewhere in a larger memory."""
    shape = draw(SHAPES)
    strides = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 9, 12, 16, 24]), min_size=len(shape), max_size=4))
    return torch.arange(ROOM).as_strided(shape, strides[: len(shape)], draw(st.integers(0, 5)))


@st.composite
def dense(draw: st.DrawFn, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor whose dimensions lie in memory in any order."""
    shape = draw(SHAPES)
    order = draw(st.permutations(range(len(shape))))
    offset = draw(st.integers(0, 5))
    memory = torch.arange(ROOM).to(dtype)[offset : offset + math.prod(shape)]
    back = [order.index(dim) for dim in range(len(shape))]
    return memory.view([shape[dim] for dim in order]).permute(back)


def places(tensor: torch.Tensor) -> list[int]:
    """Where the elements lie, in logical order, counted in elements from the start of the storage."""
    steps = [
        range(0, size * stride, stride) if stride else [0] * size
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return [tensor.storage_offset() + sum(step) for step in itertools.product(*steps)]


@settings(deadline=None)
@given(st.one_of(strided(), dense()))
def test_dense_is_every_place_of_a_stretch_once(tensor: torch.Tensor) -> None:
    taken = sorted(places(tensor))
    assert is_dense(tensor) == (taken == list(range(taken[0], taken[0] + len(taken))) if taken else True)


def test_known_layouts() -> None:
    image = torch.zeros(2, 3, 4, 5)
    assert is_dense(image.to(memory_format=torch.channels_last))
    assert is_dense(image.mT)
    assert is_dense(torch.zeros(()))
    assert not is_dense(image[..., ::2])
    assert not is_dense(image[:, 1])
    assert not is_dense(torch.zeros(1, 3).expand(2, 3))


@settings(deadline=None)
@given(dense())
def test_flat_is_the_memory_itself(tensor: torch.Tensor) -> None:
    line = memory_view(tensor)
    assert line.shape == (tensor.numel(),)
    assert line.stride() == (1,)
    # The elements are their own places.
    assert line.tolist() == sorted(places(tensor))
    line.fill_(-1)
    assert (tensor == -1).all()


@settings(deadline=None)
@given(st.one_of(strided(), dense()))
def test_readable_is_in_logical_order(tensor: torch.Tensor) -> None:
    before = tensor.clone()
    line = contiguous_elements(tensor)
    assert line.stride() == (1,)
    assert line.tolist() == places(tensor)
    assert (line.data_ptr() == tensor.data_ptr()) == tensor.is_contiguous() or not tensor.numel()
    assert torch.equal(tensor, before)


def test_readable_resolves_what_is_lazy() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    assert contiguous_elements(numbers.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert contiguous_elements(numbers.conj().imag).tolist() == [-2.0, 4.0]
    assert not contiguous_elements(numbers.conj()).is_conj()
    assert not contiguous_elements(numbers.conj().imag).is_neg()


@pytest.mark.parametrize("view", [memory_view, contiguous_elements])
def test_views_are_apart_from_autograd(view: Any) -> None:
    leaf = torch.ones(2, 3, requires_grad=True)
    line = view(leaf)
    assert not line.requires_grad
    line.zero_()
    assert leaf.tolist() == [[0.0] * 3] * 2
    assert leaf._version == line._version


@settings(deadline=None)
@given(st.one_of(strided(), dense()), st.booleans())
def test_bytes_are_the_same_memory(tensor: torch.Tensor, native: bool) -> None:
    line = contiguous_elements(tensor)
    moved = as_bytes(line, frozenset({tensor.dtype} if native else ()))
    if native:
        assert moved is line
        return
    assert moved.dtype == torch.uint8
    assert moved.numel() == 8 * tensor.numel()
    assert moved.data_ptr() == line.data_ptr()
    assert moved.view(tensor.dtype).tolist() == line.tolist()


@settings(deadline=None)
@given(dense(), st.booleans())
def test_landing_puts_what_arrives_in_logical_order(tensor: torch.Tensor, twice: bool) -> None:
    buffer = StagingBuffer(tensor)
    assert buffer.memory.shape == (tensor.numel(),)
    arrived = torch.arange(tensor.numel()) * 7 + 1
    buffer.memory.copy_(arrived)
    finish = copy_back([buffer])
    # In place where the logical order is the one of the memory, and then there is nothing to do.
    assert (finish is None) == tensor.is_contiguous()
    for _ in range(1 + twice):
        buffer.copy_back()
        if finish is not None:
            finish()
    assert tensor.flatten().tolist() == arrived.tolist()


def test_landings_finish_together() -> None:
    tensors = [torch.zeros(2, 3), torch.zeros(2, 3).mT, torch.zeros(3, 2).mT]
    buffers = [StagingBuffer(tensor) for tensor in tensors]
    for number, buffer in enumerate(buffers):
        buffer.memory.fill_(number + 1)
    finish = copy_back(buffers)
    assert [tensor.sum().item() for tensor in tensors] == [6, 0, 0]
    assert finish is not None
    finish()
    assert [tensor.sum().item() for tensor in tensors] == [6, 12, 18]


def test_landing_on_a_leaf_of_autograd() -> None:
    leaf = torch.zeros(3, 2).mT.requires_grad_()
    buffer = StagingBuffer(leaf)
    buffer.memory.fill_(5)
    buffer.copy_back()
    assert leaf.tolist() == [[5.0] * 3] * 2
    assert leaf.is_leaf


SLICES = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda ends: slice(min(ends), max(ends)))


@example(slice(0, 3), slice(3, 6), None)
@example(slice(3, 6), slice(0, 3), None)
@given(SLICES, SLICES, st.one_of(st.none(), st.integers(0, 12)))
def test_apart_copies_what_would_be_overwritten(read: slice, write: slice, own_slot: int | None) -> None:
    memory = torch.arange(12)
    source, written = memory[read], memory[write]
    found = copy_if_overlapping(source, written, own_slot)
    shared = set(range(12)[read]) & set(range(12)[write])
    in_its_slot = own_slot is not None and read.start == write.start + own_slot
    assert (found is source) == (not shared or in_its_slot)
    assert torch.equal(found, source)
    if found is not source:
        written.fill_(-1)
        assert found.tolist() == list(range(12)[read])


# Neighbours touch, and share nothing: too rare among random ones.
@example([slice(0, 3), slice(3, 6)])
@given(st.lists(SLICES, max_size=4))
def test_overlapping_is_any_element_in_two(slices: list[slice]) -> None:
    memory = torch.arange(12)
    taken = [place for part in slices for place in range(12)[part]]
    assert overlapping([memory[part] for part in slices]) == (len(taken) != len(set(taken)))
