"""This package needs comm-utils and torch, and no other backend."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as c10d

from comm_backend_ccl import CclBackend, foreign_groups, oneccl_library, provider, shared_memory
from comm_utils import BackendUnavailableError, CommTimeoutError, PeerLostError, Setup
from comm_utils.fast_path import FastPathCache
from comm_utils.testing import run_ranks, run_ranks_outcomes
from comm_utils.watch import WATCH, WatchSettings

ENGINES = [
    pytest.param(
        {}, id="shared-memory", marks=pytest.mark.skipif(shared_memory.unavailable_reason() is not None, reason="")
    ),
    pytest.param(
        {"CCL_SHARED_MEMORY": "0"},
        id="oneccl",
        marks=pytest.mark.skipif(
            oneccl_library.unavailable_reason() is not None, reason=str(oneccl_library.unavailable_reason())
        ),
    ),
]


def initialize(timeout_s: float = 30) -> CclBackend:
    store, rank, world_size = next(c10d.rendezvous("env://"))
    backend = provider.initialize(Setup("ccl", rank, world_size, store, timedelta(seconds=timeout_s)))
    assert isinstance(backend, CclBackend)
    return backend


def run_without_other_backends() -> None:
    foreign_groups.entry_points = lambda group: ()  # type: ignore[assignment]
    backend = initialize()
    size = backend.get_world_size()
    tensor = torch.ones(3)
    backend.all_reduce(tensor, "sum")
    assert tensor.tolist() == [size] * 3

    pair = backend.create_group([1, 0], "pair")
    assert backend.get_process_group_ranks(pair) == [1, 0]
    assert backend.get_rank(pair) == 1 - backend.get_rank()
    backend.broadcast(tensor, group=pair, group_src=0)
    backend.destroy_process_group(pair)

    # torch itself serves it; this project's calls need the package that knows gloo.
    other = backend.create_group([0, 1], "other", backend="gloo")
    assert backend.get_backend(other) == "gloo"
    for call in (
        lambda: backend.all_reduce(tensor, "sum", other),
        lambda: backend.capabilities(other),
        lambda: backend.during("all_reduce").barrier(other),
    ):
        with pytest.raises(BackendUnavailableError, match=r"backend 'gloo' .*pip install comm-backend-torch"):
            call()
    c10d.all_reduce(tensor, group=other)
    backend.check_group(other)
    backend.destroy_process_group(other)
    backend.destroy_process_group()


@pytest.mark.parametrize("env", ENGINES)
def test_it_works_without_another_backend(env: dict[str, str]) -> None:
    run_ranks(run_without_other_backends, 2, timeout_s=60, env=env)


def hide_orchestrator() -> None:
    """Let this package be alone where all are installed, too."""
    sys.path[:] = [path for path in sys.path if not (Path(path) / "comm_orchestrator").is_dir()]
    # This process may be forked from one that has imported it.
    for name in [one for one in sys.modules if one.partition(".")[0] == "comm_orchestrator"]:
        del sys.modules[name]
    assert importlib.util.find_spec("comm_orchestrator") is None


# Of oneCCL, a process cannot start a second world after a failure.
AGAIN = (
    r"(: on every rank, call destroy_process_group\(\), and then pass what .*comm_backend_ccl\.provider\.initialize"
    r"\(setup\).* returns to comm_utils\.activate\(\) again|: end the processes of all ranks and start them again)"
)


def time_out(watch: bool) -> None:
    hide_orchestrator()
    WATCH.settings = WatchSettings(enabled=watch)
    backend = initialize(timeout_s=2)
    backend.all_reduce(torch.ones(3), "sum")
    store = c10d.distributed_c10d._get_default_store()
    if backend.get_rank() == 1:
        store.set_timeout(timedelta(seconds=60))
        store.wait(["rank 0 has timed out"])
        return
    with pytest.raises(CommTimeoutError, match=AGAIN) as caught:
        backend.all_reduce(torch.ones(3), "sum")
    assert "init_distributed" not in str(caught.value)
    assert watch or "timeout= of comm_utils.Setup() and new_group() sets the limit" in str(caught.value)
    store.set("rank 0 has timed out", "")


@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize("env", ENGINES)
def test_the_error_of_a_timeout_names_what_is_installed(env: dict[str, str], watch: bool) -> None:
    run_ranks(time_out, 2, watch, timeout_s=60, env=env)


def lose_a_peer() -> None:
    hide_orchestrator()
    backend = initialize()
    backend.all_reduce(torch.ones(3), "sum")
    if backend.get_rank() == 1:
        os._exit(3)
    with pytest.raises(PeerLostError, match=AGAIN) as caught:
        backend.all_reduce(torch.ones(3), "sum")
    assert "init_distributed" not in str(caught.value)


@pytest.mark.parametrize("env", ENGINES)
def test_the_error_about_a_rank_that_died_names_what_is_installed(env: dict[str, str]) -> None:
    survivor, victim = run_ranks_outcomes(lose_a_peer, 2, timeout_s=60, env=env)
    assert (survivor.status, victim.exit_code) == ("returned", 3), survivor


class Recorder:
    """Stands in for the provider of another library."""

    def __init__(self, libraries: tuple[str, ...]) -> None:
        self.libraries = libraries

    def adopts(self, backend: str) -> bool:
        return backend in self.libraries

    def adopt(self) -> "Recorder":
        self.fast_paths = FastPathCache()
        return self


class Entry:
    def __init__(self, name: str, load: Callable[[], object]) -> None:
        self.name, self.load = name, load


def entries(group: str) -> Iterator[Entry]:
    yield Entry("torch", lambda: Recorder(("gloo", "mine", "other")))
    yield Entry("ccl", lambda: pytest.fail("asked for its own groups"))
    yield Entry("special", lambda: Recorder(("mine", "other")))


def test_a_package_that_knows_a_library_comes_before_one_that_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_groups, "entry_points", entries)
    assert foreign_groups.provider_for("mine")[0] == "special"
    assert foreign_groups.provider_for("gloo")[0] == "torch"
    with pytest.raises(BackendUnavailableError, match="backend 'unheard' is not served"):
        foreign_groups.provider_for("unheard")


def test_a_package_that_fails_leaves_the_others_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> object:
        raise OSError("no library")

    def with_broken(group: str) -> Iterator[Entry]:
        yield Entry("broken", load)
        yield from entries(group)

    monkeypatch.setattr(foreign_groups, "entry_points", with_broken)
    assert foreign_groups.provider_for("gloo")[0] == "torch"
    with pytest.raises(BackendUnavailableError, match=r"broken cannot be asked \(OSError: no library\)"):
        foreign_groups.provider_for("unheard")


def test_a_provider_has_one_backend_for_all_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_groups, "entry_points", entries)
    groups = foreign_groups.ForeignGroups(FastPathCache())
    assert groups.find("mine") is None
    backend = groups.backend_for("mine")
    assert groups.backend_for("other") is backend is groups.find("mine")
    assert groups.backend_for("gloo") is not backend
    groups.clear()
    assert groups.find("gloo") is None


SERVES = """
def availability():
    return {}

def initialize(setup):
    raise NotImplementedError

def adopts(backend):
    return backend == "twin"

def adopt():
    raise NotImplementedError
"""


def test_two_packages_of_one_name_that_serve_a_library_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("first", "second"):
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[comm_utils.backends]\ntwin = {package}_serves\n")
        (tmp_path / f"{package}_serves.py").write_text(SERVES)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendUnavailableError, match="backend 'twin' is served by 'twin', but several") as caught:
        foreign_groups.provider_for("twin")
    assert all(f"{package} 1.0 ({package}_serves)" in str(caught.value) for package in ("first", "second"))
