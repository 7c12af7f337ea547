import pytest
import torch

from comm_backend_torch import TorchBackend
from comm_utils.testing.conformance import BackendConformance


class TestGloo(BackendConformance):
    provider = "comm_backend_torch:provider"
    backend_class = TorchBackend
    backend = "gloo"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestNccl(BackendConformance):
    provider = "comm_backend_torch:provider"
    backend_class = TorchBackend
    backend = "cpu:gloo,cuda:nccl"
    device = "cuda"
    world_sizes = (1,)  # one rank a device
