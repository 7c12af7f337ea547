"""Intel's discontinued bindings, where a user has them: by name, as ``ccl``, beside comm-backend-ccl and without it."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_utils.testing import patience, run_ranks

HERE = Path(__file__).parent
STAND_IN = HERE / "intel_bindings"
BINDINGS = "oneccl_bindings_for_pytorch"


def groups_of_the_bindings() -> list[int]:
    """The sizes of the groups that the stand-in created."""
    return list(sys.modules[BINDINGS].created)


def check_world(**options: Any) -> tuple[str, list[str]]:
    """Set up a world, use it, end it; return its library and the warnings."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("comm").addHandler(handler)
    try:
        dist.init_distributed(verbose=False, timeout=60, **options)
        dist.init_distributed(verbose=False, **options)
        rank, size = dist.get_rank(), dist.get_world_size()
        tensor = torch.arange(3.0) + rank
        dist.all_reduce(tensor, "avg")
        assert tensor.tolist() == [i + (size - 1) / 2 for i in range(3)]
        assert [part.item() for part in dist.all_gather(torch.tensor(rank))] == list(range(size))
        dist.broadcast(tensor, 0, group=dist.new_group(range(size)))
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        assert work.wait()
        found = dist.get_backend()
        dist.destroy_process_group()
    finally:
        logging.getLogger("comm").removeHandler(handler)
    return found, records


def check_group(backend: str) -> None:
    """Make a group on another library than the world's, and use it."""
    group = dist.new_group(backend=backend)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert (dist.get_backend(group), tensor.tolist()) == ("ccl", [2.0] * 3)
    dist.destroy_process_group(group)


def without_comm_backend_ccl() -> None:
    """What each rank does where comm-backend-ccl is not installed."""
    assert importlib.util.find_spec("comm_backend_ccl") is None
    # Of groups beside a world on gloo: by the name that they register, and as they are.
    dist.init_distributed("gloo", verbose=False, timeout=60)
    with pytest.raises(dist.BackendUnavailableError, match="backend 'cll' is not known to torch"):
        dist.new_group(backend="cll")
    assert BINDINGS not in sys.modules
    for name in ("ccl", BINDINGS, f"cpu:{BINDINGS}"):
        check_group(name)
    assert groups_of_the_bindings() == [2] * 3
    sys.modules[BINDINGS].created.clear()
    dist.destroy_process_group()
    # Named as they are, and by the name that they register.
    assert check_world(dist_backend=BINDINGS) == ("ccl", [])
    assert groups_of_the_bindings() == [2, 2]
    assert check_world(dist_backend="ccl") == ("ccl", [])
    assert groups_of_the_bindings() == [2, 2] * 2
    # Nobody asked for them.
    assert check_world() == ("gloo", [])
    assert groups_of_the_bindings() == [2, 2] * 2
    print("done")


def test_they_are_ccl_where_comm_backend_ccl_is_not_installed(tmp_path: Path, free_port: int) -> None:
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "comm_backend_ccl" not in path.name:
            (tmp_path / path.name).symlink_to(path)
    sources = [path for path in HERE.parent.glob("packages/*/src") if "ccl" not in path.parent.name]
    # Without the module site, this folder is the only one with packages, and the editable ones are on the path.
    program = [sys.executable, "-S", "-c", "import test_intel_bindings as t; t.without_comm_backend_ccl()"]
    ranks = []
    for rank in range(2):
        environ = {name: value for name, value in os.environ.items() if not name.startswith("COMM_")} | {
            "PYTHONPATH": os.pathsep.join(map(str, (STAND_IN, HERE, tmp_path, *sources))),
            "CUDA_VISIBLE_DEVICES": "",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port),
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
        }
        pipe = subprocess.PIPE
        ranks.append(subprocess.Popen(program, env=environ, stdout=pipe, stderr=subprocess.STDOUT, text=True))
    try:
        for process in ranks:
            output, _ = process.communicate(timeout=120 * patience())
            assert process.returncode == 0, output
            assert output.splitlines()[-1] == "done"
    finally:
        for process in ranks:
            process.kill()


