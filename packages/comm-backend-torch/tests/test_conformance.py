from comm_backend_torch import TorchBackend
from comm_utils.testing.conformance import BackendConformance


class TestGloo(BackendConformance):
    provider = "comm_backend_torch:provider"
    backend_class = TorchBackend
    backend = "gloo"
