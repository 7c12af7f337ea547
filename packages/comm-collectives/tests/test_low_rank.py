"""PowerSGD of one rank, whose factors have the rank of the matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from comm_collectives.compression.feedback import empty
from comm_collectives.compression.low_rank import LowRank, LowRankReduction, memory_shape, stacked_shape
from comm_collectives.memory import memory_view

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row by row": lambda matrix: matrix.clone(),
    "column by column": lambda matrix: matrix.t().contiguous().t(),
    "with a dimension of one": lambda matrix: matrix.t().contiguous().t()[:, None],
    "channels last": lambda matrix: matrix.view(40, 15, 2, 2).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_matrix_of_low_rank_arrives_in_any_layout(layout: str) -> None:
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(40, 3, generator=generator) @ torch.randn(3, 60, generator=generator)
    tensor = LAYOUTS[layout](matrix)
    expected = tensor.clone()
    state = LowRank(empty(tensor.numel(), tensor.device), empty(0, tensor.device).view(0, 0))
    reduction = LowRankReduction(lambda part: None, memory_shape(tensor), False, 1, 3, state)
    reduction.all_reduce(memory_view(tensor))
    torch.testing.assert_close(tensor, expected, rtol=1e-3, atol=1e-3)


def new_state(count: int) -> LowRank:
    return LowRank(empty(count, torch.device("cpu")), empty(0, torch.device("cpu")).view(0, 0))


@pytest.mark.parametrize("width", [1, 3, 60])  # of 60, the factors would be no smaller
@pytest.mark.parametrize("counts", [[1200, 1200], [7, 0, 1391, 2, 1000], [0, 2400], [2400]])
def test_a_slice_is_that_of_the_whole(counts: list[int], width: int) -> None:
    source = torch.randn(2400, generator=torch.Generator().manual_seed(1))
    whole, shape, state = source.clone(), torch.Size([40, 60]), new_state(2400)
    LowRankReduction(lambda part: None, shape, True, 2, width, state).all_reduce(whole)
    for own, expected in enumerate(torch.split(whole, counts)):
        output, own_state = torch.empty(counts[own]), new_state(2400)

        def scatter(target: torch.Tensor, parts: Sequence[torch.Tensor], own: int = own) -> None:
            target.copy_(parts[own])

        slices = torch.split(source, counts)
        reduction = LowRankReduction(lambda part: None, shape, True, 2, width, own_state)
        reduction.reduce_scatter(scatter, output, slices, own)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(own_state.local, state.local)


def test_tensors_one_below_the_other_keep_their_rows() -> None:
    def stacked(*shapes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(stacked_shape([torch.Size(shape) for shape in shapes]))

    assert stacked((3, 4, 5), (2, 4, 5)) == (5, 4, 5)
    assert stacked((3, 4), (4, 3)) == (24,)
    assert stacked((3,), (4,)) == (7,)
    assert stacked((), ()) == (2,)
