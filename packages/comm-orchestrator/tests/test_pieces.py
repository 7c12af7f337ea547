import os
from types import SimpleNamespace

import pytest
import torch

from comm_orchestrator import devices
from comm_orchestrator.environment import apply_variables


def test_variables_stay_after_success_and_go_after_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMM_TEST_OLD", "before")
    monkeypatch.delenv("COMM_TEST_NEW", raising=False)
    seen: list[str] = []

    def fail() -> None:
        seen.append(os.environ["COMM_TEST_OLD"])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), apply_variables({"COMM_TEST_OLD": "after", "COMM_TEST_NEW": "1"}):
        fail()
    assert seen == ["after"]
    assert os.environ["COMM_TEST_OLD"] == "before"
    assert "COMM_TEST_NEW" not in os.environ
    with apply_variables({"COMM_TEST_NEW": "1"}):
        pass
    assert os.environ.pop("COMM_TEST_NEW") == "1"


class Cuda:
    """What of ``torch.cuda`` is used, on a machine with 2 devices."""

    def __init__(self, used: bool = False) -> None:
        self.used, self.chosen = used, None

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.used

    def device_count(self) -> int:
        return 2

    def set_device(self, index: int) -> None:
        self.chosen = index


def test_the_device_of_the_local_rank_is_bound_unless_one_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    # The choice is ours and can be tested anywhere; what a real device does with it is for tests marked gpu.
    fresh, used = Cuda(), Cuda(used=True)
    monkeypatch.setattr(devices, "torch", SimpleNamespace(cuda=fresh, device=torch.device))
    assert devices.device_type() == "cuda"
    assert devices.bind_device("cuda", 1) == torch.device("cuda", 1)
    assert fresh.chosen == 1
    assert devices.bind_device("cpu", 0) is None
    monkeypatch.setattr(devices, "torch", SimpleNamespace(cuda=used, device=torch.device))
    assert devices.bind_device("cuda", 1) is None
    assert used.chosen is None


def test_what_a_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "torch", SimpleNamespace(cuda=Cuda(), device=torch.device))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert devices.visible_devices("cpu") == (0, None)
    assert devices.visible_devices("cuda") == (2, "0")
    # Where Slurm confines devices, every task's own is called 0, and is another one.
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert devices.visible_devices("cuda") == (2, "0 of task 3")
