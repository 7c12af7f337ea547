"""``init_distributed``: the decision order of the contract, one step after the other, and back to nothing."""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.distributed as c10d
from world_helpers import environment, logged

import comm_orchestrator as dist
from comm_collectives.recorded.backend import RecordingBackend
from comm_orchestrator import selector
from comm_orchestrator.rendezvous import join, store
from comm_orchestrator.rendezvous.server import PortInUseError, _listen
from comm_utils import active
from comm_utils.testing import RankPool, patience, per_rank, run_ranks

Pools: TypeAlias = Callable[[int], RankPool]
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


# --- what ranks do


@contextlib.contextmanager
def world(*args: Any, meet: bool = True, **kwargs: Any) -> Iterator[None]:
    """Set up, and torn down afterwards; with ``meet`` not before every rank is ready for it."""
    dist.init_distributed(*args, **{"verbose": False, **kwargs})
    try:
        yield
        if meet:
            dist.barrier()
    finally:
        dist.destroy_process_group()


#: What is chosen for CPU tensors where nobody names a backend.
PREFERRED = next(name for name in ("ccl", "gloo") if dist.available_backends()[name].usable)


def check_world(size: int, group: Any = None) -> None:
    tensor = torch.full((3,), dist.get_rank(group) + 1.0)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [size * (size + 1) / 2] * 3


def refused(**kwargs: Any) -> str:
    """How ``init_distributed`` fails, which leaves no trace."""
    before = dict(os.environ)
    try:
        dist.init_distributed(**{"verbose": False, **kwargs})
    except dist.CommError as error:
        text = f"{type(error).__name__}: {error}"
    else:
        dist.destroy_process_group()
        raise AssertionError("init_distributed succeeded")
    assert dict(os.environ) == before
    assert not dist.is_initialized()
    assert not c10d.is_initialized()
    return text


# --- 1. already active


def run_again() -> tuple[list[tuple[str, str]], list[str]]:
    with world("gloo"):
        group, backend = dist.get_world_group(), active.slot.backend
        with logged() as log:
            dist.init_distributed(verbose=False)
            dist.init_distributed("gloo", verbose=False, dist_init_required=True)
            dist.init_distributed(verbose=False, dist_init_required=False)
        assert dist.get_world_group() is group
        assert active.slot.backend is backend
        check_world(2)
        with logged() as other:
            dist.init_distributed("mpi", verbose=False)
            dist.init_distributed("auto", verbose=False)
        assert dist.get_backend() == "gloo"
        check_world(2)
    return log.lines, other.at("WARNING")


def test_1_already_active(bare_pools: Pools) -> None:
    text = "init_distributed: already initialised with backend gloo"
    ignored = "torch.distributed was already initialised with backend gloo; it is kept, dist_backend='mpi' is ignored"
    for rank, (lines, warnings) in enumerate(bare_pools(2).run(run_again)):
        assert lines == ([("INFO", text)] * 3 if rank == 0 else [])
        assert warnings == [ignored]


