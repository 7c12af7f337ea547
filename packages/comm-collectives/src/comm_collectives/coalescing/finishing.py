"""Work that is left when the message of many calls has come."""

from __future__ import annotations

from collections.abc import Callable

import torch

from comm_collectives.buffers import Buffers
from comm_collectives.work import After, Completed
from comm_utils.backend import Work

__all__ = ["after", "as_one_dimension", "copier"]


def as_one_dimension(one: torch.Tensor) -> torch.Tensor:
    return one.detach().as_strided((one.numel(),), (1,)) if one.dim() != 1 else one.detach()


def copier(parts: list[torch.Tensor], bucket: torch.Tensor, buffers: Buffers) -> Callable[[], None]:
    def finish() -> None:
        with torch.inference_mode():
            torch._foreach_copy_(parts, torch.split(bucket, [part.numel() for part in parts]))
        with buffers:  # kept for the next block
            pass

    return finish


def after(work: Work | None, finish: Callable[[], None]) -> Work:
    if work is None:
        finish()
        return Completed()
    return After([work], finish, None)
