"""What compression gains on a slow network: all_reduce of float32 between two hosts, by codec and speed of the link.

    python benchmarks/compression.py [--rates 1gbit 10gbit] [--ranks-per-host N ...] [--size BYTES] [--rounds N]
        [--codecs NAME ...] [--no-chosen] [--write] [--plot]

Takes about eight minutes on two cores. Needs root: the hosts are namespaces of this machine, and Linux's ``tbf`` limits
the link between them in both directions. In each round, all codecs and gloo's own all_reduce take turns in the same
ranks, of which another one begins each round; the slowest rank counts. Up to 4 MiB in all are reduced by one call after
the other, each of a tensor of its own, and count with their mean: a single call of 64 KiB takes ten times as long where
the kernel has just scheduled another thread. On all ranks, results are compared with the exact sum, to the bounds of
the codecs; with error feedback only the first, to which no earlier call adds what it lost. A larger error ends the run,
and so does a call that leaves its tensor as it was. "powersgd" has no bound. What one host sent is what TCP had
acknowledged to it (``ss``), of one call of each.

One rank a host is on gloo. Where a host has more, theirs is the backend "ccl", which uses shared memory within hosts;
codecs compress between hosts alone where they can, and float32 is on gloo in one step. What the library chooses by
itself is compared with the faster of float32 on gloo and on "ccl".

Each target is printed with its ratio to float32, and is met where the lower end of the 95 % interval is; "never slower"
is met where the interval reaches 1.

``--write`` puts the tables and the targets into docs/compression.md. ``--plot`` measures more speeds of the link, a few
rounds of each, puts their times into the page and draws docs/compression-time.svg.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from measuring import KIB, MIB, Ratio, Verdict, machine, named, positive, put_between, targets_table
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
#: Of float32 on the backend of the codecs, where that is another than gloo.
ON_CCL = "float32 on ccl"
#: What a round reduces of small tensors, in calls of at most so many: of one call, a tick of the kernel decides.
_ROUND_BYTES, _MOST_CALLS = 4 * MIB, 64
#: Least rounds of tensors below 16 MiB.
_SMALL_ROUNDS = 21
#: How many times as fast as float32 a codec of ``SIZE`` is asked to be, by the speed of the link.
TARGETS = {"1gbit": {"fp16": 1.9, "int8": 3.8, "int4": 7.0, "onebit": 12.0}, "10gbit": {"int8": 1.5}}
SIZE = 64 * MIB
#: How far the bytes on the wire may be from what the codec says.
BYTES_OFF = 0.03
#: By contestant: times ``s`` of the rounds, ``bytes`` that a host sent, ``expected`` of them, and the ``error``.
Found = dict[str, dict[str, Any]]


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


def rank_main(sizes_bytes: Sequence[int], rounds: int, codecs: Sequence[str], ranks_per_host: int) -> None:
    import torch

    import comm_orchestrator as dist

    torch.set_num_threads(1)
    dist.init_distributed("gloo" if ranks_per_host == 1 else "ccl", verbose=False, timeout=120)
    on_gloo = None if ranks_per_host == 1 else dist.new_group(list(range(dist.get_world_size())), backend="gloo")
    if on_gloo is not None:
        dist.set_hierarchical(False, on_gloo)
    found = {str(size): _measure(size, rounds, codecs, on_gloo) for size in sizes_bytes}
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


def _measure(size_bytes: int, rounds: int, codecs: Sequence[str], on_gloo: Any) -> Found:
    """Return what this rank measures of one size; ``on_gloo``: the group of float32, None for the world."""
    import torch

    import comm_orchestrator as dist

    rank, W = dist.get_rank(), dist.get_world_size()
    count = size_bytes // 4
    source = torch.randn(1024, count // 1024, generator=torch.Generator().manual_seed(0)) * (rank + 1)
    parts = [source / (rank + 1) * (other + 1) for other in range(W)]
    total = torch.stack(parts).sum(0)
    handles: dict[str, Any] = {"float32": None}
    if on_gloo is not None and any(name.startswith(CHOSEN) for name in codecs):
        handles[ON_CCL] = None
    for name in codecs:
        least: Any = "auto" if name.startswith(CHOSEN) else 0
        method = name.removeprefix(CHOSEN).removesuffix(BETWEEN)
        handles[name] = dist.Compression(method, min_size_bytes=least, between_hosts=name.endswith(BETWEEN))
    codec_of = {name: handle and handle.codec for name, handle in handles.items()}
    found: Found = {name: {"s": [], "bytes": 0, "expected": None, "error": 0.0} for name in handles}
    for name, codec in codec_of.items():
        # Each half of the tensor is encoded by one host for the other, and each half of the sum.
        if codec is not None and (on_gloo is None or name.endswith(BETWEEN)) and not name.startswith(CHOSEN):
            found[name]["expected"] = codec.encoded_bytes(count)
    limits = {name: largest_error(codec, parts, total) for name, codec in codec_of.items()}
    del parts
    tensors = [torch.empty_like(source) for _ in range(min(_MOST_CALLS, max(1, _ROUND_BYTES // size_bytes)))]

    def check(name: str, first: bool) -> float:
        """Return the largest error of the last calls, relative to the largest element of the sum."""
        largest, handle, worst = float(total.abs().max()), handles[name], 0.0
        for number, tensor in enumerate(tensors):
            error = float((tensor - total).abs().max())
            exact = handle is None or (handle.codec is not None and not handle.error_feedback)
            bounded = exact or (handle.codec is not None and first and number == 0)
            if bounded and not error <= limits[name]:
                raise SystemExit(
                    f"{name}, rank {rank}: got an error of {error:.3g}, expected at most {limits[name]:.3g}"
                )
            if torch.equal(tensor, source):
                raise SystemExit(f"{name}, rank {rank}: got the tensor as it was, expected the sum of all ranks")
            worst = max(worst, error / largest)
        return worst

    def timed(name: str) -> float:
        for tensor in tensors:
            tensor.copy_(source)
        group, handle = on_gloo if name == "float32" else None, handles[name]
        dist.barrier(on_gloo)
        begin = time.perf_counter()
        for tensor in tensors:
            dist.all_reduce(tensor, group=group, compression=handle)
        return (time.perf_counter() - begin) / len(tensors)

    for name in handles:  # connections are made, memory is touched, and two ranks learn how they exchange pieces
        for number in range(_UNTIMED):
            timed(name)
            check(name, first=number == 0)
        dist.barrier(on_gloo)
        before = acknowledged_bytes()
        timed(name)
        dist.barrier(on_gloo)
        time.sleep(0.05)
        found[name]["bytes"] = (acknowledged_bytes() - before) / len(tensors)
        found[name]["error"] = check(name, first=False)
    turns = list(handles)
    for _ in range(rounds if size_bytes >= 16 * MIB else max(rounds, _SMALL_ROUNDS)):
        for name in turns:
            duration = torch.tensor([timed(name)], dtype=torch.float64)
            dist.all_reduce(duration, "max", group=on_gloo)
            found[name]["s"].append(float(duration))
            check(name, first=False)
        turns.append(turns.pop(0))
    return found


def measured(
    rate: str, ranks_per_host: int, sizes_bytes: Sequence[int], rounds: int, codecs: Sequence[str] = CODECS
) -> dict[int, Found]:
    """Return what was measured by size on a link of ``rate``."""
    host_of = [0] * ranks_per_host + [1] * ranks_per_host
    options = ["--sizes", *map(str, sizes_bytes), "--rounds", str(rounds), "--codecs", *codecs]
    options += ["--ranks-per-host", str(ranks_per_host)]
    output = run_ranks(rate, host_of, [__file__, "--as-rank", *options])
    return {int(size): found for size, found in json.loads(output.splitlines()[-1]).items()}


def ratio(found: Found, name: str) -> Ratio:
    """Return how many times as fast a codec is as float32 on gloo."""
    return Ratio.of(found["float32"]["s"], found[name]["s"])


def ratio_to_fastest(found: Found, name: str) -> Ratio:
    """Return how many times as fast a codec is as the faster float32."""
    plain = (found[one]["s"] for one in ("float32", ON_CCL) if one in found)
    return Ratio.of(min(plain, key=statistics.median), found[name]["s"])


def described(ranks_per_host: int) -> str:
    return "one rank" if ranks_per_host == 1 else f"{ranks_per_host} ranks"


def table(rate: str, ranks_per_host: int, size_bytes: int, found: Found) -> str:
    lines = [
        f"Two hosts with {described(ranks_per_host)} each, {spelled(rate)}, {named(size_bytes)}:",
        "",
        "| codec | ms | times as fast (lower end) | MiB a host sent | largest error / largest sum |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, one in found.items():
        gain = ratio(found, name)
        lines.append(
            f"| {name} | {statistics.median(one['s']) * 1e3:.1f} | {gain.value:.2f} ({gain.lower:.2f}) | "
            f"{one['bytes'] / MIB:.2f} | {one['error']:.1e} |"
        )
    return "\n".join(lines)


def chosen_codecs(ranks_per_host: int) -> list[str]:
    return [f"{CHOSEN}{name}{BETWEEN if ranks_per_host > 1 else ''}" for name in CHOSEN_CODECS]


def chosen_table(rate: str, ranks_per_host: int, by_size: Mapping[int, Found]) -> str:
    """Return how calls fare whose codec is used where the group measured it to be faster."""
    names = chosen_codecs(ranks_per_host)
    plain = ["float32", *([ON_CCL] if ranks_per_host > 1 else [])]
    titles = [f"{name}, ms" for name in plain]
    for name in names:
        titles += [f"{name.removeprefix(CHOSEN)}, times as fast (95 % interval)", "MiB a host sent"]
    lines = [
        f'Two hosts with {described(ranks_per_host)} each, {spelled(rate)}, `min_size_bytes="auto"`:',
        "",
        f"| size | {' | '.join(titles)} |",
        "|---:|" + "---:|" * len(titles),
    ]
    for size, found in by_size.items():
        cells = [named(size), *(f"{statistics.median(found[one]['s']) * 1e3:.2f}" for one in plain)]
        for name in names:
            cells += [str(ratio_to_fastest(found, name)), f"{found[name]['bytes'] / MIB:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def targets(rate: str, ranks_per_host: int, found: Found) -> list[Verdict]:
    """Return what is asked of codecs at this speed, of those that were measured."""
    where = f"{spelled(rate)}, {described(ranks_per_host)} a host"
    verdicts = []
    for codec, least in TARGETS.get(rate, {}).items():
        name = next((one for one in (codec, f"{codec}{BETWEEN}") if one in found), None)
        if name is not None:
            target = f"{name}: at least {least:g} times as fast as float32"
            verdicts.append(Verdict.at_least(target, least, {where: ratio(found, name)}))
    sent = {f"{where}, {name}": one["bytes"] / one["expected"] for name, one in found.items() if one["expected"]}
    if sent:
        verdicts.append(Verdict.within(f"bytes sent: the codec's within {BYTES_OFF:.0%}", BYTES_OFF, sent))
    return verdicts


def chosen_target(rate: str, ranks_per_host: int, by_size: Mapping[int, Found]) -> Verdict:
    where = f"{spelled(rate)}, {described(ranks_per_host)} a host"
    ratios = {
        f"{where}, {named(size)}, {name.removeprefix(CHOSEN)}": ratio_to_fastest(found, name)
        for size, found in by_size.items()
        for name in chosen_codecs(ranks_per_host)
    }
    return Verdict.never_below("chosen by the library: never slower than float32", ratios)


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
    parser.add_argument("--size", type=int, default=SIZE, help="bytes of the tensor; the targets are for 64 MiB")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--codecs", nargs="*", help="default: all that the number of ranks a host allows")
    parser.add_argument("--no-chosen", action="store_true", help="leave out the calls that a measurement chooses")
    parser.add_argument("--write", action="store_true", help="put tables and targets into docs/compression.md")
    parser.add_argument("--plot", action="store_true", help="measure more speeds, and draw docs/compression-time.svg")
    parser.add_argument("--sizes", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.as_rank:
        return rank_main(given.sizes, given.rounds, given.codecs, given.ranks_per_host[0])
    facts = machine()
    parts = [
        f"Measured on {facts['processor']}, {facts['cores']} cores, Linux {facts['kernel']}, {given.rounds} rounds."
    ]
    verdicts: list[Verdict] = []
    times: dict[str, dict[float, float]] = {}

    def note(rate: str, found: Found) -> None:
        for name, one in found.items():
            times.setdefault(name, {})[gbit_per_s(rate)] = statistics.median(one["s"]) * 1e3

    for rate, ranks in product(given.rates, given.ranks_per_host):
        codecs = given.codecs if given.codecs is not None else CODECS if ranks == 1 else CODECS_OF_MORE_RANKS
        found = measured(rate, ranks, [given.size], given.rounds, codecs)[given.size]
        if ranks == 1:
            note(rate, found)
        parts.append(table(rate, ranks, given.size, found))
        write(parts[-1] + "\n")
        if given.size == SIZE:
            verdicts += targets(rate, ranks, found)
        if not given.no_chosen:
            by_size = measured(rate, ranks, CHOSEN_SIZES, given.rounds, chosen_codecs(ranks))
            parts.append(chosen_table(rate, ranks, by_size))
            write(parts[-1] + "\n")
            verdicts.append(chosen_target(rate, ranks, by_size))
    asked = targets_table(verdicts)
    write(asked.text() + "\n")
    parts.append(asked.markdown())
    if given.write:
        put_between(PAGE, BEGIN, END, lambda _: "\n\n".join(parts) + "\n")
    if given.plot:
        for rate in (*RATES, *MORE_RATES):
            if 1 not in given.ranks_per_host or rate not in given.rates:
                codecs = CODECS if given.codecs is None else given.codecs
                note(rate, measured(rate, 1, [given.size], PLOT_ROUNDS, codecs)[given.size])
        write(times_table(given.size, times))
        put_between(PAGE, TIMES_BEGIN, TIMES_END, lambda _: times_table(given.size, times) + "\n")
        plot_times(PICTURE, times, f"all_reduce of {named(given.size)} of float32 between two hosts")
    return None


if __name__ == "__main__":
    main()
