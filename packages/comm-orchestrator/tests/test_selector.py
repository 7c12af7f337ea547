import logging
import threading
from collections.abc import Mapping

import pytest
import torch
from torch.distributed import HashStore

from comm_orchestrator import selector
from comm_utils import Availability, BackendUnavailableError


def test_what_is_installed_is_listed_with_reasons() -> None:
    found = selector.available_backends()
    assert found["gloo"].usable
    assert all(one.reason for one in found.values())


def test_a_misspelt_name_lists_what_there_is() -> None:
    with pytest.raises(
        BackendUnavailableError, match=r"backend 'glooo' is not installed \(usable here: gloo.*check the"
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


def agree(
    monkeypatch: pytest.MonkeyPatch, answers: list[Mapping[str, Availability]], device_type: str = "cpu"
) -> list[selector.Choice | Exception]:
    """Let one thread a rank choose, rank r on a machine where ``answers[r]`` is available."""
    mine = threading.local()
    monkeypatch.setattr(selector, "available_backends", lambda: mine.available)
    store = HashStore()
    results: list[selector.Choice | Exception] = [RuntimeError("not run")] * len(answers)

    def rank(number: int) -> None:
        mine.available = answers[number]
        try:
            results[number] = selector.choose_automatically(device_type, store, number, len(answers))
        except BackendUnavailableError as error:
            results[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(answers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


YES, NO = Availability(True, "here"), Availability(False, "no fabric", "install one")


def test_all_ranks_take_the_preferred_one_if_all_can(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = agree(monkeypatch, [{"ccl": YES, "gloo": YES}] * 3)
    assert choices == [selector.Choice("ccl", "preferred on cpu")] * 3


def test_one_rank_that_cannot_makes_all_fall_back_and_rank_0_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "comm"):
        choices = agree(monkeypatch, [{"ccl": YES, "gloo": YES}, {"ccl": NO, "gloo": YES}])
    assert [choice.backend for choice in choices if isinstance(choice, selector.Choice)] == ["gloo", "gloo"]
    (record,) = caplog.records
    assert record.getMessage() == (
        "gloo is used instead of ccl: rank 1: backend 'ccl' cannot be used: no fabric; install one"
    )


def test_a_package_that_was_never_installed_is_no_news(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "comm"):
        (choice,) = agree(monkeypatch, [{"gloo": YES}])
    assert isinstance(choice, selector.Choice)
    assert choice.backend == "gloo"
    assert not caplog.records


def test_no_common_backend_is_an_error_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    results = agree(monkeypatch, [{"gloo": NO}, {"gloo": NO}])
    assert all(isinstance(result, BackendUnavailableError) for result in results)
    assert "rank 0: backend 'gloo' cannot be used: no fabric" in str(results[1])


def test_the_provider_of_torch_comes_last() -> None:
    assert list(selector._providers())[-1] == "torch"


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL is usable here")
def test_nccl_without_a_device_says_so() -> None:
    with pytest.raises(BackendUnavailableError, match="backend 'nccl' cannot be used"):
        selector.choose("nccl")
