"""Ranks on two hosts of one machine, with a link of limited speed between them. Needs root."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["MORE_RATES", "RATES", "acknowledged_bytes", "gbit_per_s", "run_ranks", "spelled"]

ROOT = Path(__file__).resolve().parent.parent
#: Of the link, as ``tc`` spells them.
RATES = ("1gbit", "10gbit")
MORE_RATES = ("250mbit", "2500mbit", "5gbit")
# What ``tbf`` lets through between two ticks of the kernel's clock.
_BURST = "256kb"
_PORT = 29400


def spelled(rate: str) -> str:
    """Return a rate as people write it."""
    return rate.replace("gbit", " Gbit/s").replace("mbit", " Mbit/s")


def gbit_per_s(rate: str) -> float:
    """Return a rate as a number."""
    return float(rate[: -len("gbit")]) * (1e-3 if rate.endswith("mbit") else 1)


def acknowledged_bytes() -> int:
    """Return the bytes that this host's connections over its network have delivered."""
    listed = subprocess.run(["ss", "-tinH"], capture_output=True, text=True, check=True).stdout
    connections = re.split(r"\n(?=\S)", listed)
    remote = [text for text in connections if _leaves_this_host(text.split("\n")[0])]
    return sum(int(found) for text in remote for found in re.findall(r"bytes_acked:(\d+)", text))


def _leaves_this_host(line: str) -> bool:
    own, peer = (address.rpartition(":")[0].removeprefix("[::ffff:").rstrip("]") for address in line.split()[3:5])
    return own != peer and not own.startswith("127.")


def run_ranks(rate: str, host_of: Sequence[int], program: Sequence[str]) -> str:
    """Run ``program`` once for each rank, on two hosts; return what rank 0 printed.

    Args:
        rate: of the link, in both directions, limited by Linux's ``tbf``.
        host_of: the host of each rank, 0 or 1. Each host has half of the cores.

    Raises:
        SystemExit: there can be no such hosts here, or a rank failed.
    """
    sys.path.insert(0, str(ROOT / "tests-integration"))
    from launchers.hosts import missing, two_hosts

    if missing():
        raise SystemExit(missing())
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    with two_hosts("shaped-a", "shaped-b") as hosts:
        for host in hosts:
            limit = f"tc qdisc add dev eth0 root tbf rate {rate} burst {_BURST} latency 50ms"
            subprocess.run(host.command(limit.split()).arguments, check=True)
        ranks = []
        for rank, place in enumerate(host_of):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(host_of)),
                "LOCAL_RANK": str(host_of[:rank].count(place)),
                "LOCAL_WORLD_SIZE": str(host_of.count(place)),
                "MASTER_ADDR": hosts[host_of[0]].address,
                "MASTER_PORT": str(_PORT),
                "GLOO_SOCKET_IFNAME": "eth0",
                "COMM_JOB_SECRET": "of-a-benchmark-on-one-machine-alone",
                "OMP_NUM_THREADS": "1",
                # Bytes are counted once nothing is sent any more, and the watch asks the store again and again.
                "COMM_CHECKS__ENABLED": "false",
            }
            own = cores[place * half : (place + 1) * half] or cores
            pinned = ["taskset", "--cpu-list", ",".join(map(str, own))]
            command = hosts[place].command([*pinned, sys.executable, *program]).arguments
            ranks.append(
                subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)
            )
        outputs = [one.communicate()[0] for one in ranks]
        if any(one.returncode for one in ranks):
            raise SystemExit(f"exit statuses {[one.returncode for one in ranks]}")
    return outputs[0]
