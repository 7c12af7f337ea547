"""Initialises or adopts ``torch.distributed`` and serves its process groups behind one contract."""

from comm_backend_torch import provider
from comm_backend_torch.backend import TorchBackend

__all__ = ["TorchBackend", "provider"]