def run_again_with_settings() -> tuple[list[float], list[str]]:
    """What sums lose by compression: as configured, then as the program chose, whatever init_distributed gets."""
    exact = torch.linspace(-1, 1, 1 << 16)
    lost = []

    def reduce() -> None:
        tensor = exact.clone()
        dist.all_reduce(tensor)
        lost.append(float((tensor - 2 * exact).abs().max()))

    other = {
        "seq_parallel_communication_data_type": "bf16",
        "reductions": {"deterministic": False},
        "process_group": {"backend": "gloo"},
        "timeouts": {"init_s": 7},
        "objects": {"allow_pickle": True},
        "network": {"gloo": {"variables": {"GLOO_SOCKET_IFNAME": "eth7"}}},
        "training": {"stage": 1},
    }
    with environment(COMM_COMPRESS_COMMUNICATION="true", COMM_COMMS_LOGGER__ENABLED="1"), world("gloo"):
        reduce()
        dist.set_compression(None)
        dist.configure(enabled=False)
        if dist.get_rank() == 0:  # what follows would differ between the ranks
            dist.init_distributed(verbose=False)
        reduce()
        with logged() as log:
            dist.init_distributed(verbose=False, config=other)
            dist.init_distributed(verbose=False, config={"comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]}})
        assert isinstance(active.slot.backend, RecordingBackend)
        reduce()
    return lost, log.at("WARNING")


def test_1_a_later_call_changes_no_settings(bare_pools: Pools) -> None:
    text = (
        "init_distributed: the world keeps its settings; config has others, which are ignored: "
        "network.gloo.variables, objects.allow_pickle, seq_parallel_communication_data_type, timeouts.init_s; call "
        "destroy_process_group() first"
    )
    for lost, warnings in bare_pools(2).run(run_again_with_settings):
        assert lost[0] > 0 == lost[1] == lost[2]
        assert warnings == [text]


def run_again_with_one_configuration(folder: str) -> list[float]:
    """What is lost in each of two worlds whose errors are fed back; the second gets its configuration again."""
    config = {
        "compress_communication": {"method": "int8", "error_feedback": True},
        "comms_logger": {"trace": folder},
    }
    found = []
    for again in (False, True):
        with world("gloo", config=config):
            for _ in range(3):
                tensor = torch.linspace(-1, 1, 1 << 16)
                dist.all_reduce(tensor)
                if again:
                    dist.init_distributed(verbose=False, config=config)
            found.append(float(tensor.double().pow(2).sum()))
            assert isinstance(active.slot.backend, RecordingBackend)
    return found


def test_1_the_same_configuration_again_keeps_what_compression_remembers(bare_pools: Pools, tmp_path: Path) -> None:
    for alone, again in bare_pools(2).run(run_again_with_one_configuration, str(tmp_path)):
        assert alone == again


def run_after_foreign_end() -> list[str]:
    dist.init_distributed("gloo", verbose=False)
    check_world(2)
    c10d.destroy_process_group()
    assert not dist.is_initialized()
    os.environ.pop("GLOO_SOCKET_IFNAME")  # set for the world that ended behind our back
    assert refused(dist_init_required=False).startswith("NotInitializedError: ")
    with logged() as log, world("gloo"):
        check_world(2)
    return log.at("INFO")


def test_1_destroyed_by_torch_meanwhile(bare_pools: Pools) -> None:
    first, second = bare_pools(2).run(run_after_foreign_end)
    assert len(first) == 1
    assert first[0].startswith("initialised: gloo, 2 ranks")
    assert second == []


def run_verbose_of_another_type() -> str:
    return refused(dist_backend="gloo", verbose="yes")


def test_verbose_of_another_type(bare_pools: Pools) -> None:
    (found,) = bare_pools(1).run(run_verbose_of_another_type)
    expected = "init_distributed: verbose: got 'yes'; expected True, False, or 2 for all details"
    assert found == f"ArgumentTypeError: {expected}"


def run_integers_of_numpy() -> tuple[int, int]:
    dist.init_distributed("gloo", verbose=np.bool_(False), rank=np.int64(0), world_size=np.int32(1))
    try:
        check_world(1)
        return dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def test_ranks_may_be_integers_of_numpy(bare_pools: Pools) -> None:
    assert bare_pools(1).run(run_integers_of_numpy) == [(0, 1)]


# --- 2. adopting


def run_adopting(method: str, named: str | None, required: bool | None) -> tuple[list[str], list[str], int]:
    rank = int(os.environ["RANK"])
    c10d.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    group = c10d.group.WORLD
    with logged() as log:
        dist.init_distributed(named, verbose=False, dist_init_required=required)
    assert dist.get_world_group() is group is c10d.group.WORLD
    assert dist.get_backend() == c10d.get_backend() == "gloo"
    assert (dist.get_rank(), dist.get_world_size()) == (c10d.get_rank(), c10d.get_world_size())
    check_world(2)
    sub = dist.new_group([0, 1])
    check_world(2, sub)
    theirs = c10d.new_group([0, 1])
    check_world(2, theirs)
    tensor = torch.ones(3)
    c10d.all_reduce(tensor, group=sub)  # both APIs, the same groups
    assert tensor.tolist() == [2.0] * 3
    local_rank = dist.get_local_rank()
    dist.destroy_process_group()
    assert not c10d.is_initialized()
    return log.at("INFO"), log.at("WARNING"), local_rank


@pytest.mark.parametrize(
    ("named", "required"), [(None, None), ("gloo", None), ("GLOO", True), (None, False), ("nccl", None)]
)
def test_2_adopts_what_somebody_else_initialised(
    bare_pools: Pools, tmp_path: Path, named: str | None, required: bool | None
) -> None:
    found = bare_pools(2).run(run_adopting, f"file://{tmp_path}/meet", named, required)
    assert [infos for infos, _, _ in found] == [["adopted torch.distributed: backend gloo, 2 ranks"], []]
    ignored = "torch.distributed was already initialised with backend gloo; it is kept, dist_backend='nccl' is ignored"
    assert [warnings for _, warnings, _ in found] == [[ignored] if named == "nccl" else []] * 2
    assert [local_rank for _, _, local_rank in found] == [0, 1]


def run_adopting_default(method: str) -> list[tuple[str, str]]:
    c10d.init_process_group(init_method=method, rank=int(os.environ["RANK"]), world_size=2)
    with logged() as log:
        dist.init_distributed("gloo", verbose=False)
    assert dist.get_backend() == "gloo"
    check_world(2)
    dist.destroy_process_group()
    return log.lines


def test_2_adopts_torchs_own_choice_of_backend(bare_pools: Pools, tmp_path: Path) -> None:
    """torch calls that choice "undefined"; what serves CPU tensors is gloo."""
    if c10d.is_nccl_available():
        pytest.skip("this build of torch chooses two backends")
    assert bare_pools(2).run(run_adopting_default, f"file://{tmp_path}/meet") == [
        [("INFO", "adopted torch.distributed: backend gloo, 2 ranks")],
        [],
    ]


def run_adopting_fake() -> list[str]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    c10d.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    with logged() as log:
        dist.init_distributed("gloo", verbose=False)
    assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("fake", 3, 8)
    tensor = torch.ones(4)
    for op in ("sum", "avg", dist.ReduceOp.MAX):
        dist.all_reduce(tensor, op)
    dist.barrier()
    assert len(dist.all_gather(tensor)) == 8
    output = torch.empty(32)
    dist.all_gather_into_tensor(output, tensor)
    try:
        dist.all_gather_into_tensor(torch.empty(31), tensor)
    except dist.ArgumentError as error:
        refusal = str(error)
    group = dist.new_group([3, 4])
    dist.all_reduce(tensor, group=group)
    assert dist.get_all_ranks_from_group(group) == [3, 4]
    dist.destroy_process_group()
    return [*log.at("WARNING"), refusal]


def test_2_adopts_the_fake_backend(bare_pools: Pools) -> None:
    ((warning, refusal),) = bare_pools(1).run(run_adopting_fake)
    assert "backend fake; it is kept, dist_backend='gloo' is ignored" in warning
    assert "expected 32" in refusal


def run_registered() -> tuple[str, float]:
    def make(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        return c10d.ProcessGroupGloo(store, rank, size, timeout)

    c10d.Backend.register_backend("mine", make, devices=["cpu"])
    dist.init_distributed("mine", verbose=False)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    found = dist.get_backend(), tensor.item()
    dist.destroy_process_group()
    return found


def test_5_a_backend_that_the_program_has_registered_with_torch(rank_environment: dict[str, Any]) -> None:
    assert run_ranks(run_registered, 2, env=rank_environment) == [("mine", 2.0)] * 2


# --- 3. not required


def test_3_nothing_to_adopt(bare_pools: Pools) -> None:
    for text in bare_pools(2).run(refused, dist_init_required=False):
        assert text == (
            "NotInitializedError: init_distributed: got dist_init_required=False, but nothing is initialised; call "
            "init_distributed() or torch.distributed.init_process_group() before, or leave dist_init_required out"
        )


# --- 4. who this process is


def run_arguments(rank: int, **kwargs: Any) -> tuple[int, int, int, list[str]]:
    with logged() as log, world("gloo", rank=rank, world_size=2, **kwargs):
        check_world(2)
        return dist.get_rank(), dist.get_world_size(), dist.get_local_rank(), log.at("DEBUG")


@pytest.mark.parametrize("scheme", ["tcp", "file", "env"])
def test_4_arguments_come_before_the_launcher(bare_pools: Pools, scheme: str, tmp_path: Path, free_port: int) -> None:
    method = {"tcp": f"tcp://127.0.0.1:{free_port}", "file": f"file://{tmp_path}/meet", "env": "env://"}[scheme]
    ranks = per_rank([1, 0]) if scheme != "env" else per_rank([0, 1])
    found = bare_pools(2).run(run_arguments, ranks, init_method=method)
    assert sorted(entry[:2] for entry in found) == [(0, 2), (1, 2)]
    if scheme != "env":
        assert [entry[0] for entry in found] == [1, 0]  # not what the variables say
    assert [entry[2] for entry in found] == [0, 1]  # as the launcher said
    (line,) = [line for entry in found for line in entry[3]]
    assert line.startswith("facts: backend gloo (argument), launcher arguments, rank 0 (argument rank), world size 2 ")
    place = f"127.0.0.1:{free_port} (init_method, argument)" if scheme == "tcp" else f"{method} (argument)"
    assert line.endswith(f"met at {place}" if scheme != "env" else "(environment variable MASTER_ADDR)")


@pytest.mark.parametrize("scheme", ["tcp", "file", "env"])
def test_4_rank_and_world_size_in_the_url(bare_pools: Pools, scheme: str, tmp_path: Path, free_port: int) -> None:
    method = {"tcp": f"tcp://127.0.0.1:{free_port}", "file": f"file://{tmp_path}/meet", "env": "env://"}[scheme]
    urls = [f"{method}?world_size=2&rank={rank}" for rank in ((1, 0) if scheme != "env" else (0, 1))]
    found = bare_pools(2).run(run_url, per_rank(urls))
    assert found == ([(1, 2), (0, 2)] if scheme != "env" else [(0, 2), (1, 2)])


def run_url(url: str) -> tuple[int, int]:
    with world("gloo", init_method=url):
        check_world(2)
        return dist.get_rank(), dist.get_world_size()


def run_store(path: str) -> list[int]:
    sizes = []
    store = c10d.FileStore(path, 2)
    for _ in range(3):  # the same store serves several generations
        with logged() as log, world("gloo", store=store):
            check_world(2)
            check_world(2, dist.new_group([0, 1]))
            sizes.append(dist.get_world_size())
        assert all("met in a store (argument store)" in line for line in log.at("DEBUG"))
    return sizes


def test_4_a_store_of_the_caller(bare_pools: Pools, tmp_path: Path) -> None:
    assert bare_pools(2).run(run_store, str(tmp_path / "store")) == [[2, 2, 2]] * 2


def run_variables() -> tuple[int, int, int, list[str]]:
    with logged() as log, world():
        check_world(2)
        found = dist.get_rank(), dist.get_world_size(), dist.get_local_rank(), log.at("DEBUG")
    return found


def test_4_variables_of_the_launcher(bare_pools: Pools) -> None:
    first, second = bare_pools(2).run(run_variables)
    assert [entry[:3] for entry in (first, second)] == [(0, 2, 0), (1, 2, 1)]
    (line,) = first[3]
    assert line.startswith(f"facts: backend {PREFERRED} (")
    assert "world size 2 (environment variable WORLD_SIZE)" in line
    assert re.search(r"met at 127\.0\.0\.1:\d+ \(environment variable MASTER_ADDR\)$", line)
    assert second[3] == []  # one line, from rank 0


def run_default_port(port: int, through: str) -> int:
    arguments: dict[str, Any] = {
        "argument": {"distributed_port": port},
        "configuration": {"config": {"launch": {"master_port": port}}},
    }[through]
    with environment(MASTER_PORT=None), world("gloo", **arguments):
        check_world(2)
        return dist.get_world_size()


@pytest.mark.parametrize("through", ["argument", "configuration"])
def test_4_port_that_no_launcher_named(bare_pools: Pools, free_port: int, through: str) -> None:
    assert bare_pools(2).run(run_default_port, free_port, through) == [2, 2]


def run_configured_address(port: int) -> list[str]:
    config = {"launch": {"master_addr": "127.0.0.1", "master_port": port}}
    with environment(MASTER_ADDR=None, MASTER_PORT=None), logged() as log, world("gloo", config=config):
        check_world(2)
    return log.at("DEBUG")


def test_4_address_from_the_configuration(bare_pools: Pools, free_port: int) -> None:
    first, _ = bare_pools(2).run(run_configured_address, free_port)
    assert f"met at 127.0.0.1:{free_port} (configuration dict)" in first[0]


def run_alone(port: int | None) -> tuple[int, int, int, list[str]]:
    blocked = socket.socket()
    blocked.bind(("127.0.0.1", port or 0))
    blocked.listen()
    nothing = dict.fromkeys(_LAUNCHER)
    with blocked, environment(**nothing), logged() as log, world(distributed_port=blocked.getsockname()[1]):
        check_world(1)
        assert not set(_LAUNCHER) & set(os.environ)
        ports = _own_listeners() - {blocked.getsockname()}
        assert all(address.startswith("127.") for address, _ in ports), ports
        return dist.get_rank(), dist.get_world_size(), dist.get_local_rank(), log.at("DEBUG")


def _own_listeners() -> set[tuple[str, int]]:
    """Addresses on which this process listens for TCP connections over IPv4, ``"any"`` for IPv6."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                address, port = fields[1].split(":")
                octets = ".".join(str(octet) for octet in bytes.fromhex(address)[3::-1])
                found.add((octets if table == "tcp" else "any", int(port, 16)))
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="lists sockets through /proc")
def test_4_a_single_process_without_any_variable(bare_pools: Pools) -> None:
    """It becomes a world of one and opens no port at which ranks could meet (gloo has one for its own connections)."""
    ((rank, size, local_rank, infos),) = bare_pools(1).run(run_alone, None)
    assert (rank, size, local_rank) == (0, 1, 0)
    (line,) = infos
    assert line.startswith(f"facts: backend {PREFERRED} (")
    assert "world size 1 (default: no launcher was found)" in line
    assert "met " not in line


def run_contradiction(changes: dict[str, str | None], arguments: dict[str, Any]) -> str:
    with environment(**changes):
        return refused(**arguments)


BOTH = "pass both, or neither"
CONTRADICTIONS: dict[str, tuple[dict[str, str | None], dict[str, Any], tuple[str, ...]]] = {
    "no rank": ({"RANK": None}, {}, ("WORLD_SIZE is set to '1' but RANK is not set", "set both", "unset WORLD_SIZE")),
    "no world size": ({"WORLD_SIZE": None}, {}, ("RANK is set to '0' but WORLD_SIZE is not set", "unset RANK")),
    "rank is no number": ({"RANK": "first"}, {}, ("environment variable RANK: got 'first'", "expected an integer")),
    "port is no number": ({"MASTER_PORT": "x"}, {}, ("environment variable MASTER_PORT: got 'x'", "an integer")),
    "rank too large": (
        {"RANK": "5"},
        {},
        ("rank: got 5 (environment variable RANK)", "expected 0 to 0", "world size of 1"),
    ),
    "no ranks": ({"WORLD_SIZE": "0"}, {}, ("world size: got 0 (environment variable WORLD_SIZE)", "at least 1")),
    "local rank too large": ({"LOCAL_RANK": "3"}, {}, ("local rank: got 3", "less than the local world size of 1")),
    "no address": (
        {"WORLD_SIZE": "2", "MASTER_ADDR": None},
        {},
        ("2 ranks were announced (environment variable WORLD_SIZE)", "not where they meet", "set MASTER_ADDR"),
    ),
    "argument rank alone": ({}, {"rank": 0}, ("got rank without world_size", BOTH)),
    "argument world size alone": ({}, {"world_size": 2}, ("got world_size without rank", BOTH)),
    "argument rank too large": ({}, {"rank": 2, "world_size": 2}, ("rank: got 2 (argument rank)", "0 to 1")),
    "port beside arguments": (
        {"MASTER_PORT": "x"},
        {"rank": 0, "world_size": 1},
        ("environment variable MASTER_PORT: got 'x'",),
    ),
    "unknown scheme": ({}, {"init_method": "carrier://pigeon"}, ("cannot meet the others at carrier://pigeon",)),
}


@pytest.mark.parametrize("label", CONTRADICTIONS)
def test_4_contradictions(bare_pools: Pools, label: str) -> None:
    changes, arguments, texts = CONTRADICTIONS[label]
    (found,) = bare_pools(1).run(run_contradiction, changes, arguments)
    assert found.startswith("LaunchError: ")
    for text in texts:
        assert text in found


def run_port_in_use() -> str:
    with socket.socket() as blocked:
        blocked.bind(("127.0.0.1", 0))
        blocked.listen()
        port = blocked.getsockname()[1]
        return refused(init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1).replace(str(port), "PORT")


def test_4_port_in_use(bare_pools: Pools) -> None:
    (found,) = bare_pools(1).run(run_port_in_use)
    assert found.startswith("LaunchError: init_distributed: rank 0 of 1: port PORT of 127.0.0.1 is in use by pid ")
    assert "set MASTER_PORT (or distributed_port) to a free port" in found


def run_missing_rank(present: bool, port: int, arguments: dict[str, Any]) -> tuple[str, float]:
    if not present:
        return "", 0.0
    # At the ranks' own port, something of an earlier test may still hold a store.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_PORT", str(port))
        start = time.monotonic()
        found = refused(config={"timeouts": {"init_s": 0.5}, "process_group": {"backend": "gloo"}}, **arguments)
        return found, time.monotonic() - start


@pytest.mark.parametrize("scheme", ["tcp", "file"])
@pytest.mark.parametrize("present", [0, 1])
def test_4_rank_that_does_not_come(
    bare_pools: Pools, tmp_path: Path, free_port: int, scheme: str, present: int
) -> None:
    arguments = {"init_method": f"file://{tmp_path}/meet"} if scheme == "file" else {}
    found = bare_pools(2).run(run_missing_rank, per_rank([present == 0, present == 1]), free_port, arguments)
    text, took_s = found[present]
    assert text.startswith("CommTimeoutError: ")
    if scheme == "tcp" and present == 1:
        assert "rank 0 is not to be found at 127.0.0.1:" in text
        assert "which refuses connections" in text
        assert "check that rank 0 was started" in text
    else:
        assert f"rank {1 - present} of 2 did not come within 0.5 s (rank {present} on " in text
        assert "check that it was started" in text
    assert took_s < 0.5 + 2 * patience()
    # That attempt leaves nothing behind on either side.
    assert [entry[:2] for entry in bare_pools(2).run(run_variables)] == [(0, 2), (1, 2)]


def begin_anew(holds_store: bool, given_up: Path) -> tuple[int, int]:
    """Start after a start that rank 0 gave up, with rank 0 the later one; return rank and world size."""
    kept = []
    if os.environ["RANK"] == "0":
        with pytest.MonkeyPatch.context() as patch:
            if holds_store:
                patch.setattr(join, "_release_frames", lambda error: None)
            try:
                dist.init_distributed("gloo", verbose=False, config={"timeouts": {"init_s": 0.5}})
            except dist.CommTimeoutError as error:
                kept.append(error)
        assert "rank 1 of 2 did not come within 0.5 s" in str(kept[0])
        given_up.touch()
        time.sleep(1)
    while not given_up.exists():
        time.sleep(0.01)
    with world("gloo"):
        return dist.get_rank(), dist.get_world_size()


@pytest.mark.parametrize("holds_store", [False, True])
def test_a_start_after_one_that_was_given_up(tmp_path: Path, holds_store: bool) -> None:
    """Rank 1 waits for the new start, also where the error that the program keeps holds the store of the first."""
    assert run_ranks(begin_anew, 2, holds_store, tmp_path / "given_up") == [(0, 2), (1, 2)]


LEFT = """
import sys
import comm_orchestrator as dist
dist.init_distributed("gloo", init_method=sys.argv[1], rank=0, world_size=2, verbose=False)
"""


def run_with_remnant(method: str) -> str:
    rank = int(os.environ["RANK"])
    return refused(dist_backend="gloo", init_method=method, rank=rank, world_size=2)


def test_4_a_file_with_the_record_of_an_earlier_start(bare_pools: Pools, tmp_path: Path) -> None:
    path = tmp_path / "meet"
    with subprocess.Popen([sys.executable, "-c", LEFT, f"file://{path}"]) as earlier:
        while not (path.exists() and b"record/1" in path.read_bytes()):
            assert earlier.poll() is None
            time.sleep(0.01)
        earlier.kill()
    for text in bare_pools(2).run(run_with_remnant, f"file://{path}"):
        assert re.search(rf"pid {earlier.pid} on ", text)
        assert re.search(rf"(which has ended|decided before).*earlier start.*, remove {path} and start again$", text)
    path.unlink()
    assert [entry[:2] for entry in bare_pools(2).run(run_variables)] == [(0, 2), (1, 2)]


# --- 5. which backend


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("nccl", ("backend 'nccl' cannot be used: ",)),
        ("cpu:gloo,cuda:nccl", ("backend 'nccl' cannot be used: ",)),
        ("mpi", ("backend 'mpi' cannot be used: ", "was made without MPI", "build torch from source beside an MPI")),
        ("xccl", ("backend 'xccl' cannot be used: ", "made without XCCL", "install an XPU build of torch")),
        ("gl00", ("backend 'gl00' is not installed (usable here: ", "gloo", "check the spelling")),
    ],
)
def test_5_named_backend_that_cannot_be_had(bare_pools: Pools, name: str, texts: tuple[str, ...]) -> None:
    for through in (
        {"dist_backend": name},
        {"config": {"process_group": {"backend": name}}},
        {"dist_backend": name.upper()},
    ):
        (found,) = bare_pools(1).run(refused, **through)
        assert found.startswith("BackendUnavailableError: ")
        for text in texts:
            assert text in found


def run_without_ccl(installed: bool) -> tuple[str, list[str]]:
    """With comm-backend-ccl not installed, or installed and unusable."""
    import comm_backend_ccl.provider as ccl
    from comm_orchestrator import selector
    from comm_utils.backend import Availability

    entry_points, availability = selector.entry_points, ccl.availability
    selector.entry_points = lambda group: [e for e in entry_points(group) if installed or e.name != "ccl"]
    ccl.availability = lambda: {"ccl": Availability(False, "its engine is out of order", "repair it")}
    try:
        found = refused(dist_backend="ccl")
        with logged() as log, world():
            assert dist.get_backend() == "gloo"
            check_world(dist.get_world_size())
        return found, log.at("WARNING")
    finally:
        selector.entry_points, ccl.availability = entry_points, availability


def test_5_ccl_that_is_installed_and_unusable(bare_pools: Pools) -> None:
    (found, warnings), (found_1, warnings_1) = bare_pools(2).run(run_without_ccl, True)
    assert (
        found
        == found_1
        == "BackendUnavailableError: init_distributed: dist_backend: backend 'ccl' cannot be used: its engine is out "
        "of order; repair it"
    )
    (warning,) = warnings  # once, at rank 0
    assert warning.startswith("gloo is used instead of ccl: ")
    assert "rank 0: backend 'ccl' cannot be used: its engine is out of order; repair it" in warning
    assert warnings_1 == []


def test_5_ccl_that_is_not_installed(bare_pools: Pools) -> None:
    for found, warnings in bare_pools(2).run(run_without_ccl, False):
        assert re.match(
            r"BackendUnavailableError: init_distributed: dist_backend: backend 'ccl' is not installed \(usable here: "
            r"(fake, )?gloo\)",
            found,
        )
        assert found.endswith("install it with: pip install 'comm-orchestrator[ccl]'")
        assert warnings == []  # nobody expects it


def run_disagreement(usable: bool) -> tuple[str, list[str]]:
    import comm_backend_ccl.provider as ccl
    from comm_utils.backend import Availability

    availability = ccl.availability
    ccl.availability = lambda: {
        "ccl": Availability(usable, "in order" if usable else "no such processor", "another one")
    }
    try:
        with logged() as log, world():
            check_world(2)
            return dist.get_backend(), log.at("WARNING")
    finally:
        ccl.availability = availability


def test_5_all_ranks_fall_back_where_one_has_to(bare_pools: Pools) -> None:
    found = bare_pools(2).run(run_disagreement, per_rank([True, False]))
    assert [backend for backend, _ in found] == ["gloo", "gloo"]
    ((warning,), none) = (warnings for _, warnings in found)
    assert "rank 1: backend 'ccl' cannot be used: no such processor" in warning
    assert none == []


# --- 6. configuration


def run_configured_before() -> list[tuple[bool, list[str]]]:
    """``configure`` before there is a world, as DeepSpeed's users do."""
    found = []
    for config in (None, {"comms_logger": {"enabled": False}}, None):
        if len(found) < 2:
            dist.configure(enabled=True, prof_all=False, prof_ops=["broadcast"])
        with world("gloo", config=config):
            dist.all_reduce(torch.ones(1))
            dist.broadcast(torch.ones(1), 0)
            found.append((isinstance(active.slot.backend, RecordingBackend), dist.get_logged_comm_ops()))
            dist.reset_log()
    return found


def test_6_the_comms_logger_may_be_configured_before(bare_pools: Pools) -> None:
    (found,) = bare_pools(1).run(run_configured_before)
    assert found == [(True, ["broadcast"]), (False, []), (False, [])]


def run_unwritable(config: Any) -> list[str]:
    found = [refused(dist_backend="gloo", config=config) for _ in range(2)]
    with world("gloo"):
        check_world(2)
    return found


def test_6_a_trace_that_cannot_be_written(bare_pools: Pools) -> None:
    """No rank has a world then, and the same call again is refused again."""
    for found in bare_pools(2).run(run_unwritable, {"comms_logger": {"trace": "/proc/nowhere/trace"}}):
        for text in found:
            assert text.startswith("ArgumentError: start_trace: on rank 0: /proc/nowhere/trace: ")


def run_unwritable_in_an_adopted_world() -> None:
    c10d.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(2):
            with pytest.raises(dist.ArgumentError, match="/proc/nowhere"):
                dist.init_distributed(verbose=False, config={"comms_logger": {"trace": "/proc/nowhere/trace"}})
            assert not dist.is_initialized()
            assert c10d.is_initialized()
        dist.init_distributed(verbose=False)
        check_world(1)
    finally:
        c10d.destroy_process_group()


def test_6_a_trace_that_cannot_be_written_leaves_an_adopted_world(bare_pools: Pools) -> None:
    bare_pools(1).run(run_unwritable_in_an_adopted_world)


def run_configured(config: Any, variables: dict[str, str], **kwargs: Any) -> dict[str, Any]:
    with environment(**variables), world(config=config, **kwargs):
        check_world(dist.get_world_size())
        table = dist.log_summary(return_dict=True)
        dist.reset_log()
        timeout = active.active_backend().get_timeout()
        found = {
            "logged": isinstance(active.slot.backend, RecordingBackend),
            "operations": sorted(table["summary"] if table else {}),
            "timeout_s": timeout.total_seconds() if timeout else None,
            "backend": dist.get_backend(),
            "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        }
        dist.configure(enabled=False, prof_all=True, prof_ops=[], verbose=False, debug=False)
    return found


def configured(pool: RankPool, config: Any, variables: dict[str, str] | None = None, **kwargs: Any) -> dict[str, Any]:
    (found,) = pool.run(run_configured, config, variables or {}, **kwargs)
    return found


DEEPSPEED = {
    "train_batch_size": 8,
    "zero_optimization": {"stage": 3, "overlap_comm": True},
    "bf16": {"enabled": True},
    "comms_logger": {"enabled": True, "verbose": False, "prof_all": False, "debug": False, "prof_ops": ["all_reduce"]},
}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"comms_logger": {"enabled": True}}, (True, ["all_reduce"])),
        ({"comms_logger": {"enabled": False}}, (False, [])),
        ({"comms_logger": {}}, (False, [])),
        ({}, (False, [])),
        (DEEPSPEED, (True, ["all_reduce"])),
        ({**DEEPSPEED, "comms_logger": {**DEEPSPEED["comms_logger"], "prof_ops": ["broadcast"]}}, (True, [])),
    ],
)
def test_6_comms_logger(
    bare_pools: Pools, tmp_path: Path, document: dict[str, Any], expected: tuple[bool, list[str]]
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(document))
    for config, variables in (
        (str(path), {}),
        (path, {}),
        (document, {}),
        (None, {"COMM_CONFIG": str(path)}),
    ):
        found = configured(bare_pools(1), config, variables)
        assert (found["logged"], found["operations"]) == expected


