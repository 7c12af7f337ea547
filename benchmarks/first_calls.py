"""How long the first calls of new groups take: each round starts new ranks, on gloo and in shared memory in turns.

    python benchmarks/first_calls.py [--mib N] [--calls N] [--rounds N]

Two ranks on one host, float32. Each operation has a group of its own, which knows nothing of the others; all ranks
write their tensors anew and meet before each call, and the slower rank counts. Outputs are overwritten before each
call, and all of their elements compared with the exact ones after it. For the first call, calls 2 to 4, and those after
them, the table gives the median over the rounds, and the ratio of gloo to this with its 95 % interval; of several calls
in a round, their median counts.

Groups in shared memory choose between their transfers from what they measure in these very calls, so the first ones
show what that costs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

from measuring import MIB, interval, machine, positive

LIBRARIES = {"gloo": "gloo", "shared memory": "ccl"}
OPERATIONS = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
RANKS = 2
#: No element of a result.
WRONG = -1.0


def rank_main(backend: str, size_bytes: int, calls: int) -> dict[str, list[float]]:
    """Return the seconds of each call by operation."""
    import torch

    import comm_orchestrator as dist

    torch.set_num_threads(1)
    dist.init_distributed(backend, verbose=False)
    rank = dist.get_rank()
    whole, other = torch.empty(size_bytes // 4), torch.empty(size_bytes // 4)
    part, part_out = torch.empty(whole.numel() // RANKS), torch.empty(whole.numel() // RANKS)
    found: dict[str, list[float]] = {}
    for name in OPERATIONS:
        group = dist.new_group(range(RANKS))
        # The call, what it reads, what it writes, and the values of the two halves of that.
        call, source, result, halves = {
            "all_reduce": (lambda g: dist.all_reduce(whole, group=g), whole, whole, (3, 3)),
            "broadcast": (lambda g: dist.broadcast(whole, 0, group=g), whole, whole, (1, 1)),
            "all_gather_into_tensor": (
                lambda g: dist.all_gather_into_tensor(whole, part, group=g),
                part,
                whole,
                (1, 2),
            ),
            "reduce_scatter_tensor": (
                lambda g: dist.reduce_scatter_tensor(part_out, whole, group=g),
                whole,
                part_out,
                (3, 3),
            ),
            "all_to_all_single": (
                lambda g: dist.all_to_all_single(other, whole, group=g),
                whole,
                other,
                (1, 2),
            ),
        }[name]
        of_call: list[float] = []
        for number in range(calls):
            result.fill_(WRONG)
            source.fill_(rank + 1)
            dist.barrier()
            begin = time.perf_counter()
            call(group)
            of_call.append(time.perf_counter() - begin)
            for got, expected in zip(result.chunk(2), halves, strict=True):
                if wrong := int((got != expected).sum()):
                    raise SystemExit(
                        f"{name}, call {number + 1}, rank {rank}: got {wrong} wrong elements of {got.numel()}, "
                        f"expected {expected} in all"
                    )
        found[name] = of_call
        dist.destroy_process_group(group)
    dist.destroy_process_group()
    return found


def spans(calls: int) -> dict[str, slice]:
    """Return the calls of each column."""
    return {"1": slice(0, 1), "2 to 4": slice(1, 4), f"5 to {calls}": slice(4, calls)}


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> None:
    """Measure, and print the table."""
    from comm_utils.testing import run_ranks

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=64, help="of the larger tensor of a call (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=12, help="of each operation, at least 5 (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=7)
    given = parser.parse_args(arguments)
    if given.calls < 5 or given.mib < 1:
        parser.error("--calls: at least 5; --mib: at least 1")
    columns = spans(given.calls)
    # library -> operation -> for each round the seconds of each call on the slower rank
    found: dict[str, dict[str, list[list[float]]]] = {one: {name: [] for name in OPERATIONS} for one in LIBRARIES}
    for _ in range(given.rounds):
        for library, backend in LIBRARIES.items():
            of_ranks = run_ranks(rank_main, RANKS, backend, given.mib * MIB, given.calls, timeout_s=600)
            for name in OPERATIONS:
                found[library][name].append([max(each) for each in zip(*(one[name] for one in of_ranks), strict=True)])
    facts = machine()
    write(f"{given.mib} MiB, {RANKS} ranks, new groups in each of {given.rounds} rounds; ms, and gloo's time to it.")
    write(f"Measured on {facts['processor']}, {facts['cores']} cores, Linux {facts['kernel']}.")
    write("")
    write(f"| operation | library |{''.join(f' call {span} |' for span in columns)}")
    write(f"|---|---|{'---:|' * len(columns)}")
    for name in OPERATIONS:
        for library in LIBRARIES:
            cells = [cell(found, library, name, span) for span in columns.values()]
            write(f"| `{name}` | {library} | {' | '.join(cells)} |")


def cell(found: dict[str, dict[str, list[list[float]]]], library: str, name: str, span: slice) -> str:
    """Write the median of these calls over the rounds, and the ratio to it."""
    of = {one: [statistics.median(calls[span]) for calls in found[one][name]] for one in LIBRARIES}

    def ratio(rounds: Sequence[int]) -> float:
        gloo, ours = (statistics.median(of[one][i] for i in rounds) for one in ("gloo", library))
        return gloo / ours

    text = f"{1e3 * statistics.median(of[library]):.1f}"
    if library == "gloo":
        return text
    rounds = len(of[library])
    low, high = interval(ratio, rounds)
    return f"{text}, {ratio(range(rounds)):.1f} times ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    main()
