"""What goes wrong while the ranks meet: said on every rank, in time, by name. Real processes, real sockets."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as c10d
from torch.distributed import TCPStore
from world_helpers import environment

import comm_config
import comm_orchestrator as dist
from comm_backend_torch import provider
from comm_orchestrator import devices, selector
from comm_orchestrator.rendezvous import join, store
from comm_orchestrator.rendezvous.authentication import remove_secrets
from comm_orchestrator.rendezvous.code_digests import code_digests
from comm_utils import threads
from comm_utils.testing import RankPool, patience, per_rank, run_ranks, run_ranks_outcomes
from comm_utils.torch_support import bounded_store
from comm_utils.torch_support.group_agreement import WORLD

Pools = Callable[[int], RankPool]

LIMIT_S = 4.0
#: "within its timeout plus 2 s"
PATIENCE_S = LIMIT_S + 2.0


@dataclass(frozen=True)
class Ended:
    """How ``init_distributed`` ended on one rank."""

    text: str
    took_s: float
    pid: int


@pytest.fixture(scope="module")
def bare_pools(fresh_pools: Pools) -> Pools:
    """Nothing that torch keeps of an earlier world may listen where these ranks meet."""
    return fresh_pools


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Leave what is in cycles where it is."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def listens() -> bool:
    """Return whether this process serves a store where the ranks meet."""
    connections = psutil.Process().net_connections("tcp")
    ports = [one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN]
    return os.environ.get("MASTER_PORT") in map(str, ports)


def check_nothing_listens() -> None:
    """Nothing serves a store in this process any more, though no garbage was collected."""
    end = time.monotonic() + 2 * patience()
    while listens():
        assert time.monotonic() < end, f"this process still listens at port {os.environ['MASTER_PORT']}"
        time.sleep(0.02)


def attempt(changes: dict[str, str | None], later_s: float = 0.0, limit_s: float = LIMIT_S, **kwargs: Any) -> Ended:
    """Try once, and leave no trace; a world that came up is used, and ended."""
    time.sleep(later_s)
    with environment(**changes), no_collection():
        listened = listens()  # for an earlier test of these processes, which keeps a group of its world
        before, start = dict(os.environ), time.monotonic()
        config = {"timeouts": {"init_s": limit_s}, "process_group": {"backend": "gloo"}, **kwargs.pop("config", {})}
        try:
            dist.init_distributed(verbose=False, config=config, **kwargs)
        except dist.CommError as error:
            text = f"{type(error).__name__}: {error}"
        else:
            tensor = torch.ones(2)
            dist.all_reduce(tensor)
            text = f"sum {tensor[0].item():g}"
            dist.destroy_process_group()
        took_s = time.monotonic() - start
        assert dict(os.environ) == before
        assert not dist.is_initialized()
        assert not c10d.is_initialized()
        if not listened:
            check_nothing_listens()
    return Ended(text, took_s, os.getpid())


def failed(found: list[Ended], kind: str, *texts: str) -> str:
    """All ranks ended in time with this error; the message, which is the same on all of them."""
    for one in found:
        assert one.text.startswith(f"{kind}: init_distributed: "), one.text
        assert one.took_s < PATIENCE_S * patience(), one
    messages = {one.text for one in found}
    assert len(messages) == 1, messages
    message = messages.pop()
    for text in texts:
        assert text in message, message
    return message


def works(pool: RankPool, world_size: int) -> None:
    """The same processes meet when nothing is wrong any more."""
    assert [one.text for one in pool.run(attempt, {})] == [f"sum {world_size}"] * world_size


@pytest.mark.parametrize("ranks", [(0, 1, 1), (0, 0, 1), (0, 0, 0)])
def test_two_processes_of_one_rank(bare_pools: Pools, ranks: tuple[int, ...]) -> None:
    pool = bare_pools(3)
    found = pool.run(attempt, per_rank([{"RANK": str(rank)} for rank in ranks]))
    twins = [one.pid for one, rank in zip(found, ranks, strict=True) if ranks.count(rank) > 1]
    message = failed(
        found, "LaunchError", "two processes have rank ", socket.gethostname(), "environment variable RANK"
    )
    assert sum(f"pid {pid} " in message for pid in twins) == 2
    assert max(one.took_s for one in found) < LIMIT_S  # nobody waits for ranks that cannot come
    works(pool, 3)


def test_a_rank_too_many_for_a_world_that_is_complete(bare_pools: Pools) -> None:
    pool = bare_pools(3)
    changes = [{"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "2"}]
    first, second, third = pool.run(run_and_stay, per_rank(changes), per_rank([0.0, 0.0, 1.5]))
    assert (first.text, second.text) == ("sum 2", "sum 2")
    failed([third], "LaunchError", "two processes have rank 1", f"pid {second.pid} ", f"pid {third.pid} ")
    assert third.took_s < LIMIT_S


def run_and_stay(changes: dict[str, str | None], later_s: float) -> Ended:
    if later_s:
        return attempt(changes, later_s)
    with environment(**changes):
        dist.init_distributed("gloo", verbose=False)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        time.sleep(3.0)
        dist.barrier()
        dist.destroy_process_group()
    return Ended(f"sum {tensor[0].item():g}", 0.0, os.getpid())


def test_ranks_that_disagree_on_the_world_size(bare_pools: Pools) -> None:
    pool = bare_pools(2)
    found = pool.run(attempt, per_rank([{}, {"WORLD_SIZE": "3"}]))
    message = failed(found, "LaunchError", "the ranks disagree on the world size", "environment variable WORLD_SIZE")
    assert f"rank 0 (pid {found[0].pid} " in message
    assert f"rank 1 (pid {found[1].pid} " in message
    assert "says 2" in message
    assert "says 3" in message
    assert max(one.took_s for one in found) < LIMIT_S
    works(pool, 2)


def test_ranks_that_never_came(bare_pools: Pools) -> None:
    found = bare_pools(2).run(attempt, {"WORLD_SIZE": "5"}, limit_s=1.5)
    message = failed(found, "CommTimeoutError", "ranks 2-4 of 5 did not come within 1.5 s")
    assert f"(ranks 0, 1 on {socket.gethostname()} came)" in message
    assert "check that they were started" in message
    assert max(one.took_s for one in found) < 1.5 + 2 * patience()
    works(bare_pools(2), 2)


def test_rank_0_never_came(bare_pools: Pools) -> None:
    found = bare_pools(2).run(attempt, per_rank([{"RANK": "1", "WORLD_SIZE": "3"}, {"RANK": "2", "WORLD_SIZE": "3"}]))
    for one in found:
        assert one.text.startswith("CommTimeoutError: init_distributed: rank ")
        assert one.text.count("init_distributed: ") == 1
        assert "rank 0 is not to be found at 127.0.0.1:" in one.text
        assert "(environment variable MASTER_ADDR), which refuses connections, for 4" in one.text
        assert "check that rank 0 was started" in one.text
        assert one.took_s < PATIENCE_S * patience()


def test_an_agent_that_was_lost(bare_pools: Pools) -> None:
    for one in bare_pools(2).run(attempt, {"TORCHELASTIC_USE_AGENT_STORE": "True"}):
        assert one.text.startswith("CommTimeoutError: init_distributed: rank ")
        assert "torchrun's agent is not to be found at 127.0.0.1:" in one.text
        assert "check that torchrun's agent was started" in one.text


def test_a_master_address_that_does_not_resolve(bare_pools: Pools) -> None:
    first, second = bare_pools(2).run(attempt, {"MASTER_ADDR": "no-such-host.invalid"})
    assert second.text.startswith(
        "LaunchError: init_distributed: rank 1 of 2: the master address 'no-such-host.invalid'"
    )
    assert "(environment variable MASTER_ADDR) does not resolve on " in second.text
    assert "set MASTER_ADDR to a name or address of the host of rank 0 that every host can resolve" in second.text
    assert first.text.startswith("CommTimeoutError: init_distributed: rank 1 of 2 did not come within 4 s")
    assert "the master address 'no-such-host.invalid' does not resolve on " in first.text
    assert max(first.took_s, second.took_s) < PATIENCE_S * patience()


def test_a_master_address_that_this_host_also_answers_to(bare_pools: Pools) -> None:
    found = bare_pools(2).run(attempt, {"MASTER_ADDR": "127.0.0.2"})
    assert [one.text for one in found] == ["sum 2", "sum 2"]


_OCCUPANT = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def occupied_port() -> Iterator[tuple[int, int]]:
    """A port that another process has, which accepts connections and says nothing; and that process's id."""
    with subprocess.Popen([sys.executable, "-c", _OCCUPANT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline()), process.pid
        finally:
            process.kill()


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_configuration_that_is_wrong_on_one_rank(bare_pools: Pools, culprit: int) -> None:
    """It tells the others, which need not wait for a rank that cannot come."""
    pool = bare_pools(2)
    changes: list[dict[str, str]] = [{}, {}]
    changes[culprit] = {"COMM_TIMEOUTS__COLLECTIVE_S": "soon"}
    found = pool.run(attempt, per_rank(changes), 0.0, 30.0)
    for one in found:
        assert one.text.startswith("ConfigurationError: ")
        assert "COMM_TIMEOUTS__COLLECTIVE_S" in one.text
        assert one.took_s < 8 * patience()
    assert f"rank {culprit}" in found[1 - culprit].text
    works(pool, 2)


def attempt_and_end(changes: dict[str, str], later_s: float, limit_s: float = 30.0) -> Ended:
    """As a process that ends right after, and removes the secret that it has made."""
    found = attempt({**changes, "TORCHELASTIC_USE_AGENT_STORE": "True"}, later_s, limit_s)
    remove_secrets()
    return found


def test_a_configuration_that_is_wrong_on_a_rank_before_the_other_one_comes(bare_pools: Pools) -> None:
    """The records stay in the store of torchrun's agent, but not the secret with which they are signed."""
    agents = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    common = {"MASTER_PORT": str(agents.port), "LOCAL_WORLD_SIZE": "2"}
    changes = per_rank([{**common, "COMM_TIMEOUTS__COLLECTIVE_S": "soon"}, common])
    first, second = bare_pools(2).run(attempt_and_end, changes, per_rank([0.0, 1.0]))
    assert first.text.startswith("ConfigurationError: "), first.text
    assert second.text.startswith("ConfigurationError: "), second.text
    assert "rank 0" in second.text


def test_a_rank_that_comes_after_the_other_one_has_given_up_and_ended(bare_pools: Pools) -> None:
    agents = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    changes = {"MASTER_PORT": str(agents.port), "LOCAL_WORLD_SIZE": "2"}
    first, second = bare_pools(2).run(attempt_and_end, changes, per_rank([0.0, 8.0]), per_rank([1.0, 30.0]))
    assert first.text.startswith("CommTimeoutError: init_distributed: rank 1 of 2 did not come"), first.text
    assert "rank 1 of 2: a rank of this job gave up or ended before this one came" in second.text, second.text


def test_ranks_whose_agents_count_restarts_differently(bare_pools: Pools) -> None:
    """As where one agent restarts its ranks since one failed, and the other since the first one did."""
    agents = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    common = {"MASTER_PORT": str(agents.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    changes = [{**common, "TORCHELASTIC_RESTART_COUNT": count} for count in "01"]
    first, second = bare_pools(2).run(attempt, per_rank(changes))
    assert first.text.startswith("CommTimeoutError: init_distributed: rank 1 of 2 did not come"), first.text
    assert "rank 1 has TORCHELASTIC_RESTART_COUNT=1, and rank 0 has 0; run torchrun with TORCH_DISABLE" in first.text
    assert second.text.startswith("CommTimeoutError: init_distributed: rank 0 of 2 did not come"), second.text
    assert "RESTART_COUNT" not in second.text  # it cannot know whether rank 0 was started again


def attempt_at_a_place(source: str, changes: dict[str, str]) -> Ended:
    """Meet at this job's port, which ``source`` names instead of MASTER_PORT."""
    port, config = os.environ["MASTER_PORT"], {}
    url = f"tcp://127.0.0.1:{port}"
    place: dict[str, str | None] = {"MASTER_PORT": None}
    if source == "port":
        place["COMM_LAUNCH__MASTER_PORT"] = port
    elif source == "variable":
        place["COMM_PROCESS_GROUP__INIT_METHOD"] = url
    else:
        config = {"process_group": {"backend": "gloo", "init_method": url}}
    return attempt({**place, **changes}, limit_s=30.0, config=config)


@pytest.mark.parametrize(("source", "culprit"), [("port", 1), ("variable", 1), ("dict", 0)])
def test_a_configuration_that_is_wrong_on_one_rank_also_says_where_they_meet(
    bare_pools: Pools, source: str, culprit: int
) -> None:
    changes: list[dict[str, str]] = [{}, {}]
    changes[culprit] = {"COMM_TIMEOUTS__COLLECTIVE_S": "soon"}
    found = bare_pools(2).run(attempt_at_a_place, source, per_rank(changes))
    for one in found:
        assert one.text.startswith("ConfigurationError: "), one.text
        assert "COMM_TIMEOUTS__COLLECTIVE_S" in one.text


def serving_slowly(takes_s: float) -> Ended:
    """Rank 0's client of its own store takes a while, as where the name service does not answer torch."""
    with pytest.MonkeyPatch.context() as patch:

        def serve(*args: Any) -> Any:
            server = real_serve(*args)
            time.sleep(takes_s)
            return server

        real_serve = store.serve
        patch.setattr(store, "serve", serve)
        return attempt({}, limit_s=30.0)


def test_a_store_whose_rank_0_is_slow(bare_pools: Pools) -> None:
    pool = bare_pools(2)
    assert [one.text for one in pool.run(serving_slowly, 6.0)] == ["sum 2"] * 2


def run_beside_an_empty_store() -> Ended:
    """Rank 0 is a program of another kind, which serves a store of torch at that port."""
    if os.environ["RANK"] == "1":
        return attempt({}, limit_s=2.0)
    server = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, True, wait_for_workers=False)
    time.sleep(4)
    del server
    return Ended("", 0.0, os.getpid())


def test_a_store_that_rank_0_has_not_made(bare_pools: Pools) -> None:
    _, second = bare_pools(2).run(run_beside_an_empty_store)
    text = "CommTimeoutError: init_distributed: rank 1 of 2: a store answers at 127.0.0.1:"
    assert second.text.startswith(text), second.text
    assert "but rank 0 has written nothing there in time, so it may be another program's" in second.text


def test_a_port_in_use(bare_pools: Pools) -> None:
    """Rank 0 names who has it; the others find something there that is not a store."""
    with occupied_port() as (port, pid):
        first, second = bare_pools(2).run(attempt, {"MASTER_PORT": str(port)})
    assert first.text.startswith(
        f"LaunchError: init_distributed: rank 0 of 2: port {port} of 127.0.0.1 is in use by pid {pid}, "
    )
    assert "set MASTER_PORT (or distributed_port) to a free port" in first.text
    assert second.text.startswith(
        f"CommTimeoutError: init_distributed: rank 1 of 2: 127.0.0.1:{port} accepts connections"
    )
    assert f"there listens pid {pid}, " in second.text
    assert max(first.took_s, second.took_s) < PATIENCE_S * patience()


def test_a_port_that_is_being_left(bare_pools: Pools) -> None:
    """By the last world or by its process: rank 0 waits a moment, instead of failing for nothing."""
    pool = bare_pools(2)
    with socket.socket() as leaving:
        leaving.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else can
        threading.Timer(1.0, leaving.close).start()
        port = leaving.getsockname()[1]
        assert [one.text for one in pool.run(attempt, {"MASTER_PORT": str(port)})] == ["sum 2"] * 2


@pytest.mark.parametrize("secret", [None, "one of this job alone"], ids=["file", "environment"])
def test_a_process_that_keeps_a_group_of_the_world_of_which_it_was_rank_0(
    bare_pools: Pools, secret: str | None
) -> None:
    """It serves that world's store at the port of the next one, of which another process is rank 0."""
    pool = bare_pools(2)
    one, zero = pool.run(change_places_and_keep_a_group, {"COMM_JOB_SECRET": secret})
    pool.run(drop_groups)
    assert one.text.startswith("LaunchError: init_distributed: rank 1 of 2: this process itself "), one.text
    assert f"(pid {one.pid}) still listens at 127.0.0.1:" in one.text
    assert "delete the variables that hold such groups when you destroy them, or set MASTER_PORT" in one.text
    assert f"pid {one.pid}" in zero.text
    works(pool, 2)


_kept: list[object] = []


def change_places_and_keep_a_group(variables: dict[str, str | None]) -> Ended:
    rank = 1 - int(os.environ["RANK"])
    with environment(**variables):
        dist.init_distributed("gloo", verbose=False)
        _kept.append(dist.new_group([0, 1]))
        dist.destroy_process_group()
    return attempt({**variables, "RANK": str(rank)})


def drop_groups() -> None:
    _kept.clear()
    gc.collect()


def test_the_port_of_another_job(bare_pools: Pools) -> None:
    """Its ranks are not disturbed, and these are told whose port it is."""
    jobs = [{"TORCHELASTIC_RUN_ID": "one"}] * 2 + [{"TORCHELASTIC_RUN_ID": "two"}] * 2
    changes = [{**job, "RANK": str(rank % 2), "WORLD_SIZE": "2"} for rank, job in enumerate(jobs)]
    found = bare_pools(4).run(run_and_stay, per_rank(changes), per_rank([0.0, 0.0, 1.0, 1.0]))
    assert [one.text for one in found[:2]] == ["sum 2", "sum 2"]
    assert "is in use by pid " in found[2].text
    assert f"belongs to another job (one, pid {found[0].pid} on " in found[3].text


@pytest.mark.parametrize("name", ["torch", "comm-orchestrator"])
def test_versions_that_differ(bare_pools: Pools, name: str) -> None:
    found = bare_pools(2).run(run_other_version, per_rank([None, name]))
    message = failed(found, "LaunchError", f"the ranks run different versions of {name}: rank ", " has 0.0.7")
    assert "install the same on every host" in message
    works(bare_pools(2), 2)


def run_other_version(name: str | None) -> Ended:
    real, own = join.version, torch.__version__
    try:
        if name == "torch":
            torch.__version__ = "0.0.7+cpu"  # type: ignore[assignment]
        elif name is not None:
            join.version = lambda _: "0.0.7"  # type: ignore[attr-defined]
        return attempt({})
    finally:
        join.version, torch.__version__ = real, own  # type: ignore[attr-defined]


@pytest.mark.parametrize(("changed", "added"), [(None, ""), ("models.py", "# of another commit\n")])
def test_code_that_differs(bare_pools: Pools, tmp_path: Path, changed: str | None, added: str) -> None:
    """A clone that is older has the same version; where one lies does not matter."""
    copy = tmp_path / "comm_config"
    shutil.copytree(Path(comm_config.__file__).parent, copy)
    if changed is None:
        assert [one.text for one in bare_pools(2).run(run_clone, per_rank([None, copy]))] == ["sum 2"] * 2
        return
    with open(copy / changed, "a") as file:
        file.write(added)
    found = bare_pools(2).run(run_clone, per_rank([None, copy]))
    message = failed(found, "LaunchError", "the ranks run different versions of the code of comm-config: rank ")
    assert "install the same on every host" in message
    works(bare_pools(2), 2)


def run_clone(package: Path | None) -> Ended:
    loader: Any = comm_config.__spec__.loader  # type: ignore[union-attr]
    own = loader.path
    code_digests.cache_clear()
    try:
        if package is not None:
            loader.path = str(package / "__init__.py")
        return attempt({})
    finally:
        loader.path = own
        code_digests.cache_clear()


def test_settings_that_differ(bare_pools: Pools) -> None:
    found = bare_pools(2).run(attempt, per_rank([{}, {"COMM_TIMEOUTS__COLLECTIVE_S": "77"}]))
    message = failed(found, "LaunchError", "the ranks disagree on the setting timeouts.collective_s: rank ")
    assert "has None" in message
    assert "has 77.0" in message
    # torch's wrappers of groups would wait for each other.
    found = bare_pools(2).run(attempt, per_rank([{}, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}]))
    failed(found, "LaunchError", "the ranks disagree on the setting TORCH_DISTRIBUTED_DEBUG: rank ", "'DETAIL'")
    # Some may differ, such as the names of interfaces.
    found = bare_pools(2).run(attempt, per_rank([{}, {"COMM_COMMS_LOGGER__VERBOSE": "1"}]))
    assert [one.text for one in found] == ["sum 2", "sum 2"]


def test_a_rank_that_cannot_go_on_tells_the_others(bare_pools: Pools) -> None:
    """Rather than leaving them to wait for it."""
    nccl = {"config": {"process_group": {"backend": "mpi"}}}
    first, second = bare_pools(2).run(attempt, {}, config=per_rank([{}, nccl["config"]]))
    assert second.text.startswith(
        "BackendUnavailableError: configuration dict: process_group.backend: backend 'mpi' cannot be used: "
    )
    assert first.text.startswith(f"BackendUnavailableError: init_distributed: rank 1 (pid {second.pid} on ")
    assert "cannot go on: configuration dict: process_group.backend: backend 'mpi' cannot be used" in first.text
    assert max(first.took_s, second.took_s) < LIMIT_S
    works(bare_pools(2), 2)


def test_fewer_devices_than_ranks(bare_pools: Pools) -> None:
    found = bare_pools(2).run(run_with_one_device)
    message = failed(
        found, "LaunchError", f"2 ranks on {socket.gethostname()} (ranks 0, 1) have 1 cuda device between them"
    )
    assert "start at most as many processes a host as it has devices" in message
    works(bare_pools(2), 2)


def run_with_one_device() -> Ended:
    """A machine with one GPU, as far as a machine without any can be one."""
    real = devices.device_type, devices.visible_devices, join.selector.choose
    try:
        devices.device_type = lambda: "cuda"
        devices.visible_devices = lambda kind: (1, None)
        join.selector.choose = lambda name, device_type: join.selector.Choice(name, "named")
        return attempt({}, config={"process_group": {"backend": "nccl"}})
    finally:
        devices.device_type, devices.visible_devices, join.selector.choose = real


def test_an_interface_that_is_not_there(bare_pools: Pools) -> None:
    first, second = bare_pools(2).run(attempt, per_rank([{}, {"GLOO_SOCKET_IFNAME": "nosuch0"}]))
    assert second.text.startswith("LaunchError: GLOO_SOCKET_IFNAME='nosuch0' means none of the interfaces of ")
    assert "lo (127.0.0.1" in second.text
    assert "rank 1 (pid " in first.text
    assert max(first.took_s, second.took_s) < LIMIT_S


def test_the_store_of_a_rank_0_that_died(bare_pools: Pools, free_port: int) -> None:
    """It answered, and went away while the others were waiting for the rest."""
    code = (
        "import os, threading, torch, comm_orchestrator as dist\n"  # torch's import takes long on a busy machine
        f"threading.Timer({2 * patience()}, os._exit, (7,)).start()\n"
        "dist.init_distributed('gloo', verbose=False, rank=0, world_size=3, config={'timeouts': {'init_s': 60}})\n"
    )
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    pool = bare_pools(1)
    pool.run(os.getpid)  # rank 1 is up and waits for rank 0, however long that takes to start
    with subprocess.Popen([sys.executable, "-c", code], env=environ) as dying:
        changes = {"MASTER_PORT": str(free_port), "RANK": "1", "WORLD_SIZE": "3"}
        (found,) = pool.run(attempt, changes, limit_s=60.0)
        assert dying.wait() == 7
    assert found.text.startswith("PeerLostError: init_distributed: rank 1 of 3: the store at 127.0.0.1:")
    assert "rank 0" in found.text
    assert found.took_s < 15 * patience()


def test_a_rank_0_that_is_frozen(bare_pools: Pools, free_port: int) -> None:
    """Its host answers and its store says nothing: torch would wait for ever."""
    code = (
        "import comm_orchestrator as dist\n"
        "print('up', flush=True)\n"
        "dist.init_distributed('gloo', verbose=False, rank=0, world_size=3, config={'timeouts': {'init_s': 60}})\n"
    )
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    with subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE) as frozen:
        try:
            assert frozen.stdout is not None
            frozen.stdout.readline()
            listens = False
            while not listens:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", free_port), timeout=1):
                    listens = True
                time.sleep(0.05)
            time.sleep(0.3)
            frozen.send_signal(signal.SIGSTOP)
            changes = {"MASTER_PORT": str(free_port), "RANK": "1", "WORLD_SIZE": "3"}
            (found,) = bare_pools(1).run(attempt, changes, limit_s=2.0)
        finally:
            frozen.kill()
    assert found.text.startswith("CommTimeoutError: init_distributed: rank 1 of 3: ")
    assert "does not answer like a store" in found.text or "stopped answering" in found.text
    assert found.took_s < 2 + 2 * patience()


