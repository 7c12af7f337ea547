"""Sums of elements that are scaled before they are added, and after: averages whose sum would leave a dtype's range."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from comm_collectives.work import After
from comm_utils.backend import Work

__all__ = ["Scaling"]


@dataclass(frozen=True)
class Scaling:
    """The factors of a sum.

    Attributes:
        before: what every rank multiplies its elements by before they are added, as torch's ``PREMUL_SUM`` does.
        after: what the sum is multiplied by.
    """

    before: float = 1.0
    after: float = 1.0

    def prescale(self, elements: torch.Tensor) -> torch.Tensor:
        """Multiply ``elements``, of a float or complex dtype, in place by what they are added with; return them."""
        return elements if self.before == 1 else elements.mul_(self.before)

    def finish(self, work: Work, result: torch.Tensor) -> Work:
        """Return the handle of a sum into ``result`` that is scaled in place once ``work`` is complete."""
        if self.after == 1:
            return work

        def scale() -> None:
            result.mul_(self.after)

        return After([work], scale, result)
