"""What other users of a host can reach of a job: no port of the rendezvous, no memory, no file."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import comm_orchestrator as dist
from comm_backend_ccl import provider
from comm_utils.testing import RankPool, per_rank

Pools = Callable[[int], RankPool]

_CCL = provider.availability()["ccl"]
_NOBODY = 65534


@pytest.fixture
def session(tmp_path: Path) -> Path:
    """The folder of the user's session, in which nothing may be left."""
    tmp_path.chmod(0o700)
    return tmp_path


def listening() -> set[tuple[str, int]]:
    """Return the addresses and ports on which this process listens."""
    sockets = psutil.Process().net_connections("inet")
    return {(one.laddr.ip, one.laddr.port) for one in sockets if one.status == psutil.CONN_LISTEN}


def files_of(folder: str) -> list[tuple[str, str]]:
    return [(path.name, oct(stat.S_IMODE(path.stat().st_mode))) for path in sorted(Path(folder).rglob("*"))]


def meet(backend: str, folder: str, rank: int, times: int = 1, **more: Any) -> list[Any]:
    """Start a world that many times; return where this process listens and what is in the folder."""
    os.environ["XDG_RUNTIME_DIR"] = folder
    found: list[Any] = []
    try:
        for _ in range(times):
            before = listening()
            dist.init_distributed(backend, rank=rank, world_size=2, verbose=False, **more)
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            assert tensor.item() == 2
            found = [sorted({address for address, _ in listening() - before}), files_of(folder)]
            dist.barrier()
            dist.destroy_process_group()
    finally:
        del os.environ["XDG_RUNTIME_DIR"]
        leave()
    return found


def leave() -> None:
    """What happens when a process ends, which ranks of a pool do later."""
    from comm_orchestrator.rendezvous import file_store

    file_store._release(os.getpid())


@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_ranks_meet_in_a_private_file_and_open_no_port_for_it(bare_pools: Pools, backend: str, session: Path) -> None:
    if backend == "ccl" and not _CCL.usable:
        pytest.skip(_CCL.reason)
    found = bare_pools(2).run(meet, backend, str(session), per_rank([0, 1]), 3, init_method="file://")
    for addresses, files in found:
        # gloo's own connections, on the loopback interface; shared memory has none.
        assert addresses == (["127.0.0.1"] if backend == "gloo" else [])
        (folder, mode), *inside = files
        assert (folder, mode) == (f"comm-{os.getuid()}", "0o700")
        assert [mode for _, mode in inside] == ["0o600"] * 2
    assert list(session.iterdir()) == []


def test_a_store_on_one_host_listens_on_the_loopback_interface(
    bare_pools: Pools, session: Path, free_port: int
) -> None:
    address = f"tcp://127.0.0.1:{free_port}"
    found = bare_pools(2).run(meet, "gloo", str(session), per_rank([0, 1]), init_method=address)
    assert [addresses for addresses, _ in found] == [["127.0.0.1"]] * 2


def refused(folder: str, rank: int) -> str:
    try:
        meet("gloo", folder, rank, init_method=f"file://{folder}/meet")
    except dist.LaunchError as error:
        return str(error)
    return ""


def test_a_file_that_others_could_replace_is_refused_on_every_rank(bare_pools: Pools, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    found = bare_pools(2).run(refused, str(tmp_path), per_rank([0, 1]))
    assert all("every user may replace files in its folder" in text for text in found), found
    tmp_path.chmod(0o700)
    assert bare_pools(2).run(refused, str(tmp_path), per_rank([0, 1])) == ["", ""]


def opens(path: str, user: int | None) -> bool:
    """Return whether a process of that user can open ``path`` for reading and writing."""
    identity: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    done = subprocess.run(["/bin/sh", "-c", 'exec 3<>"$0"', path], capture_output=True, check=False, **identity)
    return done.returncode == 0


def segments() -> list[tuple[int, bool, bool]]:
    """Return the mode of each piece of shared memory of this process, and whether this user and nobody can open it."""
    dist.init_distributed("ccl", verbose=False)
    shared = dist.empty_shared(1 << 20)
    dist.all_reduce(shared.zero_())
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            name = os.readlink(entry)
        except FileNotFoundError:  # of the folder itself
            continue
        if name.startswith("/memfd:comm"):
            path = f"/proc/{os.getpid()}/fd/{entry.name}"
            mode = stat.S_IMODE(os.stat(path).st_mode)
            found.append((mode, opens(path, None), opens(path, _NOBODY) if os.getuid() == 0 else False))
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.skipif(not _CCL.usable, reason=_CCL.reason)
def test_other_users_cannot_open_shared_memory(bare_pools: Pools) -> None:
    """By another user where this one may become one, which takes root; the modes in any case."""
    for found in bare_pools(2).run(segments):
        assert found
        assert found == [(0o600, True, False)] * len(found)