def test_those_who_come_later_hear_why_the_others_timed_out(bare_pools: Pools) -> None:
    """Processes of one job start seconds apart."""
    changes = [{}, {"WORLD_SIZE": "4"}, {}]
    found = bare_pools(3).run(attempt, per_rank(changes), per_rank([0.0, 0.0, 2.0]), limit_s=8.0)
    messages = {one.text for one in found}
    assert len(messages) == 1, messages
    assert "the ranks disagree on the world size" in messages.pop()


def attempt_until_interrupted(changes: dict[str, str | None], after_s: float) -> str:
    """Try until a signal handler raises; nothing of the attempt goes on."""

    def ring(number: int, frame: object) -> None:
        raise TimeoutError("alarm")

    import comm_collectives  # noqa: F401, which takes long, and the first attempt imports

    dist.available_backends()
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        with pytest.raises(TimeoutError, match="alarm"):
            attempt(changes, limit_s=60.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert threads.left_behind() == []
    check_nothing_listens()
    return "interrupted"


def test_an_interrupted_rank_0_leaves_nothing_and_starts_again(bare_pools: Pools, free_port: int) -> None:
    changes = {"MASTER_PORT": str(free_port), "WORLD_SIZE": "2"}
    (text,) = bare_pools(1).run(attempt_until_interrupted, changes, 2.0 * patience())
    assert text == "interrupted"
    for found in bare_pools(2).run(attempt, {}, limit_s=60.0):
        assert found.text == "sum 2"


def attempt_or_be_interrupted(interrupted: bool) -> str:
    if interrupted:
        return attempt_until_interrupted({"WORLD_SIZE": "3"}, 3.0 * patience())
    return attempt({"WORLD_SIZE": "3"}, limit_s=60.0).text


@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_hear_of_an_interrupted_rank(bare_pools: Pools, rank: int) -> None:
    found = bare_pools(2).run(attempt_or_be_interrupted, per_rank([rank == 0, rank == 1]))
    assert found[rank] == "interrupted"
    assert found[1 - rank].startswith(f"LaunchError: init_distributed: rank {rank} (")
    assert "was interrupted in init_distributed (TimeoutError: alarm)" in found[1 - rank]


def run_in_two_stores(path: str, first_alone: bool) -> list[float]:
    """Rank 0 has had a world of its own before they meet in a store that outlives worlds."""
    if first_alone:
        dist.init_distributed("gloo", verbose=False, store=c10d.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
    store = c10d.FileStore(path, 2)
    return [run_in(store) for _ in range(3)]


def run_in(store: Any) -> float:
    dist.init_distributed("gloo", verbose=False, store=store, timeout=10)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.barrier()
    dist.destroy_process_group()
    return float(tensor.item())


def test_ranks_with_different_pasts(bare_pools: Pools, tmp_path: Path) -> None:
    assert bare_pools(2).run(run_in_two_stores, str(tmp_path / "store"), per_rank([True, False])) == [[2.0] * 3] * 2


def run_as_a_new_worker(port: int) -> float:
    return run_in(c10d.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False))


def test_processes_that_come_after_a_world_in_one_store(bare_pools: Pools) -> None:
    """As workers do that torchrun's agent starts anew when its membership changes: its store remembers the old ones."""
    agents = c10d.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    assert bare_pools(2).run(run_as_a_new_worker, agents.port) == [2.0, 2.0]
    assert bare_pools(3).run(run_as_a_new_worker, agents.port) == [3.0, 3.0, 3.0]
    assert bare_pools(2).run(run_as_a_new_worker, agents.port) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("query", "arguments", "text"),
    [
        (
            "rank=0&world_size=2",
            {"rank": 0, "world_size": 2},
            "ArgumentError: init_distributed: rank: got 0, and 0 in ",
        ),
        ("rank=first", {}, "ArgumentError: init_distributed: init_method: got rank='first'; expected a number"),
        ("rank=-1", {}, "ArgumentError: init_distributed: init_method: got rank='-1'; expected a number"),
        ("rank=0&rank=1", {}, "ArgumentError: init_distributed: rank: got 0, and 1 in init_method; give it once"),
        ("timeout=3", {}, "LaunchError: init_distributed: init_method: got 'tcp://127.0.0.1:"),
    ],
)
def test_a_query_of_a_url_that_is_refused(
    bare_pools: Pools, free_port: int, query: str, arguments: dict[str, int], text: str
) -> None:
    url = f"tcp://127.0.0.1:{free_port}?{query}"
    (found,) = bare_pools(1).run(attempt, {}, init_method=url, **arguments)
    assert found.text.startswith(text)


