"""Collectives on host memory through Intel oneCCL.

Importing it makes ``"ccl"`` a backend of ``torch.distributed``.
"""

from comm_backend_ccl import process_group, provider
from comm_backend_ccl.backend import CclBackend
from comm_backend_ccl.process_group import CclProcessGroup

__all__ = ["CclBackend", "CclProcessGroup", "provider"]

process_group.register()
