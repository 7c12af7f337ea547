"""Error feedback: what an encoding loses is added to what is encoded next.

Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
DNNs", Interspeech 2014; why it converges: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", ICML 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from comm_collectives.compression.members import Members

__all__ = ["Feedback", "errors_of", "keep_error", "keep_own_errors", "own_errors"]


@dataclass
class Feedback:
    """The losses of the encodings of one tensor so far.

    Attributes:
        local: of what this rank sent, float32, as many elements as the tensor.
        reduced: of the sum that this rank sent to all, float32, as many elements as its slice.
        average: whether the result is an average, which ``reduced`` is of, too.
        nothing_lost: begin and end of a part of ``local`` that is known to be zero.
        members: of the last call, or of the state that was loaded; None where that says nothing of them.
    """

    local: torch.Tensor
    reduced: torch.Tensor
    average: bool = False
    nothing_lost: tuple[int, int] | None = None
    members: Members | None = None

    def move_to(self, device: torch.device) -> None:
        """Move the state to ``device``, that of its tensor; a saved one may come from another."""
        self.local, self.reduced = self.local.to(device), self.reduced.to(device)


def own_errors(feedback: Feedback | None, slices: Sequence[torch.Tensor], rank: int) -> torch.Tensor | None:
    """Return the part of ``feedback.local`` for this rank's slice, whose elements are added and not encoded.

    Returns:
        None where nothing is lost there, as after a first call. An earlier world may have encoded these elements.
    """
    if feedback is None:
        return None
    place = _place(slices, rank)
    if feedback.nothing_lost == place:
        return None
    feedback.nothing_lost = None
    return feedback.local[slice(*place)]


def keep_own_errors(feedback: Feedback | None, slices: Sequence[torch.Tensor], rank: int) -> None:
    """Note that what :func:`own_errors` returned was added and is zero now."""
    if feedback is not None:
        feedback.nothing_lost = _place(slices, rank)


def _place(slices: Sequence[torch.Tensor], rank: int) -> tuple[int, int]:
    begin = sum(one.numel() for one in slices[:rank])
    return begin, begin + slices[rank].numel()


def errors_of(feedback: Feedback | None, slices: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
    """Return the part of ``feedback.local`` for each slice."""
    if feedback is None:
        return None
    return torch.split(feedback.local, [one.numel() for one in slices])


def keep_error(values: torch.Tensor, decoded: torch.Tensor, error: torch.Tensor) -> None:
    """Overwrite ``error`` with what ``decoded`` lacks of ``values``, with 0 where that is not finite."""
    torch.sub(values, decoded, out=error)
    error.masked_fill_(~error.isfinite(), 0.0)
