"""What compression gains on a slow network: all_reduce of float32 between two hosts, by codec and speed of the link.

    python benchmarks/compression.py [--rates 1gbit 10gbit] [--ranks-per-host N] [--size BYTES] [--rounds N] [--write]

Needs root: the hosts are namespaces of this machine, and Linux's ``tbf`` limits the link between them in both
directions. In each round, all codecs and gloo's own all_reduce take turns in the same ranks; the slowest rank counts.
Results are compared with the exact sum, to the bounds of the codecs. What one host sent is what TCP had acknowledged to
it (``ss``), of one call of each.

``--write`` puts the table into docs/compression.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import MIB, interval, machine, named

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compression.md"
BEGIN, END = "<!-- begin: python benchmarks/compression.py --write -->", "<!-- end -->"
#: Of which sums keep something of every element; ``error`` is relative to the largest of the sum.
CODECS = ("fp16", "bf16", "fp8", "int8", "int4", "onebit", "topk", "powersgd")
PORT = 29400
#: What ``tbf`` lets through between two ticks of the kernel's clock.
BURST = {"1gbit": "500kb", "10gbit": "5mb"}


def acknowledged_bytes() -> int:
    """Return the bytes that this host's connections over its network have delivered."""
    listed = subprocess.run(["ss", "-tinH"], capture_output=True, text=True, check=True).stdout
    connections = re.split(r"\n(?=\S)", listed)
    remote = [text for text in connections if "127.0.0.1" not in text.split("\n")[0]]
    return sum(int(found) for text in remote for found in re.findall(r"bytes_acked:(\d+)", text))


def rank_main(size_bytes: int, rounds: int) -> None:
    import torch

    import comm_orchestrator as dist

    torch.set_num_threads(1)
    dist.init_distributed("gloo", verbose=False, timeout=120)
    rank, W = dist.get_rank(), dist.get_world_size()
    count = size_bytes // 4
    source = torch.randn(1024, count // 1024, generator=torch.Generator().manual_seed(0)) * (rank + 1)
    total = source / (rank + 1) * sum(range(1, W + 1))
    handles: dict[str, Any] = {"float32": None, **{name: dist.Compression(name) for name in CODECS}}
    found: dict[str, dict[str, Any]] = {name: {"s": [], "bytes": 0, "error": 0.0} for name in handles}
    tensor = torch.empty_like(source)

    def timed(name: str) -> float:
        tensor.copy_(source)
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor, compression=handles[name])
        return time.perf_counter() - begin

    for name in handles:  # connections are made, and memory is touched
        timed(name)
        dist.barrier()
        before = acknowledged_bytes()
        timed(name)
        dist.barrier()
        time.sleep(0.05)
        found[name]["bytes"] = acknowledged_bytes() - before
        found[name]["error"] = float((tensor - total).abs().max() / total.abs().max())
    for _ in range(rounds):
        for name in handles:
            duration = torch.tensor([timed(name)], dtype=torch.float64)
            dist.all_reduce(duration, "max")
            found[name]["s"].append(float(duration))
    if rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


def measured(rate: str, ranks_per_host: int, size_bytes: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Return times, bytes and errors by codec on a link of ``rate``."""
    sys.path.insert(0, str(ROOT / "tests-integration"))
    from launchers.hosts import missing, two_hosts

    if missing():
        raise SystemExit(missing())
    cores = sorted(os.sched_getaffinity(0))
    with two_hosts("compression-a", "compression-b") as hosts:
        for host in hosts:
            shape = [
                "tc",
                "qdisc",
                "add",
                "dev",
                "eth0",
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "256kb",
                "latency",
                "50ms",
            ]
            subprocess.run(host.command(shape).arguments, check=True)
        ranks = []
        for rank in range(2 * ranks_per_host):
            host = hosts[rank // ranks_per_host]
            program = [sys.executable, __file__, "--as-rank", "--size", str(size_bytes), "--rounds", str(rounds)]
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(2 * ranks_per_host),
                "LOCAL_RANK": str(rank % ranks_per_host),
                "LOCAL_WORLD_SIZE": str(ranks_per_host),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": "eth0",
                "COMM_JOB_SECRET": "of-a-benchmark-on-one-machine-alone",
                "OMP_NUM_THREADS": "1",
            }
            pinned = ["taskset", "--cpu-list", str(cores[rank // ranks_per_host % len(cores)])]
            command = host.command([*pinned, *program]).arguments
            ranks.append(
                subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)
            )
        outputs = [one.communicate()[0] for one in ranks]
        if any(one.returncode for one in ranks):
            raise SystemExit(f"exit statuses {[one.returncode for one in ranks]}")
    found: dict[str, dict[str, Any]] = json.loads(outputs[0].splitlines()[-1])
    return found


def ratio(found: dict[str, dict[str, Any]], name: str, rounds: int) -> tuple[float, float]:
    """Return how many times faster than float32 a codec is, and the lower end of the 95 % interval."""
    plain, times = found["float32"]["s"], found[name]["s"]

    def of(some: Any) -> float:
        return statistics.median(plain[i] for i in some) / statistics.median(times[i] for i in some)

    return of(range(rounds)), interval(of, rounds)[0]


def table(rate: str, ranks_per_host: int, size_bytes: int, found: dict[str, dict[str, Any]]) -> str:
    rounds, ranks = len(found["float32"]["s"]), "one rank" if ranks_per_host == 1 else f"{ranks_per_host} ranks"
    lines = [
        f"Two hosts with {ranks} each, {rate.replace('bit', ' bit').replace('g ', ' G')}/s, {named(size_bytes)}:",
        "",
        "| codec | ms | times as fast (lower end) | MiB a host sent | largest error / largest sum |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, one in found.items():
        gain, low = ratio(found, name, rounds)
        lines.append(
            f"| {name} | {statistics.median(one['s']) * 1e3:.1f} | {gain:.2f} ({low:.2f}) | {one['bytes'] / MIB:.2f} | "
            f"{one['error']:.1e} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None, write: Callable[[str], object] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", choices=BURST, default=list(BURST), help="of the link")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--size", type=int, default=64 * MIB, help="bytes of the tensor")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/compression.md")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.as_rank:
        return rank_main(given.size, given.rounds)
    facts = machine()
    parts = [
        f"Measured on {facts['processor']}, {facts['cores']} cores, Linux {facts['kernel']}, {given.rounds} rounds."
    ]
    for rate in given.rates:
        found = measured(rate, given.ranks_per_host, given.size, given.rounds)
        parts.append(table(rate, given.ranks_per_host, given.size, found))
        write(parts[-1] + "\n")
    if given.write:
        text = PAGE.read_text()
        before, rest = text.split(BEGIN)
        after = rest.split(END, 1)[1]
        PAGE.write_text(f"{before}{BEGIN}\n" + "\n\n".join(parts) + f"\n{END}{after}")
    return None


if __name__ == "__main__":
    main()
