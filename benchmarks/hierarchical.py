"""What hierarchical collectives gain: two hosts with two ranks each, and a slow link between them.

    python benchmarks/hierarchical.py [--rate 1gbit] [--sizes BYTES ...] [--rounds N] [--write]

Takes four to five minutes on two cores. Needs root: the hosts are namespaces of this machine, and Linux's ``tbf``
limits the link between them in both directions. In each round, all_reduce of float32 takes turns on gloo in one step (a
ring), on gloo hierarchically, on gloo as the library chooses, on oneCCL in one step, hierarchically with shared memory
within the hosts and oneCCL between them, and on these as the library chooses, all in the same ranks; the slowest rank
counts. The same for reduce_scatter, all_gather and broadcast of 16 MiB, or of the largest size where that is less.
Results are compared with the exact ones. What a host sent is what TCP had acknowledged to it (``ss``), of one call of
each. Ranks are numbered host by host, and then round-robin.

Each target is printed with its ratio, and is met where the lower end of the 95 % interval is; "never slower" is met
where the interval reaches 1.

``--write`` puts the tables and the targets into docs/hierarchical.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from measuring import KIB, MIB, Ratio, Table, Verdict, machine, named, positive, put_between, targets_table
from shaped_hosts import RATES, acknowledged_bytes, run_ranks, spelled

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "hierarchical.md"
BEGIN, END = "<!-- begin: python benchmarks/hierarchical.py --write -->", "<!-- end -->"
NUMBERED = {"host by host": [0, 0, 1, 1], "round-robin": [0, 1, 0, 1]}
#: By contestant, what ``set_hierarchical`` is told.
CONTESTANTS: dict[str, Any] = {
    "gloo": False,
    "gloo, hierarchical": 0,
    "gloo, chosen": "auto",
    "oneCCL": False,
    "shared memory and oneCCL": 0,
    "chosen": "auto",
}
#: In one step, by what the library chooses.
ONE_STEP_OF = {"gloo, chosen": "gloo", "chosen": "oneCCL"}
OTHERS, OTHERS_BYTES = ("reduce_scatter", "all_gather", "broadcast"), 16 * MIB
#: From which size on hierarchical calls have targets, and how many times as fast as gloo's ring they are to be.
LARGE_BYTES = 16 * MIB
TARGETS = {"host by host": 1.4, "round-robin": 2.5}
#: How much more a host may send than the tensor.
BYTES_OFF = 0.03
#: By operation and size, and by contestant: times ``s`` of the rounds, and ``bytes`` that a host sent.
Found = dict[tuple[str, int], dict[str, dict[str, Any]]]


def tasks(sizes: Sequence[int]) -> list[tuple[str, int]]:
    return [("all_reduce", size) for size in sizes] + [(name, min(OTHERS_BYTES, max(sizes))) for name in OTHERS]


class Work:
    """An operation on float32 of ``size`` bytes, on the side that has all of it, and its right result on this rank."""

    def __init__(self, operation: str, size: int, rank: int, world_size: int) -> None:
        import torch

        self.operation = operation
        plain = (torch.arange(size // 4) % 1000).float()
        mine = slice(rank * len(plain) // world_size, (rank + 1) * len(plain) // world_size)
        sources = [plain * (other + 1) for other in range(world_size)]
        self.source = sources[rank]
        if operation == "all_reduce":
            self.right = plain * sum(range(1, world_size + 1))
        elif operation == "reduce_scatter":
            self.right = (plain * sum(range(1, world_size + 1)))[mine]
        elif operation == "all_gather":
            self.source = self.source[mine].clone()
            parts = (source.chunk(world_size)[other] for other, source in enumerate(sources))
            self.right = torch.cat(list(parts))
        else:
            self.right = sources[0]
        self.result = torch.empty_like(self.right)

    def prepare(self) -> None:
        """Undo what the last call did."""
        self.result.fill_(-1.0)
        if self.operation in ("all_reduce", "broadcast"):
            self.result.copy_(self.source)

    def __call__(self, group: Any) -> None:
        import comm_orchestrator as dist

        if self.operation == "all_reduce":
            dist.all_reduce(self.result, group=group)
        elif self.operation == "reduce_scatter":
            dist.reduce_scatter_tensor(self.result, self.source, group=group)
        elif self.operation == "all_gather":
            dist.all_gather_into_tensor(self.result, self.source, group=group)
        else:
            dist.broadcast(self.result, 0, group=group)


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
    for name, setting in CONTESTANTS.items():
        dist.set_hierarchical(setting, groups[name])

    def timed(name: str, calls: int, work: Work) -> float:
        work.prepare()
        dist.barrier(groups["gloo"])
        begin = time.perf_counter()
        for _ in range(calls):
            work(groups[name])
        return (time.perf_counter() - begin) / calls

    def settled() -> int:
        """Return what was delivered, once no rank waits for an acknowledgement."""
        dist.barrier(groups["gloo"])
        before = -1
        while (delivered := acknowledged_bytes()) != before:
            before = delivered
            time.sleep(0.05)  # longer than TCP delays an acknowledgement
        dist.barrier(groups["gloo"])
        return delivered

    found: list[dict[str, dict[str, Any]]] = []
    for operation, size in tasks(sizes):
        work = Work(operation, size, rank, W)
        of_task: dict[str, dict[str, Any]] = {name: {"s": [], "bytes": 0} for name in CONTESTANTS}
        for name in CONTESTANTS:  # connections are made, memory is touched, and what is chosen is measured
            timed(name, 1, work)
            if not torch.equal(work.result, work.right):
                raise SystemExit(f"{operation} of {named(size)}, {name}, rank {rank}: got a wrong result")
            before = settled()
            timed(name, 1, work)
            of_task[name]["bytes"] = settled() - before
        turns = list(CONTESTANTS)
        for _ in range(rounds):
            for name in turns:
                duration = torch.tensor([timed(name, max(1, min(50, MIB // size)), work)], dtype=torch.float64)
                dist.all_reduce(duration, "max", group=groups["gloo"])
                of_task[name]["s"].append(float(duration))
            turns.append(turns.pop(0))
        found.append(of_task)
    if rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


def measured(rate: str, host_of: list[int], sizes: list[int], rounds: int) -> Found:
    """Return times and bytes by task and contestant on a link of ``rate``."""
    program = [__file__, "--as-rank", "--sizes", *map(str, sizes), "--rounds", str(rounds)]
    found = json.loads(run_ranks(rate, host_of, program).splitlines()[-1])
    return dict(zip(tasks(sizes), found, strict=True))


def gain(of_task: dict[str, dict[str, Any]], name: str, beside: str) -> Ratio:
    """Return how many times as fast a contestant is as another one."""
    return Ratio.of(of_task[beside]["s"], of_task[name]["s"])


def table(rate: str, numbered: str, found: Found) -> Table:
    columns = (("gloo, hierarchical", "gloo"), ("gloo, chosen", "gloo"), ("chosen", "oneCCL"))
    lines = []
    for (operation, size), of_task in found.items():
        cells = [f"{operation} {named(size)}"]
        for one in of_task.values():
            cells.append(f"{statistics.median(one['s']) * 1e3:.2f}, {one['bytes'] / MIB:.2f}")
        cells += [str(gain(of_task, *column)) for column in columns]
        lines.append(cells)
    title = f"Two hosts with two ranks each, {spelled(rate)}, ranks numbered {numbered}; ms, and MiB that a host sent"
    return Table(title, ["", *CONTESTANTS, *(f"{name} / {beside}" for name, beside in columns)], lines)


def targets(rate: str, numbered: str, found: Found) -> list[Verdict]:
    """Return what is asked for with these numbers of ranks, of the sizes that were measured."""

    def at(task: tuple[str, int], name: str) -> str:
        return f"{numbered}, {task[0]} {named(task[1])}, {name}"

    def gains(some: Iterable[tuple[str, int]], pairs: dict[str, str]) -> dict[str, Ratio]:
        return {at(task, name): gain(found[task], name, beside) for task in some for name, beside in pairs.items()}

    large = [task for task in found if task[1] >= LARGE_BYTES]
    sums = [task for task in large if task[0] == "all_reduce"]
    verdicts = []
    if sums and rate == RATES[0]:
        least = TARGETS[numbered]
        for name in ("gloo, hierarchical", "gloo, chosen"):
            target = f"{name}, all_reduce from 16 MiB: at least {least:g} times as fast as gloo's ring"
            verdicts.append(Verdict.at_least(target, least, gains(sums, {name: "gloo"})))
    if large:
        target = "shared memory and oneCCL from 16 MiB: never slower than oneCCL in one step"
        verdicts.append(Verdict.never_below(target, gains(large, {"shared memory and oneCCL": "oneCCL"})))
        sent = {
            at(task, name): found[task][name]["bytes"] / task[1]
            for task in large
            for name in ("gloo, hierarchical", "shared memory and oneCCL")
        }
        target = f"bytes that a host sends: at most the tensor's within {BYTES_OFF:.0%}"
        verdicts.append(Verdict.within(target, BYTES_OFF, sent, less=True))
    verdicts.append(
        Verdict.never_below("chosen by the library: never slower than in one step", gains(found, ONE_STEP_OF))
    )
    return verdicts


def main(arguments: list[str] | None = None, write: Callable[[str], object] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", choices=RATES, default=RATES[0], help="of the link")
    sizes = [4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes, help="bytes of the tensors of all_reduce")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--write", action="store_true", help="put tables and targets into docs/hierarchical.md")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.as_rank:
        return rank_main(given.sizes, given.rounds)
    facts = machine()
    parts = [
        f"Measured on {facts['processor']}, {facts['cores']} cores, Linux {facts['kernel']}, {given.rounds} rounds."
    ]
    verdicts: list[Verdict] = []
    for numbered, host_of in NUMBERED.items():
        found = measured(given.rate, host_of, given.sizes, given.rounds)
        parts.append(table(given.rate, numbered, found).markdown())
        write(parts[-1] + "\n")
        verdicts += targets(given.rate, numbered, found)
    asked = targets_table(verdicts)
    write(asked.text() + "\n")
    parts.append(asked.markdown())
    if given.write:
        put_between(PAGE, BEGIN, END, lambda _: "\n\n".join(parts) + "\n")
    return None


if __name__ == "__main__":
    main()