def test_6_precedence(bare_pools: Pools, tmp_path: Path) -> None:
    """Argument, environment, file, default; each key on its own."""
    path = tmp_path / "comm.json"
    path.write_text(json.dumps({"timeouts": {"collective_s": 40}, "comms_logger": {"enabled": True}}))
    pool = bare_pools(1)
    assert configured(pool, {})["timeout_s"] is None
    assert configured(pool, path)["timeout_s"] == 40
    by_environment = configured(pool, path, {"COMM_TIMEOUTS__COLLECTIVE_S": "50"})
    assert (by_environment["timeout_s"], by_environment["logged"]) == (50, True)
    assert configured(pool, path, {"COMM_COMMS_LOGGER__ENABLED": "0"})["logged"] is False
    assert configured(pool, path, {"COMM_TIMEOUTS__COLLECTIVE_S": "50"}, timeout=60)["timeout_s"] == 60
    assert configured(pool, path, timeout=datetime.timedelta(minutes=2))["timeout_s"] == 120
    assert configured(pool, {}, {"DEEPSPEED_TIMEOUT": "3"})["timeout_s"] == 180
    assert configured(pool, {}, {"COMM_PROCESS_GROUP__BACKEND": "gloo"})["backend"] == "gloo"
    (found,) = pool.run(run_contradiction, {"COMM_PROCESS_GROUP__BACKEND": "mpi"}, {})
    assert found.startswith("BackendUnavailableError: environment variable COMM_PROCESS_GROUP__BACKEND: ")
    assert configured(pool, {}, {"COMM_PROCESS_GROUP__BACKEND": "mpi"}, dist_backend="gloo")["backend"] == "gloo"