def gives_up_in_its_backend(error: type[BaseException], leaves: int) -> str:
    """Rank ``leaves`` raises in ``initialize()`` of its backend, while the others wait for it to make the world."""

    def initialize(setup: Any) -> Any:
        setup.store.wait([f"{WORLD}/{rank}" for rank in range(3) if rank != leaves])
        raise error("no device")

    if int(os.environ["RANK"]) == leaves:
        provider.initialize = initialize
    with pytest.raises((dist.CommError, error)) as caught:
        dist.init_distributed("gloo", timeout=60, verbose=False)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("leaves", [0, 2])
@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_rank_whose_backend_raises_before_it_makes_the_world_is_named(
    error: type[BaseException], leaves: int
) -> None:
    said = f"rank {leaves} gave up before it made the world: {error.__name__}: no device"
    expected = [f"PeerLostError: init_distributed on rank {rank}: {said}" for rank in range(3)]
    expected[leaves] = f"{error.__name__}: no device"
    assert run_ranks(gives_up_in_its_backend, 3, error, leaves) == expected


def ends_before_the_world(backend: str, victim: int) -> None:
    """Rank ``victim`` is killed when the ranks have met, before it makes the world."""

    def end(setup: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if int(os.environ["RANK"]) == victim:
        selector.activate = end
    dist.init_distributed(backend, timeout=120, verbose=False)


@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_a_rank_that_ends_before_it_makes_the_world_is_named_before_the_timeout(backend: str) -> None:
    outcomes = run_ranks_outcomes(ends_before_the_world, 3, backend, 1, env={"CUDA_VISIBLE_DEVICES": ""})
    for rank in (0, 2):
        assert outcomes[rank].exception_type == "PeerLostError", outcomes[rank]
        assert re.search(r"rank 1 \(pid \d+ on .*\) ended before it made the world", outcomes[rank].message)


def gives_up_while_the_store_is_stopped(folder: str) -> bool:
    """Rank 1 raises in ``initialize()`` of its backend while rank 0, which serves the store, is stopped."""
    rank, server = int(os.environ["RANK"]), Path(folder) / "pid"

    def initialize(setup: Any) -> Any:
        if rank == 0:
            while not server.with_name("met").exists():  # rank 1 has read all of the store that it needs to come here
                time.sleep(0.01)
            server.with_name("own").write_text(str(os.getpid()))
            server.with_name("own").rename(server)
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            server.with_name("met").touch()
            while not server.exists() or psutil.Process(int(server.read_text())).status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
        raise ValueError("no device")

    provider.initialize = initialize
    with pytest.raises(ValueError, match="no device"):
        dist.init_distributed("gloo", timeout=60, verbose=False)
    if rank == 0:
        return True
    os.kill(int(server.read_text()), signal.SIGCONT)
    return int(os.environ["MASTER_PORT"]) in bounded_store._silent_ports


def test_a_rank_that_gives_up_leaves_no_unknown_question_in_a_stopped_store(tmp_path: Path) -> None:
    """The end of Python ends the questions in a store that is known to be silent."""
    assert run_ranks(gives_up_while_the_store_is_stopped, 2, str(tmp_path)) == [True, True]
