"""What hierarchical collectives gain: two hosts with two ranks each, and a slow link between them.

    python benchmarks/hierarchical.py [--rate 1gbit] [--sizes BYTES ...] [--rounds N] [--write]

Needs root: the hosts are namespaces of this machine, and Linux's ``tbf`` limits the link between them in both
directions. In each round, all_reduce of float32 takes turns on gloo in one step (a ring), on gloo hierarchically, on
oneCCL in one step, and hierarchically with shared memory within the hosts and oneCCL between them, all in the same
ranks; the slowest rank counts. Results are compared with the exact sum. What a host sent is what TCP had acknowledged
to it (``ss``), of one call of each. Ranks are numbered host by host, and then round-robin.

``--write`` puts the tables into docs/hierarchical.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import KIB, MIB, interval, machine, named, positive, put_between
from shaped_hosts import RATES, acknowledged_bytes, run_ranks, spelled

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "hierarchical.md"
BEGIN, END = "<!-- begin: python benchmarks/hierarchical.py --write -->", "<!-- end -->"
NUMBERED = {"host by host": [0, 0, 1, 1], "round-robin": [0, 1, 0, 1]}
CONTESTANTS = ("gloo", "gloo, hierarchical", "oneCCL", "shared memory and oneCCL", "chosen")


def rank_main(sizes: list[int], rounds: int) -> None:
    import torch

    import comm_orchestrator as dist

    torch.set_num_threads(1)
    dist.init_distributed("ccl", verbose=False, timeout=120)
    rank, W = dist.get_rank(), dist.get_world_size()
    groups = {
        name: dist.new_group(list(range(W)), backend="gloo" if name.startswith("gloo") else "ccl")
        for name in CONTESTANTS
    }
    for name, setting in zip(CONTESTANTS, (False, 0, False, 0, "auto"), strict=True):
        dist.set_hierarchical(setting, groups[name])
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for size in sizes:
        source = (torch.arange(size // 4) % 1000).float() * (rank + 1)
        total = source / (rank + 1) * sum(range(1, W + 1))
        tensor = torch.empty_like(source)
        calls = max(1, min(50, MIB // size))

        def timed(name: str, calls: int, tensor: Any = tensor, source: Any = source) -> float:
            tensor.copy_(source)
            dist.barrier(groups["gloo"])
            begin = time.perf_counter()
            for _ in range(calls):
                dist.all_reduce(tensor, group=groups[name])
            return (time.perf_counter() - begin) / calls

        def settled() -> int:
            """Return what was delivered, once no rank waits for an acknowledgement."""
            dist.barrier(groups["gloo"])
            before = -1
            while (delivered := acknowledged_bytes()) != before:
                before = delivered
                time.sleep(0.1)
            dist.barrier(groups["gloo"])
            return delivered

        of_size = found[str(size)] = {name: {"s": [], "bytes": 0} for name in CONTESTANTS}
        for name in CONTESTANTS:  # connections are made, and memory is touched
            timed(name, 1)
            assert torch.equal(tensor, total), (name, size)
            before = settled()
            timed(name, 1)
            of_size[name]["bytes"] = settled() - before
        for _ in range(rounds):
            for name in CONTESTANTS:
                duration = torch.tensor([timed(name, calls)], dtype=torch.float64)
                dist.all_reduce(duration, "max", group=groups["gloo"])
                of_size[name]["s"].append(float(duration))
    if rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


def measured(rate: str, host_of: list[int], sizes: list[int], rounds: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Return times and bytes by size and contestant on a link of ``rate``."""
    program = [__file__, "--as-rank", "--sizes", *map(str, sizes), "--rounds", str(rounds)]
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(run_ranks(rate, host_of, program).splitlines()[-1])
    return found


def gain(of_size: dict[str, dict[str, Any]], name: str, beside: str, rounds: int) -> str:
    """Write how many times faster a contestant is than another one, with the lower end of the 95 % interval."""
    plain, times = of_size[beside]["s"], of_size[name]["s"]

    def of(some: Any) -> float:
        return statistics.median(plain[i] for i in some) / statistics.median(times[i] for i in some)

    return f"{of(range(rounds)):.2f} ({interval(of, rounds)[0]:.2f})"


def table(rate: str, numbered: str, found: dict[str, dict[str, dict[str, Any]]], rounds: int) -> str:
    lines = [
        f"Two hosts with two ranks each, {spelled(rate)}, ranks numbered {numbered}; ms, and MiB that a host sent:",
        "",
        "| size | " + " | ".join(CONTESTANTS) + " | gloo's hierarchical beside its ring | chosen beside oneCCL |",
        "|---|" + "---:|" * (len(CONTESTANTS) + 2),
    ]
    for size, of_size in found.items():
        cells = [named(int(size))]
        for one in of_size.values():
            cells.append(f"{statistics.median(one['s']) * 1e3:.2f}, {one['bytes'] / MIB:.2f}")
        cells.append(gain(of_size, "gloo, hierarchical", "gloo", rounds))
        cells.append(gain(of_size, "chosen", "oneCCL", rounds))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None, write: Callable[[str], object] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", choices=RATES, default=RATES[0], help="of the link")
    sizes = [4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes, help="bytes of the tensor")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/hierarchical.md")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.as_rank:
        return rank_main(given.sizes, given.rounds)
    facts = machine()
    parts = [
        f"Measured on {facts['processor']}, {facts['cores']} cores, Linux {facts['kernel']}, {given.rounds} rounds."
    ]
    for numbered, host_of in NUMBERED.items():
        found = measured(given.rate, host_of, given.sizes, given.rounds)
        parts.append(table(given.rate, numbered, found, given.rounds))
        write(parts[-1] + "\n")
    if given.write:
        put_between(PAGE, BEGIN, END, lambda _: "\n\n".join(parts) + "\n")
    return None


if __name__ == "__main__":
    main()
