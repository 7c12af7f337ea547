"""What coalescing gains: 1000 all_reduces of 1 KiB of mixed dtypes, one by one, coalesced, and as one tensor.

    python benchmarks/coalescing.py [--ranks 2] [--tensors N] [--rounds N] [--write]

Ranks are processes of this host, on gloo and in shared memory. In each round these take turns: every tensor in a
call of its own, all of them within ``coalescing()``, ``all_reduce_coalesced`` of their list, and one all_reduce of a
float32 tensor of as many bytes. Before each of them the tensors are written anew, after it all elements are compared
with the exact ones. The slowest rank counts, and the medians of
the rounds are shown, with ratios and their 95 % intervals.

``--write`` puts the table into docs/collectives.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import KIB, interval, machine, named, positive, put_between

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "collectives.md"
BEGIN, END = "<!-- begin: python benchmarks/coalescing.py --write -->", "<!-- end -->"
LIBRARIES = {"gloo": "gloo", "shared memory": "ccl"}
#: Of the tensors, in turn.
DTYPES = ("float32", "bfloat16", "int64", "float64")
TENSOR_BYTES = KIB
#: Rounds that are not counted: memory is touched, and groups in shared memory learn what is fast.
WARM_UP = 20
RATIOS = (
    ("one by one", "coalesced"),
    ("one by one", "in a list"),
    ("coalesced", "one tensor"),
    ("in a list", "one tensor"),
)
WAYS = ("one by one", "coalesced", "in a list", "one tensor")


def rank_main(backend: str, tensors: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round by way."""
    import torch

    import comm_orchestrator as dist

    torch.set_num_threads(1)
    dist.init_distributed(backend, verbose=False)
    dtypes = [getattr(torch, name) for name in DTYPES]
    rank, most = dist.get_rank(), dist.get_world_size()
    many = [
        torch.empty(TENSOR_BYTES // dtype.itemsize, dtype=dtype)
        for dtype in (dtypes[number % len(dtypes)] for number in range(tensors))
    ]
    whole = [torch.empty(tensors * TENSOR_BYTES // 4)]

    def one_by_one() -> None:
        for one in many:
            dist.all_reduce(one, "max")

    def coalesced() -> None:
        with dist.coalescing():
            for one in many:
                dist.all_reduce(one, "max")

    def in_a_list() -> None:
        dist.all_reduce_coalesced(many, "max")

    def one_tensor() -> None:
        dist.all_reduce(whole[0], "max")

    calls = (one_by_one, coalesced, in_a_list, one_tensor)
    ways = dict(zip(WAYS, zip(calls, (many, many, many, whole), strict=True), strict=True))
    found: dict[str, list[float]] = {}
    for turn in range(WARM_UP + rounds):
        for name, (call, written) in ways.items():
            for one in written:
                one.fill_(rank + 1)
            dist.barrier()
            begin = time.perf_counter()
            call()
            seconds = time.perf_counter() - begin
            if wrong := sum(int((one != most).sum()) for one in written):
                raise SystemExit(f"{name}, rank {rank}: got {wrong} wrong elements, expected {most} in all")
            if turn >= WARM_UP:
                found.setdefault(name, []).append(seconds)
    dist.destroy_process_group()
    return found


def measured(library: str, ranks: int, tensors: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round on the slowest rank, by way."""
    from comm_utils.testing import run_ranks

    of_ranks: list[Any] = run_ranks(rank_main, ranks, LIBRARIES[library], tensors, rounds, timeout_s=1800)
    return {name: [max(each) for each in zip(*(one[name] for one in of_ranks), strict=True)] for name in WAYS}


def ratio(found: dict[str, list[float]], way: str, beside: str) -> str:
    """Write how many times the time of ``beside`` a way takes, with the 95 % interval."""

    def of(some: Any) -> float:
        picked = list(some)
        return statistics.median(found[way][i] for i in picked) / statistics.median(found[beside][i] for i in picked)

    rounds = len(found[way])
    low, high = interval(of, rounds)
    return f"{of(range(rounds)):.3g} ({low:.3g} to {high:.3g})"


def main(arguments: list[str] | None = None, write: Callable[[str], object] = print) -> None:
    """Measure, print the table, and put it into the page where that is asked for."""
    import comm_orchestrator as dist

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--rounds", type=positive, default=21)
    parser.add_argument("--write", action="store_true", help="put the table into docs/collectives.md")
    given = parser.parse_args(arguments)
    facts = machine()
    lines = [
        f"{given.tensors} tensors of {named(TENSOR_BYTES)}, in turn of {', '.join(DTYPES)}.",
        f"Measured on {facts['processor']}, {facts['cores']} cores, Linux {facts['kernel']}, {given.rounds} rounds.",
        "",
        "| library | ranks | one by one, ms | coalesced, ms | in a list, ms | one tensor, ms | "
        "one by one / coalesced | one by one / in a list | coalesced / one tensor | in a list / one tensor |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for library, backend in LIBRARIES.items():
        if not dist.available_backends()[backend].usable:
            continue
        for ranks in given.ranks:
            found = measured(library, ranks, given.tensors, given.rounds)
            times = [f"{statistics.median(found[way]) * 1e3:.3g}" for way in WAYS]
            ratios = [ratio(found, *pair) for pair in RATIOS]
            lines.append(f"| {library} | {ranks} | {' | '.join((*times, *ratios))} |")
            write(lines[-1])
    text = "\n".join(lines)
    write(text)
    if given.write:
        put_between(PAGE, BEGIN, END, lambda _: text + "\n")


if __name__ == "__main__":
    main()
