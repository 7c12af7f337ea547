"""The options, the runs, and what is made of them."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measuring import LEAST_ROUNDS, MIB, free_memory_bytes, machine, named, output_file, positive, timed_run

from peers import report
from peers.catalogue import PEERS
from peers.placement import Placements, measure_by_placement
from peers.processes import Ranks, started
from peers.rank import CORES
from peers.results import TARGETS, Results, describe
from peers.tasks import MEMORIES, OTHERS, TRAINING, Block, Task, ways, work

__all__ = ["main"]

DOCS = Path(__file__).resolve().parents[2] / "docs"
# Of memory that a process needs for each byte of its tensors: its own, and what the libraries take beside it.
MEMORY_FACTOR = 3
# Of one core: above this, idle ranks are not idle. gloo's threads look around 100 times a second.
MOST_IDLE_CPU = 0.02


def options_from(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What every real peer on one node takes for the same.")
    parser.add_argument("--rounds", type=positive, help="default: 15, or 3 with --quick")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, shorter warm-up, and no 256 MiB")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="BYTES", help="these only, and no training")
    parser.add_argument("--operations", nargs="+", choices=("all_reduce", *OTHERS, *TRAINING), metavar="NAME")
    parser.add_argument("--memory", nargs="+", choices=MEMORIES, default=MEMORIES, help="default: hot and fresh")
    parser.add_argument("--ranks", type=int, nargs="+", choices=(2, 4), default=[2, 4], help="default: 2 and 4")
    parser.add_argument("--only", nargs="+", choices=PEERS, metavar="PEER", help=f"of: {', '.join(PEERS)}")
    parser.add_argument(
        "--placements",
        action="store_true",
        help="for cores that move: a table for each time that a cache line takes between them, of two ranks",
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write everything to this file")
    parser.add_argument("--write", action="store_true", help="also write the section of this machine in docs")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 where a target is missed")
    options = parser.parse_args(arguments)
    if any(size < 64 or size % 64 for size in options.sizes or ()):
        parser.error(f"--sizes: got {options.sizes}, expected multiples of 64 bytes")
    if options.placements and (options.write or options.json or options.strict):
        parser.error("--placements: prints its tables; --write, --json and --strict are for the targets")
    options.rounds = options.rounds or (3 if options.quick else 15)
    return options


def chosen(options: argparse.Namespace, ranks: int, note: Callable[[str], None]) -> list[Task]:
    """What is measured with this world size, as far as there is memory for it."""
    tasks = [
        task
        for task in work(ranks, options.sizes, options.memory)
        if (not options.operations or task.operation in options.operations)
        and not (options.quick and not options.sizes and task.size_bytes > 64 * MIB)
    ]
    for name in options.operations or ():
        if not any(task.operation == name for task in tasks):
            note(f"{name}, {ranks} ranks: not measured, as it has none of the sizes")
    free_bytes = free_memory_bytes()
    most_bytes = free_bytes // (ranks * len(PEERS) * MEMORY_FACTOR)
    if too_large := sorted({task.size_bytes for task in tasks if task.size_bytes > most_bytes}):
        note(f"{', '.join(map(named, too_large))}: left out, as {free_bytes // MIB} MiB of memory are free")
    return [task for task in tasks if task.size_bytes <= most_bytes]


def measure(
    sets: Sequence[Ranks],
    tasks: Sequence[Task],
    results: Results,
    options: argparse.Namespace,
    note: Callable[[str], None],
) -> None:
    """All rounds: at each task the peers run a block in turns.

    Raises:
        SystemExit: a result is wrong, or a rank has ended.
    """
    turns = [(task.by(way), one) for task in tasks for one in sets for way in ways(one.peer.name, task)]
    for done in range(options.rounds):
        for task, one in turns:
            name = one.peer.name
            if (task, name) in results.unsupported:
                continue
            block = Block.of(task, first=not done, quick=options.quick, slow=one.peer.apart)
            times_us, wrong, unsupported = one.run(block)
            if unsupported:
                results.unsupported[task, name] = unsupported
                # Of other ways and collectives it is no news that there are none.
                if task.operation == "all_reduce":
                    note(f"{name}, all_reduce of {task.dtype}: {unsupported}")
                continue
            if wrong:
                what = f"{task.operation}, {task.dtype}, {named(task.size_bytes)}, {task.memory} {task.way}"
                raise SystemExit(f"{name}, {what}: {wrong} parts of the results are wrong")
            results.add(task, name, times_us)


def run(options: argparse.Namespace, results: Results, note: Callable[[str], None]) -> dict[str, Any]:
    """Every world size, gloo each time in a run of its own; what the peers say of themselves, and how idle they are."""
    wanted = [peer for name, peer in PEERS.items() if not options.only or name in options.only]
    facts: dict[str, Any] = {"of_peers": {}, "idle_cpu": {}}
    for ranks in options.ranks:
        tasks = chosen(options, ranks, note)
        for apart in (False, True):
            peers = [peer for peer in wanted if peer.apart == apart]
            if not peers or not tasks:
                continue
            in_place = ("all_reduce", "broadcast")
            source_bytes = max(task.size_bytes for task in tasks)
            target_bytes = max((task.size_bytes for task in tasks if task.operation not in in_place), default=0)
            memory = {"source_bytes": source_bytes, "target_bytes": target_bytes}
            with started(peers, ranks, memory, note) as sets:
                measure(sets, tasks, results, options, note)
                for one in sets:
                    name = one.peer.name
                    facts["of_peers"][name] = one.facts
                    # gloo has nobody to disturb; before that time, the ends of the blocks are what is seen.
                    if apart or one.idle_s < 5:
                        continue
                    facts["idle_cpu"][f"{name}, {ranks} ranks"] = one.idle_cpu()
                    if one.idle_cpu() > MOST_IDLE_CPU:
                        note(
                            f"{name}, {ranks} ranks: used {100 * one.idle_cpu():.1f} % of a core while others were "
                            f"measured, more than {100 * MOST_IDLE_CPU:g} %"
                        )
    return facts


def by_placement(options: argparse.Namespace, note: Callable[[str], None]) -> int:
    """Measure, and print, the peers of two ranks for each placement of the cores."""
    tasks = [task for task in chosen(options, 2, note) if task.operation not in TRAINING]
    if not tasks:
        raise SystemExit("nothing was measured")
    wanted = [peer for name, peer in PEERS.items() if not peer.apart and (not options.only or name in options.only)]
    memory = dict.fromkeys(("source_bytes", "target_bytes"), max(task.size_bytes for task in tasks))
    placements = Placements()
    with started(wanted, 2, memory, note) as sets:
        measure_by_placement(sets, tasks, placements, options.rounds, options.quick, note)
    for round_trip_ns in sorted(placements.of):
        results = placements.of[round_trip_ns]
        counts = [len(rounds) for rows in results.rounds_us.values() for rounds in rows.values()]
        if counts:
            print(
                f"\ncache line there and back in {round_trip_ns:.0f} ns: {min(counts)} to {max(counts)} blocks a cell"
            )
            for table in report.tables(results):
                print(table.text())
    return 0


def generated(options: argparse.Namespace, results: Results, verdicts: Any, notes: Sequence[str]) -> str:
    """The part of the page that is written by this program."""
    found = machine()
    parts = [
        f"Measured on {CORES} of {found['cores']} cores, Linux {found['kernel']}, Python {platform.python_version()}, "
        f"torch {version('torch')}, {options.rounds} rounds.\nMedians of rounds' medians (minima), µs; "
        f"{intervals(options.rounds)}.",
        f"![Time of a call against the size of the tensor, for every peer]({plot_of(found)})",
        *(table.markdown() for table in report.tables(results)),
        report.targets_table(verdicts).markdown(),
    ]
    if notes:
        parts.append("Notes of this run:\n\n" + "\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts)


def intervals(rounds: int) -> str:
    """What is said of the ratios in the tables."""
    if rounds < LEAST_ROUNDS:
        return f"ratios of medians, without their 95 % interval, which takes {LEAST_ROUNDS} rounds"
    return "ratios of medians, in brackets the lower end of their 95 % interval"


def plot_of(found: dict[str, Any]) -> str:
    return f"performance-peers-{re.sub(r'[^a-z0-9]+', '-', found['processor'].lower()).strip('-')}.svg"


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_from(arguments)
    results = Results()
    with timed_run(CORES) as timed:
        if options.placements:
            return by_placement(options, timed.note)
        facts = run(options, results, timed.note)
    if not results.times_us:
        raise SystemExit("nothing was measured")

    print(f"median (minimum) of {options.rounds} rounds, µs a call")
    for table in report.tables(results):
        print(table.text())
    verdicts = [target.judge(results) for target in TARGETS]
    print("targets: what our median may be over what it is; 1 and more is met")
    print(intervals(options.rounds))
    for verdict in verdicts:
        print(f"  {describe(verdict)}")
    print(f"every result is right; measured in {timed.wall_s:.0f} s")
    if idle := facts["idle_cpu"]:
        busiest = max(idle, key=lambda name: idle[name])
        print(f"idle ranks used {100 * idle[busiest]:.3f} % of a core at most ({busiest})")
    if options.json:
        found = {
            "versions": {"python": platform.python_version(), "torch": version("torch"), **facts["of_peers"]},
            "machine": machine(),
            "options": {key: value for key, value in vars(options).items() if key != "json"},
            "settings": {key: value for key, value in os.environ.items() if key.startswith(("CCL_", "COMM_", "FI_"))},
            "wall_s": timed.wall_s,
            "idle_cpu": facts["idle_cpu"],
            "notes": timed.notes,
            "results": results.to_json(),
            "unsupported": {f"{name}, {task}": why for (task, name), why in results.unsupported.items()},
            "verdicts": [verdict.to_json() for verdict in verdicts],
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.write:
        found = machine()
        report.draw(results, DOCS / plot_of(found))
        report.rewrite(
            DOCS / "performance-peers.md", found["processor"], generated(options, results, verdicts, timed.notes)
        )
    return int(options.strict and any(verdict.met is False for verdict in verdicts if verdict.target.must))