def run_sources(**kwargs: Any) -> list[str]:
    with environment(COMM_TIMEOUTS__COLLECTIVE_S="50"), logged() as log, world(**kwargs):
        pass
    return log.at("INFO") + log.at("DEBUG")


def test_6_lines_that_say_what_was_set_up(bare_pools: Pools) -> None:
    first, second = bare_pools(2).run(run_sources, config={"process_group": {"backend": "gloo"}})
    short, line = first
    assert short == "initialised: gloo, 2 ranks (environment)"
    assert line.startswith(
        "facts: backend gloo (configuration dict), launcher environment, rank 0 (environment variable RANK), "
    )
    assert line.endswith("timeout 50 s (environment variable COMM_TIMEOUTS__COLLECTIVE_S)")
    assert second == []


@pytest.mark.parametrize(
    ("config", "texts"),
    [
        ({"comms_loger": {}}, ("configuration dict: comms_loger: unknown key", "did you mean 'comms_logger'?")),
        (
            {"comms_logger": {"enabled": True, "prof_op": []}},
            ("comms_logger.prof_op: unknown key", "did you mean 'prof_ops'?"),
        ),
        ({"timeouts": {"collective_s": -1}}, ("timeouts.collective_s: got -1", "greater than or equal to 0.001")),
        ("/nowhere/comm.json", ("file /nowhere/comm.json", "there is no such file")),
        (7, ("got a configuration of type int", "a dict, a path")),
    ],
)
def test_6_wrong_configuration(bare_pools: Pools, config: Any, texts: tuple[str, ...]) -> None:
    (found,) = bare_pools(1).run(refused, config=config)
    assert found.startswith("ConfigurationError: ")
    for text in texts:
        assert text in found


