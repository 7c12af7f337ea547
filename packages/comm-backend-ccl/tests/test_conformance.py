import pytest

from comm_backend_ccl import CclBackend, native
from comm_utils.testing.conformance import BackendConformance


@pytest.mark.skipif(native.obstacle() is not None, reason=str(native.obstacle()))
class TestCcl(BackendConformance):
    provider = "comm_backend_ccl:provider"
    backend_class = CclBackend
    backend = "ccl"
