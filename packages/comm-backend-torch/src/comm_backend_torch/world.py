"""Start and finish operations of c10d's process groups."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.distributed import ProcessGroup

from comm_backend_torch.capabilities import capabilities_of
from comm_backend_torch.reduce_ops import set_async
from comm_backend_torch.work import TorchWork, left
from comm_utils.backend import Capabilities, Work
from comm_utils.torch_support.process_groups import ProcessGroups

__all__ = ["World"]


class World(ProcessGroups):
    """Every process group of this process, with what its operations have in common."""

    def capabilities(self, group: ProcessGroup | None = None, device_type: str = "cpu") -> Capabilities:
        return capabilities_of(self._state(group).libraries[device_type])

    def _finish(
        self, operation: str, work: Any, result: Any, group: ProcessGroup | None, async_op: bool
    ) -> Work | None:
        if async_op:
            return TorchWork(work, result, partial(self._failure, operation, group), self._end)
        if work is not None:
            try:
                if self._end is None:
                    work.wait()
                else:
                    work.wait(left(self._end))
            except RuntimeError as error:
                raise self._failure(operation, group, error) from error
        return None

    def _options(self, kind: type, async_op: bool) -> Any:
        """Return c10d's options of one operation."""
        options = set_async(kind(), async_op)
        if self._end is not None:
            options.timeout = left(self._end)
        return options

    def _start(self, operation: str, group: ProcessGroup | None, method: Any, *args: Any) -> Any:
        try:
            return method(*args)
        except RuntimeError as error:
            raise self._failure(operation, group, error) from error
