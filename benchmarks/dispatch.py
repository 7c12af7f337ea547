"""What one call costs above the library: ours, torch.distributed's, and the process group's own method.

    python benchmarks/dispatch.py [--rounds N] [--calls N] [--json FILE]

All are measured on a one-element float32 tensor, in turns (A B C A B C ...), on torch's fake process group, which moves
nothing, and on gloo with 1 and 2 ranks pinned to cores. A round is the mean of many calls; the table shows medians and
minima over the rounds, and ratios of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

WARM_UP_CALLS = 50


def contestants(dist: Any, c10d: Any, torch: Any) -> dict[str, Callable[[], object]]:
    """What is compared; each on a tensor of its own, whose value tells whether it really reduced."""
    tensors = {name: torch.ones(1) for name in ("torch", "ours", "group")}
    group, options = c10d.group.WORLD, c10d.AllreduceOptions()
    return {
        "torch.distributed.all_reduce": lambda: c10d.all_reduce(tensors["torch"]),
        "comm_orchestrator.all_reduce": lambda: dist.all_reduce(tensors["ours"]),
        "process group's allreduce + wait": lambda: group.allreduce([tensors["group"]], options).wait(),
    }


def measure(transport: str, rounds: int, calls: int) -> dict[str, Any]:
    """Initialise ``transport`` and time the contestants; microseconds a call."""
    import torch
    import torch.distributed as c10d

    import comm_orchestrator as dist

    torch.set_num_threads(1)
    if transport == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        c10d.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    dist.init_distributed("gloo" if transport == "gloo" else None, verbose=False)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
    check(dist, torch, transport)
    functions = contestants(dist, c10d, torch)
    for function in functions.values():
        for _ in range(WARM_UP_CALLS):
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = perf_counter()
            for _ in range(calls):
                function()
            times[name].append((perf_counter() - start) / calls * 1e6)
    result = {
        "transport": transport,
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "rounds": rounds,
        "calls": calls,
        "median_us": {name: statistics.median(values) for name, values in times.items()},
        "min_us": {name: min(values) for name, values in times.items()},
    }
    dist.destroy_process_group()
    return result


def check(dist: Any, torch: Any, transport: str) -> None:
    """The call that is timed gives the right sum."""
    tensor = torch.full((1,), float(dist.get_rank() + 1))
    for _ in range(2):  # the first call takes the long way, the second the one that is timed
        tensor.fill_(float(dist.get_rank() + 1))
        dist.all_reduce(tensor)
    size = dist.get_world_size()
    if transport != "fake" and tensor.item() != size * (size + 1) / 2:
        raise SystemExit(f"wrong result: {tensor.item()}")


def launch(ranks: int, arguments: list[str]) -> dict[str, Any]:
    """Run this file on ``ranks`` processes and return what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*launcher, __file__, *arguments, "--out", str(out)], check=True, env=environment)
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def report(result: dict[str, Any]) -> str:
    """One measurement as text."""
    medians, minima = result["median_us"], result["min_us"]
    reference = next(iter(medians))
    lines = [f"{result['transport']}, {result['ranks']} ranks, torch {result['torch']}: median (minimum), microseconds"]
    lines += [
        f"  {name:34}{medians[name]:9.2f} ({minima[name]:.2f})   {medians[name] / medians[reference]:.2f} x torch"
        for name in medians
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--calls", type=int, default=2000, help="calls a round; a tenth of it on gloo")
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--transport", choices=("fake", "gloo"), help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.transport:
        result = measure(options.transport, options.rounds, options.calls)
        if os.environ.get("RANK", "0") == "0":
            Path(options.out).write_text(json.dumps(result))
        return
    results = []
    for transport, ranks in (("fake", 1), ("gloo", 1), ("gloo", 2)):
        calls = options.calls if transport == "fake" else max(1, options.calls // 10)
        arguments = ["--transport", transport, "--rounds", str(options.rounds), "--calls", str(calls)]
        results.append(launch(ranks, arguments))
        print(report(results[-1]), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
