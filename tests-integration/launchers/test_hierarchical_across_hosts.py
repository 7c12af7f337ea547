"""Hierarchical collectives between hosts: what crosses the network, and what the log says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from launchers.hosts import Host
from launchers.launcher import reports
from launchers.processes import run
from launchers.traffic import SETTLED

SCRIPT = (
    SETTLED
    + """
def measured(backend, hierarchical):  # of a world of its own
    dist.init_distributed(backend, verbose=False, timeout=60, config={"hierarchical": hierarchical})
    rank, W = dist.get_rank(), dist.get_world_size()
    report = {"backend": backend, "hierarchical": hierarchical}
    count = 1 << 20
    for repeat in range(2):  # connections are made by the first calls
        report["sent"] = []
        gathered = torch.empty(count)
        tensor = (torch.arange(count) % 1000).float() * (rank + 1)
        for call in (
            lambda: dist.all_reduce(tensor),
            lambda: dist.broadcast(tensor, W - 1),
            lambda: dist.all_gather_into_tensor(gathered, torch.full((count // W,), float(rank))),
            lambda: dist.reduce_scatter_tensor(torch.empty(count // W), tensor),
        ):
            if not repeat:
                call()
                continue
            dist.configure(enabled=True)
            before = settled()
            call()
            report["sent"].append((settled() - before) / (4 * count))
    assert torch.equal(gathered, torch.arange(W).float().repeat_interleave(count // W))
    report["sum"] = float(tensor[999] / 999)
    report["methods"] = sorted({(row.operation, row.method) for row in dist.log_rows() if row.operation != "barrier"})
    dist.configure(enabled=False)
    dist.reset_log()
    dist.destroy_process_group()
    return report

settings = json.loads(sys.argv[1])
worlds = [measured(backend, setting) for backend in ("gloo", "ccl") for setting in settings]
print(json.dumps({"rank": int(os.environ["RANK"]), "worlds": worlds}), flush=True)
"""
)
OPERATIONS = ("all_gather_into_tensor", "all_reduce", "broadcast", "reduce_scatter_tensor")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "program.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("host_of", [(0, 0, 1, 1), (0, 1, 0, 1)])
def test_each_byte_crosses_the_network_once(
    two_hosts: tuple[Host, Host], script: Path, host_of: tuple[int, ...]
) -> None:
    """A host sends half of what the ranks of the other need of a reduction, or gather, and all of a broadcast."""
    in_steps, at_once = {"min_size_bytes": 0}, {"enabled": False}
    commands = []
    for rank, place in enumerate(host_of):
        variables = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_PORT": "29500"}
        variables |= {"MASTER_ADDR": two_hosts[0].name, "OMP_NUM_THREADS": "1"}
        program = [sys.executable, str(script), json.dumps([in_steps, at_once])]
        commands.append(two_hosts[place].command(program, variables))
    worlds = [(one["rank"], world) for one in reports(run(commands, 240)) for world in one["worlds"]]
    assert len(worlds) == 4 * 4
    for rank, world in worlds:
        name = "hierarchical(2 hosts x 2 ranks)" if world["hierarchical"] == in_steps else ""
        assert world["sum"] == 10
        assert world["methods"] == [[operation, name] for operation in OPERATIONS]
        if name:
            # Of a broadcast, from the last rank's host, the other one sends nothing.
            is_sender = host_of[rank] == host_of[-1]
            assert world["sent"] == pytest.approx([1, float(is_sender), 0.5, 0.5], rel=0.03, abs=0.003)
    for backend in ("gloo", "ccl"):
        flat = [world for _, world in worlds if (world["backend"], world["hierarchical"]) == (backend, at_once)]
        # In one step it is more, which shows that the measurement can tell.
        assert max(world["sent"][0] for world in flat) > 1.2
