"""Time from the start of processes to the end of their first collective: these packages beside bare torch, on gloo.

    python benchmarks/startup.py --ranks 1 2 4 --rounds 15

Both programs are started in turns, with the variables of ``env://`` and no launcher; a round counts the rank that was
last. Every sum is checked. Prints a table, or JSON with ``--json``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time

from measuring import free_port, positive, running

TORCH = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.ones(1)
dist.all_reduce(tensor)
print(time.time(), tensor.item(), flush=True)
dist.destroy_process_group()
"""
OURS = """
import time, torch, comm_orchestrator as dist
dist.init_distributed({arguments}verbose=False)
tensor = torch.ones(1)
dist.all_reduce(tensor)
print(time.time(), tensor.item(), flush=True)
dist.destroy_process_group()
"""
PROGRAMS = {
    "torch": TORCH,
    "comm_orchestrator": OURS.format(arguments='"gloo", '),
    "comm_orchestrator, backend chosen by itself": OURS.format(arguments=""),
}


def once(program: str, ranks: int) -> float:
    """Seconds until the last of ``ranks`` processes had its first result.

    Raises:
        SystemExit: a rank failed, or its result is wrong.
    """
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    environ["OMP_NUM_THREADS"] = "1"
    start = time.time()
    command = [sys.executable, "-c", program]
    starts = {
        f"rank {rank}": functools.partial(
            subprocess.Popen, command, env={**environ, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    }
    ends = []
    with running(starts) as processes:
        for name, process in processes.items():
            out, _ = process.communicate(timeout=300)
            if not out:
                break  # as a rank failed
            end, total = map(float, out.split())
            if total != ranks:
                raise SystemExit(f"{name}: wrong result: got {total}, expected {ranks}")
            ends.append(end)
    return max(ends) - start


def measure(ranks: int, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for program in PROGRAMS.values():
        once(program, ranks)  # files into the page cache, bytecode onto disk
    for number in range(rounds):
        names = list(PROGRAMS)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times[name].append(once(PROGRAMS[name], ranks))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = []
    for ranks in options.ranks:
        times = measure(ranks, options.rounds)
        base = statistics.median(times["torch"])
        for name, values in times.items():
            median = statistics.median(values)
            row = {"ranks": ranks, "program": name, "median_s": median, "min_s": min(values)}
            report.append({**row, "ratio": median / base, "more_ms": (median - base) * 1e3, "rounds": len(values)})
    if options.json:
        print(json.dumps(report, indent=2))
        return
    print(f"{'ranks':>5}  {'program':44}{'median s':>9}{'min s':>8}{'ratio':>7}{'more ms':>9}")
    for row in report:
        numbers = f"{row['median_s']:9.3f}{row['min_s']:8.3f}{row['ratio']:7.2f}{row['more_ms']:9.0f}"
        print(f"{row['ranks']:5}  {row['program']:44}{numbers}")


if __name__ == "__main__":
    main()
