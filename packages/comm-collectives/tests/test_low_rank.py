"""PowerSGD of one rank, whose factors have the rank of the matrix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from comm_collectives.compression.feedback import empty
from comm_collectives.compression.low_rank import LowRank, all_reduce
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
    all_reduce(lambda part: None, tensor, memory_view(tensor), False, 1, 3, state)
    torch.testing.assert_close(tensor, expected, rtol=1e-3, atol=1e-3)
