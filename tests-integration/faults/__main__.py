"""Run the matrix, a tenth of it, single cells or schedules: ``python -m faults --help``."""

from __future__ import annotations

import argparse
import queue
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

from faults.cells import Cell, cells_to_run, parse, tenth
from faults.host import Host, cannot_isolate, two_hosts
from faults.job import run_cell
from faults.judge import shortfalls
from faults.page import write_page
from faults.record import Record
from faults.schedules import run_schedule

_AT_ONCE = 2
Item = TypeVar("Item")
Result = TypeVar("Result")


def on_hosts(items: Sequence[Item], run: Callable[[Item, Host], Result]) -> list[Result]:
    """Run each item on one of two hosts, two at once."""
    # Without namespaces of their own, one job may take what another leaves for its own.
    at_once = min(_AT_ONCE if not cannot_isolate() else 1, len(items))
    with ExitStack() as stack:
        free: queue.Queue[Host] = queue.Queue()
        for _ in range(at_once):
            host = Host()
            stack.callback(host.close)
            free.put(host)

        def one(item: Item) -> Result:
            host = free.get()
            try:
                return run(item, host)
            finally:
                free.put(host)

        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(one, items))


def run_cells(cells: Sequence[Cell], show: bool = False) -> dict[Cell, tuple[Record, list[str]]]:
    """Run cells, say what came of each, and return it."""

    def judged(cell: Cell, record: Record) -> tuple[Cell, tuple[Record, list[str]]]:
        problems = shortfalls(cell, record)
        print(f"{'met' if not problems else 'NOT MET'} {cell} ({record.seconds:.1f} s)", flush=True)
        for problem in problems:
            print(f"    {problem}", flush=True)
        if show:
            _show(record)
        return cell, (record, problems)

    if why := cannot_isolate():
        left_out = [cell for cell in cells if cell.row.isolated]
        cells = [cell for cell in cells if not cell.row.isolated]
        print(f"not run, as {why}: {', '.join(map(str, left_out)) or 'nothing'}")
    here = [cell for cell in cells if cell.row.hosts == 1]
    across = [cell for cell in cells if cell.row.hosts > 1]
    found = dict(on_hosts(here, lambda cell, host: judged(cell, run_cell(cell, [host])))) if here else {}
    if across:
        with two_hosts() as hosts:
            found |= dict(judged(cell, run_cell(cell, hosts)) for cell in across)
    return found


def _show(record: Record) -> None:
    for told in record.ranks:
        print(f"--- rank {told.rank}, exit status {told.exit_code}")
        for event in told.events:
            print(f"{event['t'] - record.fault_at:8.3f}", {key: value for key, value in event.items() if key != "t"})
        print(told.output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nox -s faults --")
    parser.add_argument("--write", action="store_true", help="write docs/faults.md; of the whole matrix alone")
    parser.add_argument("--tenth", type=int, metavar="SEED", help="every tenth cell; ten seeds in a row are all cells")
    parser.add_argument("--cell", action="append", default=[], help="FAULT/MOMENT/BACKEND[/strict], with all it wrote")
    parser.add_argument("-k", metavar="TEXT", default="", help="cells whose name has this text")
    parser.add_argument(
        "--again", action="store_true", help="cells that fall short run once more, one at a time: for a busy machine"
    )
    parser.add_argument("--list", action="store_true", help="the names of the cells, and nothing else")
    parser.add_argument("--schedules", type=int, metavar="N", help="so many schedules of faults and calls, no cells")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Return the exit status: 1 where a cell or schedule falls short."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = _parser().parse_args(arguments)
    if options.schedules is not None:
        seeds = range(options.seed, options.seed + options.schedules)
        wrong = [seed for seed, problems in on_hosts(seeds, run_schedule) if problems]
        print(f"{len(seeds) - len(wrong)} of {len(seeds)} schedules ended as the model says")
        if wrong:
            print(f"not: seeds {', '.join(map(str, wrong))}")
        return int(bool(wrong))
    cells = cells_to_run() if options.tenth is None else tenth(options.tenth)
    cells = [parse(name) for name in options.cell] or [cell for cell in cells if options.k in str(cell)]
    if options.list:
        print(*cells, sep="\n")
        return 0
    if options.tenth is not None:
        print(f"every tenth cell, seed {options.tenth}")
    begin = time.monotonic()
    found = run_cells(cells, bool(options.cell))
    short = [cell for cell, (_, problems) in found.items() if problems]
    for cell in short if options.again else ():
        print(f"once more: {cell}")
        found |= run_cells([cell])
    short = [cell for cell, (_, problems) in found.items() if problems]
    print(f"{len(found) - len(short)} of {len(found)} cells met the bar, in {time.monotonic() - begin:.0f} s")
    if options.write:
        write_page(found)
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
