"""What an asynchronous all_reduce of two ranks takes from the thread that starts it.

    python benchmarks/asynchronous.py [--rounds N] [--calls N]

start: from the call to its handle, µs. wait: of an operation that had 50 µs to complete, µs. computing: how much longer
products of matrices take while an operation of 64 KiB is under way whose other rank comes 30 ms later. processor: the
time of all threads of the process in a second in which it does nothing and such an operation is under way, ms. Medians
of the rounds with minima in brackets; ours on "ccl" and "gloo", and torch.distributed on gloo, in turns.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack

from logger import answer, started
from measuring import free_port, positive

PROGRAM = """
import os, sys, time, torch
{setup}
torch.set_num_threads(1)
rank = dist.get_rank()
os.sched_setaffinity(0, {{sorted(os.sched_getaffinity(0))[rank]}})
small, large, matrix = torch.zeros(16), torch.zeros(2**14), torch.rand(192, 192)
clock = time.perf_counter_ns

def pause(us):
    until = clock() + us * 1000
    while clock() < until:
        pass

def start_and_wait(calls):
    starts, waits = [], []
    for _ in range(calls):
        begun = clock()
        work = dist.all_reduce(small, async_op=True)
        starts.append(clock() - begun)
        pause(50)
        begun = clock()
        work.wait()
        waits.append(clock() - begun)
    return sorted(starts)[calls // 2] * 1e-3, sorted(waits)[calls // 2] * 1e-3

def computed():
    begun = clock()
    while clock() - begun < 20_000_000:
        matrix @ matrix
        yield

def late(during):
    # What rank 0 does while rank 1 is late.
    dist.barrier()
    if rank == 1:
        time.sleep(during)
    work = dist.all_reduce(large, async_op=True)
    found = None
    if rank == 0:
        begun, used = clock(), time.process_time_ns()
        if during < 0.5:
            found = sum(1 for _ in computed())
        else:
            time.sleep(during * 0.9)
            found = (time.process_time_ns() - used) / (clock() - begun) * 1e3
    work.wait()
    return found

def alone():
    dist.barrier()
    return sum(1 for _ in computed()) if rank == 0 else time.sleep(0.025)

for line in sys.stdin:
    calls = int(line)
    start_and_wait(20)
    start, wait = start_and_wait(calls)
    without, during = [], []
    for _ in range(5):
        without.append(alone())
        during.append(late(0.03))
    busy_ms = late(1.0)
    if rank == 0:
        more = sorted(without)[2] / max(sorted(during)[2], 1) - 1
        print("took", start, wait, more * 100, busy_ms, flush=True)
    else:
        print("took", 0, flush=True)
dist.destroy_process_group()
"""
OURS = "import comm_orchestrator as dist; dist.init_distributed({!r}, verbose=False)"
SETUPS = {
    "ours, ccl": OURS.format("ccl"),
    "ours, gloo": OURS.format("gloo"),
    "torch, gloo": "import torch.distributed as dist; dist.init_process_group('gloo')",
}
COLUMNS = ("start, µs", "wait, µs", "computing, % longer", "processor, ms a second")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--calls", type=int, default=500, help="in a block")
    options = parser.parse_args()
    found: dict[str, list[list[float]]] = {name: [] for name in SETUPS}
    with ExitStack() as stack:
        running = {}
        for name, setup in SETUPS.items():
            program, port = PROGRAM.format(setup=setup), free_port()
            running[name] = [stack.enter_context(started(program, rank, 2, port)) for rank in range(2)]
        for _ in range(options.rounds):
            for name, ranks in running.items():
                for process in ranks:
                    assert process.stdin is not None
                    print(options.calls, file=process.stdin, flush=True)
                of_first, *_ = [answer(process) for process in ranks]
                found[name].append(of_first)
        for ranks in running.values():
            for process in ranks:
                process.stdin.close()  # type: ignore[union-attr]
    print(f"{'':14} " + " ".join(f"{column:>24}" for column in COLUMNS))
    for name, rounds in found.items():
        cells = [f"{statistics.median(one):.2f} ({min(one):.2f})" for one in zip(*rounds, strict=True)]
        print(f"{name:14} " + " ".join(f"{cell:>24}" for cell in cells))


if __name__ == "__main__":
    main()
