"""Error feedback: what an encoding loses is added to what is encoded next.

Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
DNNs", Interspeech 2014; why it converges: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", ICML 2019.
"""

from __future__ import annotations

import torch

__all__ = ["keep_error"]


def keep_error(values: torch.Tensor, decoded: torch.Tensor, error: torch.Tensor) -> None:
    """Overwrite ``error`` with what ``decoded`` lacks of ``values``, with 0 where that is not finite."""
    torch.sub(values, decoded, out=error)
    error.masked_fill_(~error.isfinite(), 0.0)
