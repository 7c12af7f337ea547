"""``torch.distributed``'s process groups behind the contract of ``comm_utils.backend``."""

from __future__ import annotations

from comm_backend_torch.collectives import Collectives
from comm_backend_torch.point_to_point import PointToPoint

__all__ = ["TorchBackend"]


class TorchBackend(Collectives, PointToPoint):
    """Serves every process group of this process, also those that other code created.

    Args:
        timeout: given at initialisation; groups made later inherit it.
    """
