"""What the comms logger adds to a call: ours on two libraries, and DeepSpeed's where it is installed.

    python benchmarks/logger.py [--rounds N] [--calls N]

A process each, with a world of one rank and a tensor of one element; they make a block of calls in turns, with the
logger off and then on. Times are medians over the rounds, µs a call; "at first" and "in the end" are of the first and
the last round, as what is recorded may make later calls slower.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec

from measuring import free_port

CHILD = """
import sys, time, torch
{setup}
tensor = torch.ones(1)
kinds = {{"sync": lambda: dist.all_reduce(tensor), "async": lambda: dist.all_reduce(tensor, async_op=True).wait()}}
for line in sys.stdin:
    state, kind, calls = line.split()
    {turn}
    call = kinds[kind]
    for _ in range(20):
        call()
    start = time.perf_counter_ns()
    for _ in range(int(calls)):
        call()
    print("took", (time.perf_counter_ns() - start) / int(calls), flush=True)
"""
OURS = {
    "setup": "import comm_orchestrator as dist; dist.init_distributed({backend!r}, verbose=False)",
    "turn": "dist.configure(enabled=state == 'on')",
}
DEEPSPEED = {
    "setup": "import deepspeed.comm as dist; dist.init_distributed('gloo', auto_mpi_discovery=False, verbose=False)",
    "turn": "dist.configure(enabled=state == 'on', prof_all=True)",
}


def programs() -> dict[str, str]:
    found = {}
    for backend in ("ccl", "gloo"):
        setup = OURS["setup"].format(backend=backend)
        found[f"ours, {backend}"] = CHILD.format(setup=setup, turn=OURS["turn"])
    if find_spec("deepspeed") is not None:
        found["DeepSpeed, gloo"] = CHILD.format(**DEEPSPEED)
    return found


def started(program: str) -> subprocess.Popen[str]:
    environ = {
        **os.environ,
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"},
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    )


def took_us(process: subprocess.Popen[str], state: str, kind: str, calls: int) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    print(state, kind, calls, file=process.stdin, flush=True)
    for line in process.stdout:
        if line.startswith("took "):
            return float(line.split()[1]) * 1e-3
    raise SystemExit(f"a process ended with status {process.wait()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=1000, help="in a block")
    options = parser.parse_args()
    times: dict[tuple[str, str, str], list[float]] = {}
    with ExitStack() as stack:
        running = {name: stack.enter_context(started(program)) for name, program in programs().items()}
        for _ in range(options.rounds):
            for kind in ("sync", "async"):
                for name, process in running.items():
                    for state in ("off", "on"):
                        found = took_us(process, state, kind, options.calls)
                        times.setdefault((name, kind, state), []).append(found)
        for process in running.values():
            process.stdin.close()  # type: ignore[union-attr]
    print(f"{'':24} {'off':>8} {'on':>8} {'more':>8}   (at first, in the end)")
    for name in running:
        for kind in ("sync", "async"):
            off, on = times[name, kind, "off"], times[name, kind, "on"]
            more = [a - b for a, b in zip(on, off, strict=True)]
            medians = statistics.median(off), statistics.median(on), statistics.median(more)
            figures = " ".join(f"{value:8.2f}" for value in medians)
            print(f"{name + ', ' + kind:24} {figures}   ({more[0]:.2f}, {more[-1]:.2f})")


if __name__ == "__main__":
    main()
