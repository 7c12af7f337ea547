"""What it costs that groups in shared memory learn how to move data: a steady loop with learning on and off.

    python benchmarks/learning.py [--sizes BYTES ...] [--rounds N] [--write]

Takes two minutes. Two ranks, each on a core of its own, have a group that learns, one with
``CCL_SHARED_MEMORY_LEARNING=0``, which moves data as the host's profile says, and one for each transfer with
``CCL_SHARED_MEMORY_TRANSFER``. First every group makes so many calls that the learning one has compared its methods.
Then the groups take turns, another one first in each round, with a loop of all_reduce of float32. Results are compared
with the exact ones. The slower rank counts, and the mean of the rounds: trials are rare, and a median would hide them.
After a pause, such as the turns of the others, a group looks at its other methods for 1 % of the pause at most. That is
no steady loop: the first calls after each pause are not timed, in any group.

Learning is compared with what was the fastest without it in every other round, by the rounds between them. At 8 KiB and
less, where nothing is learned and there is no choice, it is compared with the profile, and both have to be equal: that
is met where the 95 % interval of the ratio reaches 1. Above, at most 1 % of the time may be lost: that is met where the
lower end of the interval is above 1/1.01.

``--write`` puts the table and the targets into docs/performance.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from measuring import KIB, MIB, Ratio, Table, Verdict, cores, machine, named, positive, put_between, targets_table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- begin: python benchmarks/learning.py --write -->", "<!-- end of learning -->"
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
#: Of which groups learn nothing.
SMALL_BYTES = 8 * KIB
LEARNING, PROFILED = "learning", "as profiled"
#: The groups, and what the environment says when each is made.
GROUPS: dict[str, dict[str, str]] = {
    LEARNING: {},
    PROFILED: {"CCL_SHARED_MEMORY_LEARNING": "0"},
    **{name: {"CCL_SHARED_MEMORY_TRANSFER": name} for name in ("cached", "streamed", "single_copy")},
}
#: A sum in place doubles with each call: of so many calls, all are in range. The first ones are not timed.
_MOST_CALLS, _LEAST_VALUE, _UNTIMED_CALLS = 200, 2.0**-100, 40
#: What a turn moves, and its most calls; before the rounds, each group does as much so many times.
_TURN_BYTES, _MOST_TURN_CALLS, _TURNS_AT_FIRST = 512 * MIB, 8000, 4

Found = dict[int, dict[str, list[float]]]


def rank_main(sizes: Sequence[int], rounds: int) -> Found:
    """Return the seconds of a call in each round, by size and group."""
    import torch

    import comm_orchestrator as dist

    os.sched_setaffinity(0, {cores(2)[int(os.environ["RANK"])]})
    torch.set_num_threads(1)
    dist.init_distributed("ccl", verbose=False)
    rank, W = dist.get_rank(), dist.get_world_size()
    groups = {}
    for name, variables in GROUPS.items():
        for variable in ("CCL_SHARED_MEMORY_LEARNING", "CCL_SHARED_MEMORY_TRANSFER"):
            os.environ.pop(variable, None)
        os.environ.update(variables)
        groups[name] = dist.new_group(list(range(W)))
    found: Found = {}
    for size in sizes:
        tensor = torch.empty(size // 4)
        calls = max(1, min(_MOST_TURN_CALLS, _TURN_BYTES // size))

        def turn(name: str, tensor: torch.Tensor = tensor, calls: int = calls) -> float:
            spent, left = 0.0, calls
            while left:
                some = min(left, _MOST_CALLS - _UNTIMED_CALLS)
                tensor.fill_(_LEAST_VALUE * (rank + 1))
                dist.barrier()
                for _ in range(_UNTIMED_CALLS):
                    dist.all_reduce(tensor, group=groups[name])
                begin = time.perf_counter()
                for _ in range(some):
                    dist.all_reduce(tensor, group=groups[name])
                spent += time.perf_counter() - begin
                expected = _LEAST_VALUE * sum(range(1, W + 1)) * float(W) ** (_UNTIMED_CALLS + some - 1)
                if not (tensor == expected).all():
                    raise SystemExit(f"{name}, {named(tensor.nbytes)}, rank {rank}: got a wrong sum, not {expected:g}")
                left -= some
            return spent / calls

        of_size = found[size] = {name: [] for name in groups}
        for name in groups:
            for _ in range(_TURNS_AT_FIRST):
                turn(name)
        turns = list(groups)
        for _ in range(rounds):
            for name in turns:
                of_size[name].append(turn(name))
            turns.append(turns.pop(0))
    dist.destroy_process_group()
    return found


def measured(sizes: Sequence[int], rounds: int) -> Found:
    """Return the seconds of each round on the slower rank, by size and group."""
    from comm_utils.testing import run_ranks

    variables = dict.fromkeys(("CCL_SHARED_MEMORY_LEARNING", "CCL_SHARED_MEMORY_TRANSFER", "CCL_SHARED_MEMORY"))
    of_ranks: list[Any] = run_ranks(rank_main, 2, sizes, rounds, timeout_s=1800, env=variables)
    return {
        size: {
            name: [max(each) for each in zip(*(one[size][name] for one in of_ranks), strict=True)] for name in GROUPS
        }
        for size in sizes
    }


def fastest(size: int, of_size: Mapping[str, Sequence[float]]) -> str:
    """Return the group that was the fastest without learning in every other round, of those that differ."""
    if size <= SMALL_BYTES:
        return PROFILED
    return min((name for name in of_size if name != LEARNING), key=lambda name: statistics.median(of_size[name][::2]))


def gain(size: int, of_size: Mapping[str, Sequence[float]]) -> Ratio:
    """Return the time without learning over the time with it, by the rounds in which the fastest was not chosen."""
    without, with_it = of_size[fastest(size, of_size)], of_size[LEARNING]
    between = slice(0 if len(with_it) == 1 else 1, None, 2)
    return Ratio.of(without[between], with_it[between], statistics.fmean)


def table(found: Found) -> Table:
    lines = []
    for size, of_size in found.items():
        cells = (f"{statistics.fmean(times) * 1e6:,.4g}" for times in of_size.values())
        lines.append([named(size), *cells, f"{gain(size, of_size)} {fastest(size, of_size)}"])
    return Table("all_reduce of 2 ranks, mean µs a call", ["size", *GROUPS, "fastest without / learning"], lines)


def targets(found: Found) -> list[Verdict]:
    verdicts = []
    for text, least, some in (
        ("learning, above 8 KiB: at most 1 % of the time", 1 / 1.01, [size for size in found if size > SMALL_BYTES]),
        ("learning, up to 8 KiB: nothing", None, [size for size in found if size <= SMALL_BYTES]),
    ):
        ratios = {f"{named(size)}, beside {fastest(size, found[size])}": gain(size, found[size]) for size in some}
        if ratios:
            verdicts.append(
                Verdict.never_below(text, ratios) if least is None else Verdict.at_least(text, least, ratios)
            )
    return verdicts


def main(arguments: list[str] | None = None, write: Callable[[str], object] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes of the tensor")
    parser.add_argument("--rounds", type=positive, default=42)
    parser.add_argument("--write", action="store_true", help="put table and targets into docs/performance.md")
    given = parser.parse_args(arguments)
    found = measured(given.sizes, given.rounds)
    made = (table(found), targets_table(targets(found)))
    write("\n\n".join(one.text() for one in made))
    if given.write:
        facts = machine()
        measured_on = f"{facts['processor']}, {facts['cores']} cores, Linux {facts['kernel']}, {given.rounds} rounds"
        text = "\n\n".join((f"Measured on {measured_on}.", *(one.markdown() for one in made)))
        put_between(PAGE, BEGIN, END, lambda _: f"{text}\n")


if __name__ == "__main__":
    main()
