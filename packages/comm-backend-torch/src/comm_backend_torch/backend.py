"""``torch.distributed``'s process groups behind the contract of ``comm_utils.backend``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup

from comm_backend_torch import bindings
from comm_backend_torch.collectives import Collectives
from comm_backend_torch.point_to_point import PointToPoint

__all__ = ["TorchBackend"]


class TorchBackend(Collectives, PointToPoint):
    """Serves every process group of this process, also those that other code created.

    Args:
        timeout: given at initialisation; groups made later inherit it.
    """

    def create_group(
        self,
        ranks: Sequence[int],
        name: str,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        device_id: torch.device | None = None,
    ) -> ProcessGroup:
        backend = bindings.of_group(backend)
        return super().create_group(ranks, name, timeout, backend, pg_options, group_desc, device_id)
