"""Collectives on host memory: shared between ranks of one host, through Intel oneCCL between hosts.

Importing it makes ``"ccl"`` a backend of ``torch.distributed``.
"""

from comm_backend_ccl import provider, registration
from comm_backend_ccl.backend import CclBackend
from comm_backend_ccl.process_group import CclProcessGroup

__all__ = ["CclBackend", "CclProcessGroup", "provider"]

registration.register()