def test_a_wrong_configuration_brings_no_warning_about_the_port() -> None:
    program = (
        "import comm_orchestrator; comm_orchestrator.init_distributed('gloo', config={'timeouts': {'init_s': -1}})"
    )
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    found = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **launched}, capture_output=True, text=True, timeout=60
    )
    assert "timeouts.init_s: got -1" in found.stderr
    assert "is ignored" not in found.stderr


def run_module() -> tuple[str, bool]:
    dist.initialize_module({"process_group": {"backend": "gloo"}, "comms_logger": {"enabled": True}})
    try:
        return dist.get_backend(), isinstance(active.slot.backend, RecordingBackend)
    finally:
        dist.configure(enabled=False)
        dist.destroy_process_group()
        forget_handlers()


def test_6_initialize_module(bare_pools: Pools) -> None:
    assert bare_pools(1).run(run_module) == [("gloo", True)]


def run_network() -> list[str | None]:
    config = {"network": {"interface": "lo"}}
    with environment(GLOO_SOCKET_IFNAME=None):
        with world("gloo", config=config):
            found = [os.environ.get("GLOO_SOCKET_IFNAME")]
        assert "GLOO_SOCKET_IFNAME" not in os.environ
        error = refused(config={**config, "timeouts": {"init_s": 0.3}}, rank=0, world_size=2)
        assert error.startswith("CommTimeoutError: ")
        found.append(os.environ.get("GLOO_SOCKET_IFNAME"))
    with environment(NCCL_DEBUG="WARN"), world("gloo", config={"network": {"nccl": {"debug": "INFO", "algo": "Tree"}}}):
        found += [os.environ["NCCL_DEBUG"], os.environ["NCCL_ALGO"]]
    return found


