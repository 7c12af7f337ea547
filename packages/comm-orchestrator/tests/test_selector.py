import logging
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as c10d

from comm_orchestrator import selector
from comm_utils import Availability, BackendUnavailableError
from comm_utils.backend import Setup


def test_what_is_installed_is_listed_with_reasons() -> None:
    found = selector.available_backends()
    assert found["gloo"].usable
    assert all(one.reason for one in found.values())


def test_a_misspelt_name_lists_what_there_is() -> None:
    with pytest.raises(
        BackendUnavailableError,
        match=r"backend 'glooo' is not installed \(usable here: .*gloo.*check the spelling \(did you mean 'gloo'",
    ):
        selector.choose("glooo")


def test_every_part_of_a_composite_is_checked() -> None:
    with pytest.raises(BackendUnavailableError, match="'ncccl' is not installed"):
        selector.choose("cpu:gloo,cuda:ncccl")
    assert selector.choose(" CPU:Gloo ").backend == "cpu:gloo"
    assert selector.choose("cpu: gloo , cuda:gloo").backend == "cpu:gloo,cuda:gloo"


def test_the_devices_of_a_composite_are_checked() -> None:
    with pytest.raises(BackendUnavailableError, match="'cpu:gloo,foo:gloo' names the device 'foo', which torch does"):
        selector.choose("cpu:gloo,foo:gloo")
    assert selector.choose("cpu:gloo,cuda:gloo").backend == "cpu:gloo,cuda:gloo"


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


def test_a_package_that_was_never_installed_is_named_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choice = agree(monkeypatch, [{"gloo": YES}])
    with caplog.at_level(logging.INFO, "comm"):
        selector.warn_of_fall_back(choice, "cpu")
    assert choice.backend == "gloo"
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "pip install 'comm-orchestrator[ccl]'" in record.getMessage()


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


BINDINGS = "oneccl_bindings_for_pytorch"


@pytest.mark.parametrize(
    ("named", "device_type", "ccl", "chosen"),
    [
        # By the name that they register: where comm-backend-ccl is not installed, or cannot be used.
        ("ccl", "cpu", None, f"cpu:{BINDINGS}"),
        ("ccl", "cpu", NO, f"cpu:{BINDINGS}"),
        ("ccl", "cpu", YES, "ccl"),
        ("ccl", "xpu", None, f"cpu:gloo,xpu:{BINDINGS}"),
        # comm-backend-ccl serves no XPU.
        ("cpu:gloo,xpu:ccl", "xpu", YES, f"cpu:gloo,xpu:{BINDINGS}"),
        ("cpu:ccl", "cpu", YES, "cpu:ccl"),
        ("cpu:ccl", "cpu", None, f"cpu:{BINDINGS}"),
        # By their own.
        (BINDINGS, "cpu", YES, f"cpu:{BINDINGS}"),
        (f" {BINDINGS.upper()} ", "xpu", YES, f"cpu:gloo,xpu:{BINDINGS}"),
        (f"xpu:{BINDINGS}", "xpu", None, f"xpu:{BINDINGS}"),
        ("gloo", "cpu", None, "gloo"),
    ],
)
def test_intels_bindings_by_name(
    monkeypatch: pytest.MonkeyPatch, named: str, device_type: str, ccl: Availability | None, chosen: str
) -> None:
    found = {"gloo": YES, BINDINGS: YES} | ({} if ccl is None else {"ccl": ccl})
    monkeypatch.setattr(selector, "available_backends", lambda: found)
    assert selector.choose(named, device_type).backend == chosen


def test_intels_bindings_are_chosen_on_xpus_without_xccl(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    both = {"gloo": YES, "ccl": YES, "xccl": YES, BINDINGS: YES}
    assert agree(monkeypatch, [both] * 2, "xpu").backend == "cpu:gloo,xpu:xccl"
    without = both | {"xccl": NO}
    choice = agree(monkeypatch, [both, without], "xpu")
    assert choice.backend == f"cpu:gloo,xpu:{BINDINGS}"
    assert choice.reason == "the best on xpu without xccl"
    with caplog.at_level(logging.WARNING, "comm"):
        selector.warn_of_fall_back(choice, "xpu")
    assert "is used instead of cpu:gloo,xpu:xccl: rank 1: backend 'xccl' cannot be used" in caplog.text
    # Every rank needs them, and nothing chooses them for CPUs.
    assert agree(monkeypatch, [without, {"gloo": YES, "xccl": NO}], "xpu").backend == "gloo"
    assert agree(monkeypatch, [{"gloo": YES, BINDINGS: YES}] * 2).backend == "gloo"


def test_intels_bindings_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selector, "available_backends", lambda: {"gloo": YES})
    with pytest.raises(BackendUnavailableError, match=f"'{BINDINGS}' is not installed .*Intel has discontinued it"):
        selector.choose(BINDINGS)


def test_the_provider_of_torch_comes_last() -> None:
    assert list(selector._providers())[-1] == "torch"


PROVIDER = """
def availability():
    {availability}

def initialize(setup):
    raise NotImplementedError

def adopts(backend):
    raise OSError("no driver")

def adopt():
    raise NotImplementedError
"""


