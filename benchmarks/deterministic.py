"""The price of deterministic reductions: all_reduce as the library does it, in a fixed order, and compensated.

    python benchmarks/deterministic.py [--ranks 2 4] [--sizes BYTES ...] [--rounds N] [--write]

Ranks are processes of this host. On gloo and oneCCL (with CCL_SHARED_MEMORY=0; left out where it is not installed) a
world of each number of ranks is set up with the mode off, on and compensated, as three groups of the same ranks. In
each round the groups take turns with each size; each turn is some calls after some untimed ones, on tensors that are
written anew, whose elements are compared with the exact ones after it. The slowest rank counts, and the median of the
rounds is shown, with the ratio to the mode off and its 95 % interval.

``--write`` puts the table into docs/deterministic-reductions.md.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import KIB, MIB, interval, machine, named, positive, put_between

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "deterministic-reductions.md"
BEGIN, END = "<!-- begin: python benchmarks/deterministic.py --write -->", "<!-- end -->"
LIBRARIES: dict[str, tuple[str, dict[str, str]]] = {
    "gloo": ("gloo", {}),
    "oneCCL": ("ccl", {"CCL_SHARED_MEMORY": "0"}),
}
MODES: dict[str, dict[str, bool]] = {
    "off": {"enabled": False},
    "on": {"enabled": True},
    "compensated": {"enabled": True, "compensated": True},
}
#: A turn is to move about so much, in 1 to 50 calls.
TURN_BYTES = 16 * MIB


def rank_main(backend: str, dtype: str, sizes: list[int], rounds: int) -> dict[int, dict[str, list[float]]]:
    """Return the seconds of a call of each round, by size and mode."""
    import torch

    import comm_orchestrator as dist

    torch.set_num_threads(1)
    dist.init_distributed(backend, verbose=False)
    ranks = list(range(dist.get_world_size()))
    groups = {name: dist.new_group(ranks) for name in MODES}
    for name, group in groups.items():
        dist.set_deterministic_reductions(group=group, **MODES[name])
    element = getattr(torch, dtype)
    found: dict[int, dict[str, list[float]]] = {size: {name: [] for name in MODES} for size in sizes}
    tensors = {size: torch.empty(size // element.itemsize, dtype=element) for size in sizes}
    rank, total = dist.get_rank(), sum(one + 1 for one in ranks)
    # Every call multiplies a sum in place by the number of ranks: begun so small that many are in range.
    least, most = torch.finfo(element).tiny, torch.finfo(element).max
    in_range = int(math.log2(most / least / total) / math.log2(max(2, len(ranks))))
    for turn in range(rounds + 1):  # the first one is not counted
        for size, tensor in tensors.items():
            calls = max(1, min(50, TURN_BYTES // size, in_range - in_range // 5))
            for name, group in groups.items():
                untimed = max(1, calls // 10)
                tensor.fill_((rank + 1) * least)
                for _ in range(untimed):
                    dist.all_reduce(tensor, group=group)
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(calls):
                    dist.all_reduce(tensor, group=group)
                seconds = time.perf_counter() - begin
                expected = total * least * float(len(ranks)) ** (untimed + calls - 1)
                # Exact where the number of ranks is a power of two; elsewhere each call may round once for each rank.
                within = (
                    0.0 if len(ranks).bit_count() == 1 else (untimed + calls) * len(ranks) * torch.finfo(element).eps
                )
                if wrong := int(((tensor.double() - expected).abs() > within * expected).sum()):
                    raise SystemExit(
                        f"{dtype}, {named(size)}, mode {name}, rank {rank}: got {wrong} wrong elements, "
                        f"expected {expected:g} in all"
                    )
                if turn:
                    found[size][name].append(seconds / calls)
    dist.destroy_process_group()
    return found


def measured(library: str, ranks: int, dtype: str, sizes: list[int], rounds: int) -> dict[int, dict[str, list[float]]]:
    """Return the seconds of each round on the slowest rank, by size and mode."""
    from comm_utils.testing import run_ranks

    backend, variables = LIBRARIES[library]
    of_ranks: list[Any] = run_ranks(rank_main, ranks, backend, dtype, sizes, rounds, timeout_s=1800, env=variables)
    return {
        size: {name: [max(each) for each in zip(*(one[size][name] for one in of_ranks), strict=True)] for name in MODES}
        for size in sizes
    }


def cells(found: dict[str, list[float]]) -> list[str]:
    """Return the time of the mode that is off, and the ratios of the others."""
    off = found["off"]
    texts = [f"{statistics.median(off) * 1e3:.3g}"]
    for name in ("on", "compensated"):
        of_mode = found[name]

        def ratio(some: Any, of_mode: list[float] = of_mode) -> float:
            picked = list(some)
            return statistics.median(of_mode[i] for i in picked) / statistics.median(off[i] for i in picked)

        low, high = interval(ratio, len(off))
        texts.append(f"{ratio(range(len(off))):.2f} ({low:.2f} to {high:.2f})")
    return texts


def main(arguments: list[str] | None = None, write: Callable[[str], object] = print) -> None:
    """Measure, print the table, and put it into the page where that is asked for."""
    import comm_orchestrator as dist

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=[KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--write", action="store_true", help="put the table into docs/deterministic-reductions.md")
    given = parser.parse_args(arguments)
    facts = machine()
    lines = [
        f"Measured on {facts['processor']}, {facts['cores']} cores, Linux {facts['kernel']}, {given.rounds} rounds.",
        "",
        "| library | ranks | dtype | size | off, ms | on / off | compensated / off |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for library, (backend, _) in LIBRARIES.items():
        if not dist.available_backends()[backend].usable:
            continue
        for ranks in given.ranks:
            for dtype in given.dtypes:
                for size, found in measured(library, ranks, dtype, given.sizes, given.rounds).items():
                    row = [library, str(ranks), dtype, named(size), *cells(found)]
                    lines.append(f"| {' | '.join(row)} |")
                    write(lines[-1])
    text = "\n".join(lines)
    write(text)
    if given.write:
        put_between(PAGE, BEGIN, END, lambda _: text + "\n")


if __name__ == "__main__":
    main()