def test_6_variables_of_the_libraries(bare_pools: Pools) -> None:
    """Set before a library reads them, gone after a failure, and never over what the environment holds."""
    assert bare_pools(1).run(run_network) == [["lo", None, "WARN", "Tree"]]


def forget_handlers() -> None:
    logger = logging.getLogger("comm")
    for handler in list(logger.handlers):
        if not isinstance(handler, logging.NullHandler):
            logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def run_verbose(verbose: bool, configured: bool) -> int:
    logger, root = logging.getLogger("comm"), logging.getLogger()
    forget_handlers()
    own = logging.StreamHandler(sys.stdout)
    if configured:
        root.addHandler(own)
    try:
        for _ in range(2):  # a second time adds no second handler
            with world("gloo", verbose=verbose):
                pass
        return sum(not isinstance(handler, logging.NullHandler) for handler in logger.handlers)
    finally:
        root.removeHandler(own)
        forget_handlers()


def test_6_verbose_shows_one_line_from_rank_0(bare_pools: Pools) -> None:
    first, second = bare_pools(2).run_outcomes(run_verbose, True, False)
    assert (first.value, second.value) == (1, 1)
    lines = [line for line in first.stderr.splitlines() if "initialised: " in line]
    assert len(lines) == 2
    for line in lines:
        assert line.endswith("INFO [rank 0] comm: initialised: gloo, 2 ranks (environment)")
        assert len(line) <= 80
    assert "comm:" not in second.stderr


