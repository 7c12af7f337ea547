import logging
from collections.abc import Mapping

import pytest
import torch

from comm_orchestrator import selector
from comm_utils import Availability, BackendUnavailableError


def test_what_is_installed_is_listed_with_reasons() -> None:
    found = selector.available_backends()
    assert found["gloo"].usable
    assert all(one.reason for one in found.values())


def test_a_misspelt_name_lists_what_there_is() -> None:
    with pytest.raises(
        BackendUnavailableError, match=r"backend 'glooo' is not installed \(usable here: .*gloo.*check the"
    ):
        selector.choose("glooo")


def test_every_part_of_a_composite_is_checked() -> None:
    with pytest.raises(BackendUnavailableError, match="'ncccl' is not installed"):
        selector.choose("cpu:gloo,cuda:ncccl")
    assert selector.choose(" CPU:Gloo ").backend == "cpu:gloo"


def test_a_missing_package_is_named_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selector, "available_backends", lambda: {"gloo": Availability(True, "here")})
    with pytest.raises(BackendUnavailableError, match=r"pip install 'comm-orchestrator\[ccl\]'"):
        selector.choose("ccl")


YES, NO = Availability(True, "here"), Availability(False, "no fabric", "install one")


def agree(
    monkeypatch: pytest.MonkeyPatch, answers: list[Mapping[str, Availability]], device_type: str = "cpu"
) -> selector.Choice:
    """What the ranks choose where ``answers[r]`` is available on rank r."""
    unavailable_reasons = []
    for answer in answers:
        monkeypatch.setattr(selector, "available_backends", lambda answer=answer: answer)
        unavailable_reasons.append(selector.unavailable_reasons(device_type))
    monkeypatch.setattr(selector, "available_backends", lambda: answers[0])
    return selector.agree(device_type, unavailable_reasons)


def test_all_ranks_take_the_preferred_one_if_all_can(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agree(monkeypatch, [{"ccl": YES, "gloo": YES}] * 3) == selector.Choice("ccl", "preferred on cpu")


def test_one_rank_that_cannot_makes_all_fall_back_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choice = agree(monkeypatch, [{"ccl": YES, "gloo": YES}, {"ccl": NO, "gloo": YES}])
    assert choice.backend == "gloo"
    with caplog.at_level(logging.WARNING, "comm"):
        selector.warn_of_fall_back(choice, "cpu")
    (record,) = caplog.records
    assert record.getMessage() == (
        "gloo is used instead of ccl: rank 1: backend 'ccl' cannot be used: no fabric; install one"
    )


def test_a_package_that_was_never_installed_is_no_news(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choice = agree(monkeypatch, [{"gloo": YES}])
    with caplog.at_level(logging.WARNING, "comm"):
        selector.warn_of_fall_back(choice, "cpu")
    assert choice.backend == "gloo"
    assert not caplog.records


def test_no_common_backend_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailableError, match="rank 0: backend 'gloo' cannot be used: no fabric"):
        agree(monkeypatch, [{"gloo": NO}, {"gloo": NO}])


def test_ranks_on_different_kinds_of_devices_have_nothing_in_common_but_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"gloo": YES, "nccl": YES}
    monkeypatch.setattr(selector, "available_backends", lambda: found)
    choice = selector.agree("cuda", [selector.unavailable_reasons("cuda"), selector.unavailable_reasons("cpu")])
    assert choice.backend == "gloo"
    assert "not every rank computes on cuda" in choice.fall_back_reason


def test_the_provider_of_torch_comes_last() -> None:
    assert list(selector._providers())[-1] == "torch"


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL is usable here")
def test_nccl_without_a_device_says_so() -> None:
    with pytest.raises(BackendUnavailableError, match="backend 'nccl' cannot be used"):
        selector.choose("nccl")
