"""Who this process is, from arguments, variables and settings; and what it tells the environment."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import comm_config
from comm_orchestrator import rank_discovery
from comm_utils.errors import ArgumentTypeError, LaunchError
from comm_utils.launch import LaunchInfo

TORCH = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}


def find(environ: Mapping[str, str], rank: Any = -1, world_size: Any = -1, **overrides: Any) -> LaunchInfo:
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    return rank_discovery.find(environ, rank, world_size, comm_config.resolve(environ={}, overrides=dotted), False)


def test_arguments_come_first() -> None:
    info = find({**TORCH, "LOCAL_RANK": "1"}, rank=2, world_size=3)
    assert (info.launcher, info.rank, info.world_size, info.local_rank) == ("arguments", 2, 3, 1)
    assert (info.master_addr, info.master_port) == ("10.0.0.1", 4000)
    assert info.sources["rank"] == "argument rank"


@pytest.mark.parametrize("rank", ["0", 1.0, True, None])
def test_arguments_of_the_wrong_type(rank: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"init_distributed: rank: got .*; expected an integer"):
        find({}, rank=rank, world_size=2)


def test_a_port_that_nobody_named_is_the_settings() -> None:
    environ = {name: value for name, value in TORCH.items() if name != "MASTER_PORT"}
    assert find(environ).master_port == 29500
    assert find(environ).sources["master_port"] == "default"
    assert find(environ, launch__master_port=5000).sources["master_port"] == "argument"
    assert find(TORCH, launch__master_port=5000).master_port == 4000


def test_a_derived_port_gives_way_to_one_that_was_asked_for() -> None:
    derived = find(SRUN)
    assert derived.sources["master_port"].startswith("derived from ")
    assert derived.master_port is not None
    assert 15000 <= derived.master_port < 29000
    assert find(SRUN, launch__master_port=5000).master_port == 5000


def test_an_address_of_the_settings_wins() -> None:
    info = find(SRUN, launch__master_addr="10.9.9.9")
    assert (info.master_addr, info.sources["master_addr"]) == ("10.9.9.9", "argument")


def test_a_stale_address_is_used_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "comm"):
        info = find({**SRUN, "MASTER_ADDR": "127.0.0.9"})
    assert info.master_addr == "127.0.0.9"
    (record,) = caplog.records
    assert "MASTER_ADDR is 127.0.0.9, and is used; slurm would be met at 127.0.0.1" in record.getMessage()


def test_another_name_for_the_same_address_is_no_contradiction(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "comm"):
        find({**SRUN, "MASTER_ADDR": "localhost"})
    assert not caplog.records


def test_pmix_alone_needs_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_discovery.mpi, "is_installed", lambda: False)
    with pytest.raises(LaunchError, match=r"PMIX_RANK shows .* pip install 'comm-orchestrator\[mpi\]'"):
        find({"PMIX_RANK": "0", "PMIX_NAMESPACE": "x"})
    assert find({"PMIX_RANK": "0"}, launch__auto_mpi_discovery=False).launcher == "none"


def test_what_the_launcher_did_not_say_comes_from_the_meeting() -> None:
    info = rank_discovery.with_hosts(LaunchInfo("x", 2, 4), [0, 0, 1, 1])
    assert (info.local_rank, info.local_world_size, info.node_rank) == (0, 2, 1)
    assert info.sources["local_rank"] == "the ranks that met"
    told = rank_discovery.with_hosts(LaunchInfo("x", 2, 4, local_rank=1, local_world_size=2, node_rank=7), [0, 0, 1, 1])
    assert (told.local_rank, told.node_rank) == (1, 7)


def test_variables_for_other_software() -> None:
    info = LaunchInfo("slurm", 1, 2, 0, 1, 1, "h", 4000)
    assert rank_discovery.variables(info, {"RANK": "9"}) == {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "4000",
    }
    assert rank_discovery.variables(LaunchInfo("none", 0, 1, 0, 1, 0), {}) == {}


def test_a_launcher_that_fails_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    info = tmp_path / "failing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: failing\nVersion: 1.0\n")
    entries = "[comm_utils.launchers]\nfailing = failing_launcher:discover\nmissing = no_such_launcher:discover\n"
    (info / "entry_points.txt").write_text(entries)
    (tmp_path / "failing_launcher.py").write_text("def discover(environ):\n    raise OSError('no scheduler')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with caplog.at_level(logging.WARNING, logger="comm"):
        assert find({**SRUN, "MASTER_ADDR": "127.0.0.1"}).launcher == "slurm"
    warnings = sorted(record.getMessage() for record in caplog.records)
    assert [text.partition(":")[0] for text in warnings] == [
        "launcher failing is ignored",
        "launcher missing is left out",
    ]