def install_faulty(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, package: str = "faulty", name: str = "faulty"
) -> None:
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[comm_utils.backends]\n{name} = {package}_provider\n")
    (folder / f"{package}_provider.py").write_text(code)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            PROVIDER.format(availability="raise OSError('no driver')"),
            "its package raised OSError in availability(): no driver",
        ),
        (
            PROVIDER.format(availability="raise SystemExit('no licence')"),
            "its package raised SystemExit in availability(): no licence",
        ),
        (
            PROVIDER.format(availability="return {'faulty': True}"),
            "its package returned bool in availability(); expected an Availability for each name",
        ),
        (
            PROVIDER.format(
                availability="from comm_utils.backend import Availability; return {'F': Availability(True, '')}"
            ),
            "its package names a backend 'F' in availability(); expected lower case",
        ),
        (
            "def availability():\n    return {}\n",
            "faulty_provider has no initialize and no adopts and no adopt; expected",
        ),
        ("raise OSError('no library')", "faulty_provider cannot be imported (OSError: no library)"),
        (
            "raise SystemExit('no licence')",
            "faulty_provider cannot be imported (ImportError: faulty 1.0 called sys.exit('no licence') while",
        ),
    ],
)
def test_a_faulty_package_leaves_the_others_usable_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    install_faulty(tmp_path, monkeypatch, code)
    try:
        assert selector.choose("gloo").backend == "gloo"
        assert selector.unavailable_reasons("cpu")["gloo"] is None
        with pytest.raises(BackendUnavailableError, match=f"backend 'faulty' cannot be used: {re.escape(reason)}"):
            selector.choose("faulty")
        with pytest.raises(ValueError, match="process group has not been initialized"):  # torch's provider is asked
            selector.adopt("gloo")
    finally:
        sys.modules.pop("faulty_provider", None)


def test_a_package_that_cannot_be_imported_is_named_for_names_that_are_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its backends may have any names."""
    install_faulty(tmp_path, monkeypatch, "raise OSError('no library')")
    cause = r"faulty_provider cannot be imported \(OSError: no library\); reinstall the package"
    with pytest.raises(BackendUnavailableError, match=rf"'other' is not installed .*, or its package .*: {cause}"):
        selector.choose("other")


@pytest.mark.parametrize("place", ["at import", "in availability"])
def test_what_a_signal_handler_raises_is_not_the_packages_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def ring(number: int, frame: object) -> None:
        raise TimeoutError("alarm")

    raising = f"__import__('signal').raise_signal({int(signal.SIGUSR1)})"
    code = PROVIDER.format(availability=f"return {raising}")
    install_faulty(tmp_path, monkeypatch, code if place == "in availability" else raising)
    before = signal.signal(signal.SIGUSR1, ring)
    try:
        with pytest.raises(TimeoutError, match="alarm"):
            selector.choose("gloo")
    finally:
        signal.signal(signal.SIGUSR1, before)
        sys.modules.pop("faulty_provider", None)


OFFERS = """
from comm_utils import Availability

def availability():
    return {"twin": Availability(True, "here"), "NAME": Availability(True, "here")}

def initialize(setup):
    raise NotImplementedError

def adopts(backend):
    return backend == "twin"

def adopt():
    raise NotImplementedError
"""


def test_two_packages_of_one_name_are_refused_where_one_would_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("first", "second"):
        install_faulty(tmp_path, monkeypatch, OFFERS.replace("NAME", package), package, "twin")
    assert selector.choose("gloo").backend == "gloo"
    assert selector.unavailable_reasons("cpu")["gloo"] is None
    both = [r"first 1\.0 \(first_provider\)", r"second 1\.0 \(second_provider\)"]
    for name in ("twin", "first", "second"):
        message = f"backend '{name}' cannot be used: several installed packages provide it: .*; uninstall all but one"
        with pytest.raises(BackendUnavailableError, match=message) as caught:
            selector.choose(name)
        assert all(re.search(one, str(caught.value)) for one in both)
    with pytest.raises(BackendUnavailableError, match="'twin' cannot be used: several installed packages provide it"):
        selector.adopt("twin")
    with pytest.raises(ValueError, match="process group has not been initialized"):  # torch's provider is asked
        selector.adopt("gloo")


INCOMPLETE = """
import torch.distributed as c10d
from comm_utils import Availability

class Few:
    def all_reduce(self, *arguments):
        pass

def availability():
    return {"faulty": Availability(True, "here")}

def initialize(setup):
    c10d.init_process_group("gloo", store=setup.store, rank=0, world_size=1)
    return Few() if RETURNS else None

def adopts(backend):
    return True

def adopt():
    return Few()
"""


@pytest.mark.parametrize("returns", [True, False])
def test_a_backend_that_lacks_operations_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    install_faulty(tmp_path, monkeypatch, f"RETURNS = {returns}\n{INCOMPLETE}")
    what = "Few" if returns else "NoneType"
    message = f"the package of backend 'faulty' returned {what}, which lacks [0-9]+ of the members of .*: all_gather, "
    try:
        with pytest.raises(BackendUnavailableError, match=message):
            selector.activate(Setup("faulty", 0, 1, c10d.HashStore()))
        assert not c10d.is_initialized()
        with pytest.raises(BackendUnavailableError, match="returned Few, which lacks"):
            selector.adopt("gloo")
    finally:
        sys.modules.pop("faulty_provider", None)


def test_a_backend_whose_start_fails_late_leaves_no_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call would adopt it, and run on another library than the one that was named."""
    late = INCOMPLETE.replace("return Few() if RETURNS else None", "raise OSError('out of memory')")
    install_faulty(tmp_path, monkeypatch, late)
    try:
        with pytest.raises(OSError, match="out of memory"):
            selector.activate(Setup("faulty", 0, 1, c10d.HashStore()))
        assert not c10d.is_initialized()
    finally:
        sys.modules.pop("faulty_provider", None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL is usable here")
def test_nccl_without_a_device_says_so() -> None:
    with pytest.raises(BackendUnavailableError, match="backend 'nccl' cannot be used"):
        selector.choose("nccl")
