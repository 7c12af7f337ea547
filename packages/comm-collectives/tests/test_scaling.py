"""The factors of sums, which gradients and averages between hosts share."""

from __future__ import annotations

import pytest
import torch

from comm_collectives.hooks import GradientReduction
from comm_collectives.reduction import Scaling
from comm_collectives.work import Completed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_sum_is_scaled_in_place_before_and_after(dtype: torch.dtype) -> None:
    elements, scaling = torch.full((3,), 8.0, dtype=dtype), Scaling(0.25, 3.0)
    assert scaling.prescale(elements) is elements
    assert elements.tolist() == [2.0] * 3
    work = scaling.finish(Completed(elements), elements)
    assert elements.tolist() == [2.0] * 3  # not before the sum is complete
    work.wait()
    assert elements.tolist() == [6.0] * 3
    assert work.result() is elements


def test_a_factor_of_one_touches_nothing() -> None:
    elements = torch.ones(3)
    version, work = elements._version, Completed(elements)
    assert Scaling().prescale(elements) is elements
    assert Scaling().finish(work, elements) is work
    assert elements._version == version


def test_gradients_are_scaled_as_their_reduction_says() -> None:
    assert GradientReduction("sum", predivide_factor=4.0).scaling() == Scaling(0.25, 4.0)