def bring_along() -> None:
    """Make the stand-in importable, in this rank alone."""
    sys.path.insert(0, str(STAND_IN))


def name_them_beside_ccl() -> None:
    bring_along()
    dist.init_distributed("gloo", verbose=False, timeout=60)
    check_group("ccl")  # comm-backend-ccl's
    with pytest.raises(dist.BackendUnavailableError) as caught:
        dist.new_group(backend=BINDINGS)
    assert str(caught.value) == (
        f"new_group: backend {BINDINGS!r} cannot be used: comm_backend_ccl has registered 'ccl', which is their name, "
        f"in this process; use backend='ccl', or init_distributed with backend={BINDINGS!r} in a new process"
    )
    dist.destroy_process_group()
    found, warnings = check_world(dist_backend="ccl")
    assert (found, warnings, BINDINGS in sys.modules) == ("ccl", [], False)
    assert check_world(dist_backend=BINDINGS.upper()) == ("ccl", [])
    assert groups_of_the_bindings() == [2, 2]
    # The name is theirs from now on.
    assert check_world(dist_backend="ccl") == ("ccl", [])
    assert groups_of_the_bindings() == [2, 2] * 2
    found, warnings = check_world()
    assert found == "gloo"
    expected = [
        f"gloo is used instead of ccl: rank 0: backend 'ccl' cannot be used: {BINDINGS} has registered 'ccl' with "
        f"torch.distributed in this process; start a process that does not import {BINDINGS}, or use {BINDINGS} by "
        "that name"
    ]
    assert warnings == (expected if os.environ["RANK"] == "0" else [])


def test_named_beside_comm_backend_ccl(rank_environment: dict[str, Any]) -> None:
    run_ranks(name_them_beside_ccl, 2, timeout_s=100, env=rank_environment)


def import_them_first(folder: str) -> None:
    bring_along()
    importlib.import_module(BINDINGS)
    importlib.import_module("comm_backend_ccl")
    rank = int(os.environ["RANK"])
    for turn in range(2):
        # Not through MASTER_PORT, where torch's rank 1 may find the store of the world before.
        store = f"file://{folder}/store{turn}"
        torch.distributed.init_process_group("ccl", init_method=store, rank=rank, world_size=2)
        dist.init_distributed(verbose=False)  # adopts it
        tensor = torch.ones(3)
        dist.all_reduce(tensor, "max")
        dist.broadcast(tensor, 1)
        assert (dist.get_backend(), tensor.tolist()) == ("ccl", [1.0] * 3)
        dist.destroy_process_group()
    assert groups_of_the_bindings() == [2, 2]
    assert check_world(dist_backend="ccl") == ("ccl", [])
    assert groups_of_the_bindings()[2] == 2


def test_imported_before_comm_backend_ccl(rank_environment: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(import_them_first, 2, str(tmp_path), timeout_s=100, env=rank_environment)


def refuse_them(folder: str, version: str, source: str) -> str:
    sys.path.insert(0, folder)
    Path(folder, f"{BINDINGS}.py").write_text(source)
    if version:
        info = Path(folder, f"{BINDINGS}-{version}.dist-info")
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {BINDINGS}\nVersion: {version}\n")
    with pytest.raises(dist.BackendUnavailableError) as caught:
        dist.init_distributed(dist_backend=BINDINGS, verbose=False)
    assert check_world(dist_backend="ccl") == ("ccl", [])  # comm-backend-ccl's
    return str(caught.value)


@pytest.mark.parametrize(
    ("version", "source", "expected"),
    [
        ("2.3.0", "raise SystemExit", "2.3.0 is for torch 2.3, this is torch"),
        ("", "raise ImportError('undefined symbol: here')", "ImportError: undefined symbol: here; install the release"),
        ("", "", "importing it did not register 'ccl' with torch.distributed"),
    ],
)
def test_those_that_do_not_work_say_so(
    rank_environment: dict[str, Any], tmp_path: Path, version: str, source: str, expected: str
) -> None:
    (found,) = run_ranks(refuse_them, 1, str(tmp_path), version, source, env=rank_environment)
    assert f"backend {BINDINGS!r} cannot be used: " in found
    assert expected in found