def test_6_more_verbose_shows_every_fact(bare_pools: Pools) -> None:
    first, second = bare_pools(2).run_outcomes(run_verbose, 2, False)
    lines = [line for line in first.stderr.splitlines() if "facts: " in line]
    assert len(lines) == 2
    for line in lines:
        assert "DEBUG [rank 0] comm: facts: backend gloo (argument), launcher environment, rank 0 (" in line
    assert "comm:" not in second.stderr


def test_6_not_verbose_attaches_no_handler(bare_pools: Pools) -> None:
    for outcome in bare_pools(2).run_outcomes(run_verbose, False, False):
        assert outcome.value == 0
        assert "comm" not in outcome.stdout + outcome.stderr


def test_6_logging_that_the_program_set_up_is_used(bare_pools: Pools) -> None:
    first, second = bare_pools(2).run_outcomes(run_verbose, True, True)
    assert (first.value, second.value) == (0, 0)
    assert first.stdout.count("initialised: gloo, 2 ranks") == 2
    assert second.stdout == ""


# --- timeouts


# How long operations may take is one thing, how long ranks may take to come another.
_PATIENT_START = {"timeouts": {"init_s": 60}}


def run_timeout(kind: str) -> tuple[str, float]:
    limit_s = 0.6
    with world("gloo", timeout=limit_s, config=_PATIENT_START, meet=False):
        check_world(2)
        if kind == "world":
            group = None
        elif kind == "new_group":
            group = dist.new_group([0, 1])
        elif kind == "mesh":
            group = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model")).get_group("data")
        else:
            group = dist.new_group([0, 1], timeout=2 * limit_s)
        check_world(2, group)
        if dist.get_rank() == 1:
            store = active.active_backend().get_store(None)
            store.wait(["over"], datetime.timedelta(seconds=30))
            return "", 0.0
        start = time.monotonic()
        try:
            dist.barrier(group)
        except dist.CommTimeoutError as error:
            found = str(error)
        else:
            found = "returned"
        took_s = time.monotonic() - start
        active.active_backend().get_store(None).set("over", "1")
        time.sleep(0.2)
        return found, took_s


@pytest.mark.parametrize(("kind", "limit_s"), [("world", 0.6), ("new_group", 0.6), ("mesh", 0.6), ("its own", 1.2)])
def test_timeout_reaches_later_groups(bare_pools: Pools, kind: str, limit_s: float) -> None:
    (text, took_s), _ = bare_pools(2).run(run_timeout, kind)
    assert text.startswith("barrier on the group of ranks [0, 1] timed out after ")
    assert "as seen by rank 0" in text
    assert limit_s * 0.9 < took_s < limit_s + 5 * patience()


def run_lonely_new_group() -> tuple[str, float]:
    with world("gloo", timeout=0.6, config=_PATIENT_START, meet=False):
        check_world(2)
        if dist.get_rank() == 1:
            active.active_backend().get_store(None).wait(["over"], datetime.timedelta(seconds=30))
            return "", 0.0
        start = time.monotonic()
        try:
            dist.new_group([0, 1])
        except dist.CommTimeoutError as error:
            return str(error), time.monotonic() - start
        finally:
            active.active_backend().get_store(None).set("over", "1")
    return "returned", 0.0


def test_timeout_of_a_group_that_one_rank_does_not_make(bare_pools: Pools) -> None:
    (text, took_s), _ = bare_pools(2).run(run_lonely_new_group)
    assert text.startswith("new_group on rank 0: not every rank of [0, 1] came")
    assert 0.5 < took_s < 10 * patience()


# --- again and again


