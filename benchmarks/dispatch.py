"""What one call costs above the library: ours, torch.distributed's, and the process group's own method.

    python benchmarks/dispatch.py [--rounds N] [--calls N] [--json FILE]

Each operation is measured on float32 tensors with one element for each rank, in turns (A B A B ...), on torch's fake
process group, which moves nothing, and on gloo with 1 and 2 ranks pinned to cores; where there is a GPU, also on NCCL
with 1 rank: the host's time, as it does not wait for the device. A round is the mean of many calls; the table shows
medians and minima over the rounds, and ratios of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from measuring import output_file, positive

WARM_UP_CALLS = 50


def contestants(dist: Any, c10d: Any, torch: Any, device: str) -> dict[str, dict[str, Callable[[], object]]]:
    """Operation -> what is compared; ours and torch's on tensors of their own."""
    W, root = dist.get_world_size(), dist.get_rank() == 0
    group, options, direct = c10d.group.WORLD, c10d.AllreduceOptions(), torch.ones(1, device=device)
    found: dict[str, dict[str, Callable[[], object]]] = {}
    for name, api in (("torch", c10d), ("ours", dist)):
        for operation, call in calls(api, torch, W, root, device).items():
            found.setdefault(operation, {})[name] = call
    found["all_reduce"]["group"] = lambda: group.allreduce([direct], options).wait()
    return found


def calls(api: Any, torch: Any, W: int, root: bool, device: str) -> dict[str, Callable[[], object]]:
    """Each operation as users call it, on one element for each rank."""
    ones = partial(torch.ones, device=device)
    one, many = ones(1), ones(W)
    part, received, exchanged = ones(1), ones(W), ones(W)
    sent, parts = [ones(1) for _ in range(W)], [ones(1) for _ in range(W)]
    # Since 2.13, torch warns at every use of the older names.
    gather = getattr(api, "all_gather_single", api.all_gather_into_tensor)
    scatter = getattr(api, "reduce_scatter_single", api.reduce_scatter_tensor)
    return {
        "all_reduce": lambda: api.all_reduce(one),
        "all_reduce, async_op": lambda: api.all_reduce(one, async_op=True).wait(),
        "broadcast": lambda: api.broadcast(one, 0),
        "barrier": lambda: api.barrier(),
        "all_gather_into_tensor": lambda: gather(received, one),
        "reduce_scatter_tensor": lambda: scatter(part, many),
        "all_to_all_single": lambda: api.all_to_all_single(exchanged, many),
        "all_to_all_single, sizes": lambda: api.all_to_all_single(exchanged, many, [1] * W, [1] * W),
        "reduce": lambda: api.reduce(one, 0),
        "all_gather": lambda: api.all_gather(parts, one),
        "reduce_scatter": lambda: api.reduce_scatter(part, sent),
        "all_to_all": lambda: api.all_to_all(parts, sent),
        "gather": lambda: api.gather(one, parts if root else None, 0),
        "scatter": lambda: api.scatter(part, sent if root else None, 0),
    }


def measure(transport: str, rounds: int, calls_a_round: int) -> dict[str, Any]:
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
    device = "cuda" if transport == "nccl" else "cpu"
    wait = torch.cuda.synchronize if transport == "nccl" else lambda: None
    check(dist, torch, transport, device)
    times: dict[str, dict[str, list[float]]] = {}
    for operation, functions in contestants(dist, c10d, torch, device).items():
        try:
            for function in functions.values():
                for _ in range(WARM_UP_CALLS):
                    function()
        except RuntimeError as error:  # gloo has all_to_all since torch 2.12
            if "does not support" not in str(error):
                raise
            continue
        times[operation] = {name: [] for name in functions}
        for _ in range(rounds):
            for name, function in functions.items():
                start = perf_counter()
                for _ in range(calls_a_round):
                    function()
                times[operation][name].append((perf_counter() - start) / calls_a_round * 1e6)
                wait()
    result = {
        "transport": transport,
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "rounds": rounds,
        "calls": calls_a_round,
        "operations": {
            operation: {
                name: {"median_us": statistics.median(values), "min_us": min(values)} for name, values in both.items()
            }
            for operation, both in times.items()
        },
    }
    dist.destroy_process_group()
    return result


def check(dist: Any, torch: Any, transport: str, device: str) -> None:
    """The call that is timed gives the right sum."""
    tensor = torch.full((1,), float(dist.get_rank() + 1), device=device)
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
    lines = [
        f"{result['transport']}, {result['ranks']} ranks, torch {result['torch']}: median (minimum), microseconds",
        f"  {'operation':24}{'torch.distributed':>20}{'comm_orchestrator':>20}   ours / torch",
    ]
    for operation, found in result["operations"].items():
        cells = [f"{found[name]['median_us']:.2f} ({found[name]['min_us']:.2f})" for name in ("torch", "ours")]
        ratio = found["ours"]["median_us"] / found["torch"]["median_us"]
        lines.append(f"  {operation:24}{cells[0]:>20}{cells[1]:>20}   {ratio:.2f}")
        if "group" in found:
            lines[-1] += f"   (the process group's own method: {found['group']['median_us']:.2f})"
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=41)
    parser.add_argument("--calls", type=int, default=2000, help="calls a round; a tenth of it on gloo and NCCL")
    parser.add_argument("--json", type=output_file, help="also write the results to this file")
    parser.add_argument("--transport", choices=("fake", "gloo", "nccl"), help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.transport:
        result = measure(options.transport, options.rounds, options.calls)
        if os.environ.get("RANK", "0") == "0":
            Path(options.out).write_text(json.dumps(result))
        return
    results = []
    on_gpu = [("nccl", 1)] if shutil.which("nvidia-smi") else []
    for transport, ranks in (("fake", 1), ("gloo", 1), ("gloo", 2), *on_gpu):
        calls = options.calls if transport == "fake" else max(1, options.calls // 10)
        arguments = ["--transport", transport, "--rounds", str(options.rounds), "--calls", str(calls)]
        results.append(launch(ranks, arguments))
        print(report(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
