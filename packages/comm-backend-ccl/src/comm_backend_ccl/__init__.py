"""Collectives on host memory through Intel oneCCL."""

from comm_backend_ccl import provider

__all__ = ["provider"]
