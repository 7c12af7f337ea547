"""What compression gains on a slow network: all_reduce of float32 between two hosts, by codec and speed of the link.

    python benchmarks/compression.py [--rates 1gbit 10gbit] [--ranks-per-host N ...] [--size BYTES] [--rounds N]
        [--codecs NAME ...] [--no-chosen] [--write] [--plot]

Needs root: the hosts are namespaces of this machine, and Linux's ``tbf`` limits the link between them in both
directions. In each round, all codecs and gloo's own all_reduce take turns in the same ranks; the slowest rank counts.
On all ranks, results are compared with the exact sum, to the bounds of the codecs; with error feedback only the first,
to which no earlier call adds what it lost. A larger error ends the run, and so does a call that leaves its tensor as it
was. "powersgd" has no bound. What one host sent is what TCP had acknowledged to
it (``ss``), of one call of each.

One rank a host is on gloo. Where a host has more, theirs is the backend "ccl", which uses shared memory within hosts;
codecs compress between hosts alone where they can, and float32 is on gloo in one step.

``--write`` puts the table into docs/compression.md. ``--plot`` measures more speeds of the link, a few rounds of each,
puts their times into the page and draws docs/compression-time.svg.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from measuring import KIB, MIB, interval, machine, named, positive, put_between
from plots import plot_times
from shaped_hosts import MORE_RATES, RATES, acknowledged_bytes, gbit_per_s, run_ranks, spelled

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compression.md"
BEGIN, END = "<!-- begin: python benchmarks/compression.py --write -->", "<!-- end -->"
PICTURE = ROOT / "docs" / "compression-time.svg"
TIMES_BEGIN, TIMES_END = "<!-- begin: python benchmarks/compression.py --plot -->", "<!-- end of times -->"
#: Of the speeds that are measured for the plot alone.
PLOT_ROUNDS = 3
#: Of which sums keep something of every element; ``error`` is relative to the largest of the sum.
CODECS = ("fp16", "bf16", "fp8", "int8", "int4", "onebit", "topk", "powersgd")
#: Of a codec that is used from the size on at which the group measured it to be faster.
CHOSEN = "auto:"
CHOSEN_CODECS = ("fp16", "int8")
#: Of a codec that is used between hosts alone.
BETWEEN = " between hosts"
CODECS_OF_MORE_RANKS = (*(f"{name}{BETWEEN}" for name in ("fp16", "bf16", "fp8", "int8", "int4", "onebit")), "onebit")
#: First calls of each codec, of which no time is kept.
_UNTIMED = 6
CHOSEN_SIZES = (64 * KIB, MIB, 16 * MIB, 64 * MIB)


def largest_error(codec: Any, parts: Sequence[Any], total: Any) -> float:
    """Return how far elements of a sum of ``parts`` may be from ``total``; ``codec``: None for float32 alone.

    Each part is encoded once, and the sum, which has the errors of the parts by then.
    """
    import torch

    magnitude = float(sum(part.abs().max() for part in parts))
    rounding = magnitude * torch.finfo(total.dtype).eps * 2
    if codec is None:
        return rounding
    # Blocks begin elsewhere in what is sent: the largest bound of all elements holds for every block.
    of_parts = sum(float(codec.bound(part.flatten()).max()) for part in parts)
    return of_parts + float(codec.bound(total.flatten().abs() + magnitude).max()) + rounding


def rank_main(size_bytes: int, rounds: int, codecs: list[str], ranks_per_host: int) -> None:
    import torch

    import comm_orchestrator as dist

    torch.set_num_threads(1)
    dist.init_distributed("gloo" if ranks_per_host == 1 else "ccl", verbose=False, timeout=120)
    rank, W = dist.get_rank(), dist.get_world_size()
    on_gloo = None if ranks_per_host == 1 else dist.new_group(list(range(W)), backend="gloo")
    if on_gloo is not None:
        dist.set_hierarchical(False, on_gloo)
    count = size_bytes // 4
    source = torch.randn(1024, count // 1024, generator=torch.Generator().manual_seed(0)) * (rank + 1)
    parts = [source / (rank + 1) * (other + 1) for other in range(W)]
    total = torch.stack(parts).sum(0)
    handles: dict[str, Any] = {"float32": None}
    for name in codecs:
        least: Any = "auto" if name.startswith(CHOSEN) else 0
        method = name.removeprefix(CHOSEN).removesuffix(BETWEEN)
        handles[name] = dist.Compression(method, min_size_bytes=least, between_hosts=name.endswith(BETWEEN))
    found: dict[str, dict[str, Any]] = {name: {"s": [], "bytes": 0, "error": 0.0} for name in handles}
    tensor = torch.empty_like(source)
    codec_of = {name: handle and handle.codec for name, handle in handles.items()}
    limits = {name: largest_error(codec, parts, total) for name, codec in codec_of.items()}
    del parts

    def check(name: str, first: bool) -> float:
        """Return the largest error of the last call, relative to the largest element of the sum."""
        error, largest, handle = float((tensor - total).abs().max()), float(total.abs().max()), handles[name]
        bounded = handle is None or (handle.codec is not None and (first or not handle.error_feedback))
        if bounded and not error <= limits[name]:
            raise SystemExit(f"{name}, rank {rank}: got an error of {error:.3g}, expected at most {limits[name]:.3g}")
        if torch.equal(tensor, source):
            raise SystemExit(f"{name}, rank {rank}: got the tensor as it was, expected the sum of all ranks")
        return error / largest

    def timed(name: str) -> float:
        tensor.copy_(source)
        dist.barrier(on_gloo)
        begin = time.perf_counter()
        dist.all_reduce(tensor, group=on_gloo if name == "float32" else None, compression=handles[name])
        return time.perf_counter() - begin

    for name in handles:  # connections are made, memory is touched, and two ranks learn how they exchange pieces
        for number in range(_UNTIMED):
            timed(name)
            check(name, first=number == 0)
        dist.barrier(on_gloo)
        before = acknowledged_bytes()
        timed(name)
        dist.barrier(on_gloo)
        time.sleep(0.05)
        found[name]["bytes"] = acknowledged_bytes() - before
        found[name]["error"] = check(name, first=False)
    for _ in range(rounds):
        for name in handles:
            duration = torch.tensor([timed(name)], dtype=torch.float64)
            dist.all_reduce(duration, "max", group=on_gloo)
            found[name]["s"].append(float(duration))
            check(name, first=False)
    if rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


def measured(
    rate: str, ranks_per_host: int, size_bytes: int, rounds: int, codecs: Sequence[str] = CODECS
) -> dict[str, dict[str, Any]]:
    """Return times, bytes and errors by codec on a link of ``rate``."""
    host_of = [0] * ranks_per_host + [1] * ranks_per_host
    options = ["--size", str(size_bytes), "--rounds", str(rounds), "--codecs", *codecs]
    options += ["--ranks-per-host", str(ranks_per_host)]
    output = run_ranks(rate, host_of, [__file__, "--as-rank", *options])
    found: dict[str, dict[str, Any]] = json.loads(output.splitlines()[-1])
    return found


def ratio(found: dict[str, dict[str, Any]], name: str, rounds: int) -> tuple[float, float]:
    """Return how many times faster than float32 a codec is, and the lower end of the 95 % interval."""
    plain, times = found["float32"]["s"], found[name]["s"]

    def of(some: Any) -> float:
        return statistics.median(plain[i] for i in some) / statistics.median(times[i] for i in some)

    return of(range(rounds)), interval(of, rounds)[0]


def table(rate: str, ranks_per_host: int, size_bytes: int, found: dict[str, dict[str, Any]]) -> str:
    rounds, ranks = len(found["float32"]["s"]), "one rank" if ranks_per_host == 1 else f"{ranks_per_host} ranks"
    lines = [
        f"Two hosts with {ranks} each, {spelled(rate)}, {named(size_bytes)}:",
        "",
        "| codec | ms | times as fast (lower end) | MiB a host sent | largest error / largest sum |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, one in found.items():
        gain, low = ratio(found, name, rounds)
        lines.append(
            f"| {name} | {statistics.median(one['s']) * 1e3:.1f} | {gain:.2f} ({low:.2f}) | {one['bytes'] / MIB:.2f} | "
            f"{one['error']:.1e} |"
        )
    return "\n".join(lines)


def chosen_table(rate: str, rounds: int) -> str:
    """Return how calls fare whose codec is used where the group measured it to be faster."""
    titles = " | ".join(f"{name}, times as fast (lower end) | MiB a host sent" for name in CHOSEN_CODECS)
    lines = [
        f'Two hosts with one rank each, {spelled(rate)}, `min_size_bytes="auto"`:',
        "",
        f"| size | float32, ms | {titles} |",
        "|---:|---:|" + "---:|---:|" * len(CHOSEN_CODECS),
    ]
    for size in CHOSEN_SIZES:
        codecs = [CHOSEN + name for name in CHOSEN_CODECS]
        found = measured(rate, 1, size, max(rounds, 21 if size < 16 * MIB else 0), codecs)
        cells = [named(size), f"{statistics.median(found['float32']['s']) * 1e3:.2f}"]
        for name in codecs:
            gain, low = ratio(found, name, len(found[name]["s"]))
            cells += [f"{gain:.2f} ({low:.2f})", f"{found[name]['bytes'] / MIB:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def times_table(size_bytes: int, times: dict[str, dict[float, float]]) -> str:
    """Return the times in ms by codec and speed."""
    speeds = sorted(next(iter(times.values())))
    titles = " | ".join(f"{speed:g} Gbit/s" for speed in speeds)
    rows = (
        f"| {name} | {' | '.join(f'{by_speed[speed]:.1f}' for speed in speeds)} |" for name, by_speed in times.items()
    )
    return "\n".join((f"| {named(size_bytes)}, ms | {titles} |", "|---|" + "---:|" * len(speeds), *rows))


def main(arguments: list[str] | None = None, write: Callable[[str], object] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", choices=RATES + MORE_RATES, default=list(RATES), help="of the link")
    parser.add_argument("--ranks-per-host", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--size", type=int, default=64 * MIB, help="bytes of the tensor")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--codecs", nargs="*", help="default: all, for one rank a host")
    parser.add_argument("--no-chosen", action="store_true", help="leave out the calls that a measurement chooses")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/compression.md")
    parser.add_argument("--plot", action="store_true", help="measure more speeds, and draw docs/compression-time.svg")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.as_rank:
        return rank_main(given.size, given.rounds, given.codecs, given.ranks_per_host[0])
    facts = machine()
    parts = [
        f"Measured on {facts['processor']}, {facts['cores']} cores, Linux {facts['kernel']}, {given.rounds} rounds."
    ]
    times: dict[str, dict[float, float]] = {}

    def note(rate: str, found: dict[str, dict[str, Any]]) -> None:
        for name, one in found.items():
            times.setdefault(name, {})[gbit_per_s(rate)] = statistics.median(one["s"]) * 1e3

    for rate, ranks in product(given.rates, given.ranks_per_host):
        codecs = given.codecs if given.codecs is not None else CODECS if ranks == 1 else CODECS_OF_MORE_RANKS
        found = measured(rate, ranks, given.size, given.rounds, codecs)
        if ranks == 1:
            note(rate, found)
        parts.append(table(rate, ranks, given.size, found))
        write(parts[-1] + "\n")
        if ranks == 1 and not given.no_chosen:
            parts.append(chosen_table(rate, given.rounds))
            write(parts[-1] + "\n")
    if given.write:
        put_between(PAGE, BEGIN, END, lambda _: "\n\n".join(parts) + "\n")
    if given.plot:
        for rate in (*RATES, *MORE_RATES):
            if 1 not in given.ranks_per_host or rate not in given.rates:
                codecs = CODECS if given.codecs is None else given.codecs
                note(rate, measured(rate, 1, given.size, PLOT_ROUNDS, codecs))
        write(times_table(given.size, times))
        put_between(PAGE, TIMES_BEGIN, TIMES_END, lambda _: times_table(given.size, times) + "\n")
        plot_times(PICTURE, times, f"all_reduce of {named(given.size)} of float32 between two hosts")
    return None


if __name__ == "__main__":
    main()
