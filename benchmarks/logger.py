"""What the comms logger adds to a call and to a step: ours on two libraries, and DeepSpeed's where it is installed.

    python benchmarks/logger.py [calls] [steps] [--rounds N] [--calls N] [--steps N]

Calls: a process each, with a world of one rank and a tensor of one element; they make a block of calls in turns, with
the logger off, on, and (ours) writing a trace. Times are medians over the rounds, µs a call; "at first" and "in the
end" are of the first and the last round, as what is recorded may make later calls slower.

Steps: two ranks, each of which sums four buckets in asynchronous operations while it multiplies matrices, in turns with
the logger off and on; buckets of 25 MiB, which is what DDP makes, and of 1 MiB. What a step takes more is the median of
the differences between neighbours, with the interval that holds it with a confidence of 95 %, from their order alone.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from importlib.util import find_spec

from measuring import free_port, positive, running

CALLS = """
import sys, time, torch
{setup}
tensor, other = torch.ones(1), torch.ones(1)
kinds = {{
    "all_reduce": lambda: dist.all_reduce(tensor),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(other, tensor),
    "broadcast": lambda: dist.broadcast(tensor, 0),
    "barrier": lambda: dist.barrier(),
    "reduce": lambda: dist.reduce(tensor, 0),
    "gather": lambda: dist.gather(tensor, [other], 0),
    "scatter": lambda: dist.scatter(other, [tensor], 0),
    "all_gather": lambda: dist.all_gather([other], tensor),
    "reduce_scatter": lambda: dist.reduce_scatter(other, [tensor]),
    "all_to_all": lambda: dist.all_to_all([other], [tensor]),
    "all_to_all_single, sizes": lambda: dist.all_to_all_single(other, tensor, [1], [1]),
    "async all_reduce": lambda: dist.all_reduce(tensor, async_op=True).wait(),
}}
for line in sys.stdin:
    state, calls, kind = line.rstrip().split(" ", 2)
    {turn}
    call = kinds[kind]
    for _ in range(20):
        call()
    start = time.perf_counter_ns()
    for _ in range(int(calls)):
        call()
    print("took", (time.perf_counter_ns() - start) / int(calls), flush=True)
    {after}
"""
STEPS = """
import statistics, sys, time, torch
{setup}
torch.set_num_threads(1)
buckets = [torch.ones({mib} * 2**18) for _ in range(4)]
matrix = torch.rand(256, 256)

def compute():
    for _ in range({mib}):
        matrix @ matrix @ matrix

def step():
    works = []
    for bucket in buckets:
        compute()
        works.append(dist.all_reduce(bucket, async_op=True))
    for _ in range(4):
        compute()
    for work in works:
        work.wait()
    dist.barrier()

def timed(state):
    {turn}
    step()
    start = time.perf_counter_ns()
    for _ in range({block}):
        step()
    return (time.perf_counter_ns() - start) / {block}

for bucket in buckets:
    bucket.zero_()  # sums stay finite
off, more = [], []
for number in range({steps}):
    first, second = ("off", "on") if number % 2 else ("on", "off")
    found = {{first: timed(first), second: timed(second)}}
    off.append(found["off"])
    more.append(found["on"] - found["off"])
if dist.get_rank() == 0:
    print("took", statistics.median(off), *more, flush=True)
