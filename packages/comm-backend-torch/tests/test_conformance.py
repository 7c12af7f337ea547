import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from comm_backend_torch import TorchBackend
from comm_utils.backend import Setup
from comm_utils.operations import PRIMITIVES
from comm_utils.testing import run_ranks_outcomes, sharing_device
from comm_utils.testing.conformance import BackendConformance
from comm_utils.testing.conformance_ranks import differing_calls
from comm_utils.torch_support import initialization

FAST_PATHS = PRIMITIVES - {"reduce_scatter_tensor"}


class TestGloo(BackendConformance):
    provider = "comm_backend_torch:provider"
    backend_class = TorchBackend
    backend = "gloo"
    fast_paths = FAST_PATHS

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_course_of_a_call(self, world_size: int) -> None:
        if torch.__version__.startswith("2.6."):
            pytest.skip("gloo of torch 2.6 goes on after a call's own timeout, and then hangs where its group ends")
        super().test_course_of_a_call(world_size)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestNccl(BackendConformance):
    provider = "comm_backend_torch:provider"
    backend_class = TorchBackend
    backend = "cpu:gloo,cuda:nccl"
    device = "cuda"
    fast_paths = FAST_PATHS

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_course_of_a_call(self, world_size: int) -> None:
        pytest.skip("the host does not wait for NCCL, so a call returns before its own timeout")

    def environment(self, world_size: int) -> dict[str, Any]:
        return {} if world_size <= torch.cuda.device_count() else sharing_device(world_size)


class ProviderOfOthers:
    """As a package would have it that knows nothing of the flight recorder and of the watch."""

    @staticmethod
    def initialize(setup: Setup) -> TorchBackend:
        initialization.initialize(replace(setup, backend="gloo"))
        return TorchBackend(setup.timeout)


def calls_that_differ() -> None:
    sys.modules["package_of_others"] = ProviderOfOthers
    differing_calls("package_of_others", "theirs", "cpu")


def test_calls_that_differ_raise_on_a_backend_of_others() -> None:
    for outcome in run_ranks_outcomes(calls_that_differ, 2, timeout_s=60):
        assert outcome.exit_code == 0, outcome
