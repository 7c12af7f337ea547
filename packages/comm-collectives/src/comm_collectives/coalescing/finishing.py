"""Work that is left when the message of many calls has come."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch

from comm_collectives.buffers import Buffers
from comm_collectives.work import Completed
from comm_utils.backend import Work

__all__ = ["After", "after", "as_one_dimension", "copier"]


def as_one_dimension(one: torch.Tensor) -> torch.Tensor:
    return one.detach().as_strided((one.numel(),), (1,)) if one.dim() != 1 else one.detach()


def copier(parts: list[torch.Tensor], bucket: torch.Tensor, buffers: Buffers) -> Callable[[], None]:
    def finish() -> None:
        with torch.inference_mode():
            torch._foreach_copy_(parts, torch.split(bucket, [part.numel() for part in parts]))
        with buffers:  # kept for the next block
            pass

    return finish


class After:
    """A handle that does local work once, after another one."""

    def __init__(self, work: Work, finish: Callable[[], None]) -> None:
        self._work, self._finish = work, cast("Callable[[], None] | None", finish)

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        self._work.wait(timeout)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def result(self) -> Any:
        self.wait()


def after(work: Work | None, finish: Callable[[], None]) -> Work:
    if work is None:
        finish()
        return Completed()
    return After(work, finish)
