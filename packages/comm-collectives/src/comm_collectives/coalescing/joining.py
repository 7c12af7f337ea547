"""A call with tensors that are joined in one, in memory of the library's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from comm_collectives.compression.states import owned_by
from comm_utils.torch_support.passed_tensors import passing_joined

__all__ = ["joining"]


@contextmanager
def joining(
    compared: Sequence[torch.Tensor], read: Sequence[torch.Tensor], sizes: bytes | None = None
) -> Iterator[None]:
    """Have the call in the block made in the name of these tensors.

    Args:
        compared: whose sizes the ranks compare.
        read: to which what an error feedback keeps belongs.
        sizes: of ``compared``, where they are known.
    """
    with passing_joined(compared, sizes), owned_by(read):
        yield
