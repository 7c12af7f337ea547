import pytest

from comm_backend_ccl import CclBackend, oneccl_library, shared_memory
from comm_utils.operations import PRIMITIVES
from comm_utils.testing.conformance import BackendConformance


@pytest.mark.skipif(shared_memory.unavailable_reason() is not None, reason=str(shared_memory.unavailable_reason()))
class TestInSharedMemory(BackendConformance):
    provider = "comm_backend_ccl.provider"
    backend_class = CclBackend
    backend = "ccl"
    fast_paths = PRIMITIVES


@pytest.mark.skipif(oneccl_library.unavailable_reason() is not None, reason=str(oneccl_library.unavailable_reason()))
class TestOnOneccl(BackendConformance):
    provider = "comm_backend_ccl.provider"
    backend_class = CclBackend
    backend = "ccl"
    fast_paths = PRIMITIVES
    world_sizes = (1, 2, 3)  # more ranks than cores wait for each other actively
    env = {"CCL_SHARED_MEMORY": "0"}  # noqa: RUF012  # a ClassVar of the base
