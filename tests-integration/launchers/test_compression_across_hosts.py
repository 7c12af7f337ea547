"""Compressed collectives between hosts: what crosses the network is what the codec says."""

from __future__ import annotations

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
def measured(backend):  # of a world of its own
    dist.init_distributed(backend, verbose=False, timeout=60)
    rank, W, count, found = dist.get_rank(), dist.get_world_size(), 1 << 21, []
    tensor, part, whole = torch.ones(count), torch.ones(count // W), torch.ones(count)
    calls = [(dist.all_reduce, (tensor,), codec) for codec in ("fp16", "bf16", "fp8", "int8", "int4", "onebit")]
    calls += [(dist.reduce_scatter_tensor, (part, whole), "int8"), (dist.all_gather_into_tensor, (whole, part), "int8")]
    calls += [(dist.all_to_all_single, (whole, tensor), "int8")]
    for call, arguments, codec in calls:
        for repeat in range(2):  # connections are made by the first calls
            dist.configure(enabled=True)
            dist.reset_log()
            before = settled()
            call(*arguments, compression=codec)
            sent = settled() - before
            (row,) = (row for row in dist.log_rows() if row.operation != "barrier")
            dist.configure(enabled=False)
        found.append((call.__name__, row.method, sent, row.wire_bytes))
    dist.destroy_process_group()
    return found

print(json.dumps({"rank": int(os.environ["RANK"]), "found": measured("gloo") + measured("ccl")}), flush=True)
"""
)


def test_payload_is_what_the_codec_says(two_hosts: tuple[Host, Host], tmp_path: Path) -> None:
    path, commands = tmp_path / "program.py", []
    path.write_text(SCRIPT)
    for rank, host in enumerate(two_hosts):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
        variables |= {"MASTER_ADDR": two_hosts[0].name, "OMP_NUM_THREADS": "1"}
        commands.append(host.command([sys.executable, str(path)], variables))
    found = [one["found"] for one in reports(run(commands, 240))]
    assert [len(one) for one in found] == [18, 18]
    for operation, method, sent, wire_bytes in [*found[0], *found[1]]:
        # What ranks compare before they send anything, and the barriers of the measurement, are a few KiB.
        assert sent == pytest.approx(wire_bytes, rel=0.03, abs=8192), (operation, method)
        assert wire_bytes > 100_000
