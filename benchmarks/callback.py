"""What a callback from a thread of gloo costs: as it is, and where Python keeps what it knows of that thread.

    python benchmarks/callback.py [--rounds N] [--calls N]

Two processes, each a world of one rank, take turns. Each makes a block of asynchronous ``all_reduce`` of one element
and waits for each, without a callback and with an empty one; µs a call, medians of the rounds. See decision 13.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack

from logger import answer, started
from measuring import positive

PROGRAM = """
import sys, time, torch
import torch.distributed as dist
from comm_collectives.recorded.work import _keep_thread_state, _thread
dist.init_process_group("gloo")
tensor, keeps = torch.ones(1), {keeps}

def alone():
    dist.all_reduce(tensor, async_op=True).wait()

def back(_):
    if keeps and not _thread.has_state:
        _keep_thread_state()

def called_back():
    work = dist.all_reduce(tensor, async_op=True)
    work.get_future().add_done_callback(back)
    work.wait()

for line in sys.stdin:
    took = []
    for call in (alone, called_back):
        for _ in range(20):
            call()
        start = time.perf_counter_ns()
        for _ in range(int(line)):
            call()
        took.append((time.perf_counter_ns() - start) / int(line))
    print("took", *took, flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--calls", type=int, default=500, help="in a block")
    options = parser.parse_args()
    found: dict[str, list[list[float]]] = {"as it is": [], "kept": []}
    with ExitStack() as stack:
        running = {name: stack.enter_context(started(PROGRAM.format(keeps=name == "kept"))) for name in found}
        for _ in range(options.rounds):
            for name, process in running.items():
                assert process.stdin is not None
                print(options.calls, file=process.stdin, flush=True)
                found[name].append(answer(process))
        for process in running.values():
            process.stdin.close()  # type: ignore[union-attr]
    print(f"{'thread state':14} {'without':>8} {'with':>8} {'callback':>9}")
    for name, rounds in found.items():
        without, with_one = (statistics.median(column) * 1e-3 for column in zip(*rounds, strict=True))
        more = statistics.median(after - before for before, after in rounds) * 1e-3
        print(f"{name:14} {without:8.2f} {with_one:8.2f} {more:9.2f}")


if __name__ == "__main__":
    main()
