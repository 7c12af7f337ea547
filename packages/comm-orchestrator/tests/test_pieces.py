import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comm_orchestrator import devices
from comm_orchestrator.environment import apply_variables
from comm_orchestrator.facade.compatible import ALIASES, LABELS, compatible
from comm_utils import ArgumentTypeError


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


def all_to_all_single(output: int, input: int) -> tuple[int, int]:
    return output, input


def test_aliases_become_the_parameters_they_stand_for() -> None:
    call: Any = compatible(all_to_all_single)
    assert call(1, 2) == (1, 2)
    assert call(output_tensor=1, input_tensor=2) == (1, 2)
    assert call(1, input=2) == (1, 2)
    with pytest.raises(ArgumentTypeError, match="output_tensor: got it and another name of 'output'"):
        call(output=1, output_tensor=1, input=2)
    with pytest.raises(TypeError, match="no_such"):
        call(1, 2, no_such=3)


def test_what_deepspeed_tells_its_logger_is_accepted_by_name_and_by_position() -> None:
    call: Any = compatible(all_to_all_single)
    assert LABELS == ("prof", "log_name", "debug")
    assert call(1, 2, prof=True, log_name="mine", debug="text") == (1, 2)
    assert call(1, 2, True, "mine", "text") == (1, 2)
    assert call(output=1, tensor=2, log_name=None) == (1, 2)
    with pytest.raises(ArgumentTypeError, match="all_to_all_single: log_name: got 3; expected a string"):
        call(1, 2, log_name=3)
    with pytest.raises(TypeError, match="positional"):
        call(1, 2, True, "mine", "text", "one too many")
    with pytest.raises(ArgumentTypeError, match="log_name: got it by position and by name"):
        call(1, 2, True, "mine", log_name="other")
    plain: Any = compatible(all_to_all_single, labels=False)
    with pytest.raises(TypeError, match="prof"):
        plain(1, 2, prof=True)


def configure(config: int, debug: bool = False) -> tuple[int, bool]:
    return config, debug


def test_a_parameter_of_the_functions_own_is_no_label() -> None:
    call: Any = compatible(configure, labels=False)
    assert call(deepspeed_config=1, debug=True) == (1, True)
    with pytest.raises(TypeError, match="prof"):
        call(deepspeed_config=1, prof=True)


def test_every_alias_names_a_parameter_of_its_function() -> None:
    import inspect

    import comm_orchestrator

    for name, aliases in ALIASES.items():
        parameters = inspect.signature(getattr(comm_orchestrator, name)).parameters
        assert set(aliases.values()) <= set(parameters)
        assert not set(aliases) & set(parameters)


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