dist.destroy_process_group()
"""
OURS = {
    "setup": "import comm_orchestrator as dist; dist.init_distributed({backend!r}, verbose=False)",
    "turn": "dist.start_trace({folder!r}) if state == 'trace' else dist.configure(enabled=state == 'on')",
    "after": "if state == 'trace': dist.stop_trace()",
}
DEEPSPEED = {
    "setup": "import deepspeed.comm as dist; dist.init_distributed('gloo', auto_mpi_discovery=False, verbose=False)",
    "turn": "dist.configure(enabled=state == 'on', prof_all=True)",
    "after": "",
}
KINDS = (
    "all_reduce",
    "all_gather_into_tensor",
    "broadcast",
    "barrier",
    "reduce",
    "gather",
    "scatter",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_single, sizes",
    "async all_reduce",
)
# DeepSpeed 0.19's logger ends the program with a KeyError.
NOT_LOGGED = {("DeepSpeed, gloo", "all_to_all")}


def programs(text: str, folder: str, **more: object) -> dict[str, str]:
    found = {}
    for backend in ("ccl", "gloo"):
        filled = {name: part.format(backend=backend, folder=folder) for name, part in OURS.items()}
        found[f"ours, {backend}"] = text.format(**filled, **more)
    if find_spec("deepspeed") is not None:
        found["DeepSpeed, gloo"] = text.format(**DEEPSPEED, **more)
    return found


def started(program: str, rank: int = 0, ranks: int = 1, port: int = 0) -> subprocess.Popen[str]:
    environ = {
        **os.environ,
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port()), "OMP_NUM_THREADS": "1"},
    }
    return subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    )


def answer(process: subprocess.Popen[str]) -> list[float]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("took "):
            return [float(word) for word in line.split()[1:]]
    raise SystemExit(f"a process ended with status {process.wait()}")


def took_us(process: subprocess.Popen[str], state: str, kind: str, calls: int) -> float:
    assert process.stdin is not None
    print(state, calls, kind, file=process.stdin, flush=True)
    return answer(process)[0] * 1e-3


def measure_calls(options: argparse.Namespace, folder: str) -> None:
    times: dict[tuple[str, str, str], list[float]] = {}
    starts = {name: partial(started, program) for name, program in programs(CALLS, folder).items()}
    states = {name: ("off", "on", "trace") if name.startswith("ours") else ("off", "on") for name in starts}
    with running(starts) as processes:
        for _ in range(options.rounds):
            for kind in KINDS:
                for name, process in processes.items():
                    for state in () if (name, kind) in NOT_LOGGED else states[name]:
                        found = took_us(process, state, kind, options.calls)
                        times.setdefault((name, kind, state), []).append(found)
        for process in processes.values():
            process.stdin.close()  # type: ignore[union-attr]
    print(f"µs a call{'':32} {'off':>8} {'on':>8} {'more':>8} {'trace':>8}   (more at first, in the end)")
    for kind in KINDS:
        for name in starts:
            if (name, kind) in NOT_LOGGED:
                continue
            off = times[name, kind, "off"]
            more = {
                state: [a - b for a, b in zip(times[name, kind, state], off, strict=True)] for state in states[name][1:]
            }
            on = times[name, kind, "on"]
            figures = [statistics.median(off), statistics.median(on), statistics.median(more["on"])]
            line = " ".join(f"{value:8.2f}" for value in figures)
            trace = f"{statistics.median(more['trace']):8.2f}" if "trace" in more else " " * 8
            print(f"{kind + ', ' + name:41} {line} {trace}   ({more['on'][0]:.2f}, {more['on'][-1]:.2f})")


def measure_steps(options: argparse.Namespace, folder: str) -> None:
    print(f"\nms a step of two ranks, overlapped{'':7} {'off':>8} {'more':>8} {'share':>8}   (95 %)")
    for mib, block, steps in ((25, 1, options.steps // 3), (1, 4, options.steps)):
        for name, program in programs(STEPS, folder, mib=mib, block=block, steps=max(steps, 3)).items():
            port = free_port()
            with running({f"rank {rank}": partial(started, program, rank, 2, port) for rank in range(2)}) as ranks:
                off_ns, *differences = answer(ranks["rank 0"])
            more_ns, (low_ns, high_ns) = statistics.median(differences), interval(differences)
            title = f"four times {mib} MiB, {name}"
            shares = f"{more_ns / off_ns:8.2%}   ({low_ns / off_ns:.2%} to {high_ns / off_ns:.2%})"
            print(f"{title:41} {off_ns * 1e-6:8.3f} {more_ns * 1e-6:8.4f} {shares}", flush=True)


def interval(values: list[float]) -> tuple[float, float]:
    """Between which two of the values their median lies with a confidence of 95 %, whatever their distribution."""
    ordered = sorted(values)
    below = max(math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))), 0)
    return ordered[below], ordered[-1 - below]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", choices=("calls", "steps", []), help="both by default")
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--calls", type=int, default=1000, help="in a block")
    parser.add_argument("--steps", type=int, help="how often off and on take turns; 30 for each round by default")
    options = parser.parse_args()
    options.steps = options.steps or 30 * options.rounds
    with tempfile.TemporaryDirectory() as folder:
        if options.what != ["steps"]:
            measure_calls(options, folder)
        if options.what != ["calls"]:
            measure_steps(options, folder)


if __name__ == "__main__":
    main()