def run_generations(times: int) -> list[float]:
    rank = int(os.environ["RANK"])
    found = []
    for generation in range(times):
        if rank == generation % 2:
            time.sleep(0.1)  # the other one is back before this one has left
        dist.init_distributed("gloo", verbose=False)
        group = dist.new_group([0, 1])
        tensor = torch.full((2,), float(generation))
        dist.all_reduce(tensor)
        check_world(2, group)
        dist.monitored_barrier(timeout=20)
        found.append(tensor[0].item())
        if rank == generation // 2 % 2:
            time.sleep(0.1)
        dist.destroy_process_group()
        assert not dist.is_initialized()
    return found


def listen_after_a_world(library: str, shared_memory: str | None, port: int) -> str | None:
    """Use up a world while nothing collects cycles of references; return what rank 0's listener is bound to then."""
    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MASTER_PORT", str(port))
            if shared_memory is not None:
                patch.setenv("CCL_SHARED_MEMORY", shared_memory)
            dist.init_distributed(library, verbose=False)
            tensor = torch.ones(4)
            dist.all_reduce(tensor)
            dist.isend(tensor, 1).wait() if dist.get_rank() == 0 else dist.recv(tensor, 0)
            rank = dist.get_rank()
            dist.destroy_process_group()
        return listen_soon(port) if rank == 0 else None
    finally:
        gc.enable()


def listen_soon(port: int) -> str:
    """Return what a listener is bound to, once the threads that serve a store have left its port."""
    end = time.monotonic() + 2 * patience()
    while True:
        try:
            with _listen("127.0.0.1", port, alone=True) as listener:
                return str(listener.getsockname()[0])
        except PortInUseError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


@pytest.mark.parametrize(("library", "shared_memory"), [("gloo", None), ("ccl", None), ("ccl", "0")])
def test_the_store_ends_with_its_world(
    bare_pools: Pools, free_port: int, library: str, shared_memory: str | None
) -> None:
    found = bare_pools(2).run(listen_after_a_world, library, shared_memory, free_port)
    assert found == ["127.0.0.1", None]


def meet_at(port: int, forgets: bool) -> int:
    """Start at ``port``, elsewhere, and at ``port`` again, where rank 0 comes late and its first store still listens.

    Args:
        forgets: whether rank 1 is as new to that store as a process that a launcher starts in its place.
    """
    rank = int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_PORT", str(port))
        with world("gloo"):
            kept = [c10d.distributed_c10d._get_default_store()] if rank == 0 else []
        patch.undo()
        with world("gloo"):
            check_world(2)
        patch.setenv("MASTER_PORT", str(port))
        if forgets and rank == 1:
            store._Process.servers.clear()
        if rank == 0:
            time.sleep(0.5)
            kept.clear()
        with world("gloo"):
            check_world(2)
            return dist.get_rank()


@pytest.mark.parametrize("forgets", [False, True])
def test_a_store_that_an_earlier_world_left_is_not_joined(bare_pools: Pools, free_port: int, forgets: bool) -> None:
    assert bare_pools(2).run(meet_at, free_port, forgets) == [0, 1]


def test_destroy_and_initialise_again(bare_pools: Pools) -> None:
    assert bare_pools(2).run(run_generations, 8) == [[2.0 * generation for generation in range(8)]] * 2


SCRIPT = """
import os
import torch
import comm_orchestrator as dist

before = dict(os.environ)
for generation in range(3):
    dist.init_distributed("gloo")
    tensor = torch.ones(2) * (dist.get_rank() + generation)
    dist.all_reduce(tensor)
    group = dist.new_group([0, 1])
    dist.all_reduce(tensor, "max", group)
    if dist.get_rank() == 0:
        print("sum", tensor.tolist(), dist.get_local_rank(), dist.get_world_size(), flush=True)
    dist.destroy_process_group()
assert dict(os.environ) == before
"""


class SlowStore(c10d.Store):
    """A store that takes its time to tell gloo where the other ranks are."""

    def __init__(self, inner: c10d.Store) -> None:
        super().__init__()
        self._inner = inner

    def set(self, key: str, value: str) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        time.sleep(0.2)
        return self._inner.get(key)

    def add(self, key: str, value: int) -> int:
        return self._inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def wait(self, keys: list[str], *limit: datetime.timedelta) -> None:
        self._inner.wait(keys, *limit)


def start_and_leave() -> None:
    """Start a world and leave it at once, while rank 1 still connects to rank 2, through the store of rank 0."""
    if os.environ["RANK"] == "1":
        usual = selector.activate
        selector.activate = lambda setup: usual(replace(setup, store=SlowStore(setup.store)))
    dist.init_distributed("gloo", verbose=False, timeout=60)
    dist.destroy_process_group()


def test_a_rank_that_leaves_at_once_waits_for_those_that_still_start(rank_environment: dict[str, Any]) -> None:
    run_ranks(start_and_leave, 3, env=rank_environment)


def test_under_torchrun(tmp_path: Path, rank_environment: dict[str, Any]) -> None:
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if rank_environment.get(name, "") is not None}
    environ |= {name: value for name, value in rank_environment.items() if value is not None}
    environ["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("sum")] == [
        f"sum [{1 + 2 * generation:.1f}, {1 + 2 * generation:.1f}] 0 2" for generation in range(3)
    ]
    lines = [line for line in done.stderr.splitlines() if " comm: " in line]
    assert len(lines) == 3
    for line in lines:
        assert line.endswith("[rank 0] comm: initialised: gloo, 2 ranks (torchrun)")


# --- what is not imported


def run_with_mpi4py_at_hand(folder: str) -> list[str]:
    sys.path.insert(0, folder)
    try:
        with environment(**dict.fromkeys(_LAUNCHER)), world():
            check_world(1)
        with world():
            check_world(1)
    finally:
        sys.path.remove(folder)
    return sorted(name for name in sys.modules if name.partition(".")[0] == "mpi4py")


def test_mpi4py_is_never_imported(bare_pools: Pools, tmp_path: Path) -> None:
    """No MPI launcher started these processes."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert bare_pools(1).run(run_with_mpi4py_at_hand, str(tmp_path)) == [[]]


def test_import_is_lean() -> None:
    program = (
        "import sys, comm_orchestrator as dist; dist.init_distributed\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    imported = set(done.stdout.split())
    assert {"comm_orchestrator", "comm_collectives", "comm_config", "comm_utils"} <= imported
    assert not imported & {"typer", "rich", "click", "matplotlib", "mpi4py", "pytest", "comm_backend_ccl"}
