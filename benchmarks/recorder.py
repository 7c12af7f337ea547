"""What the flight recorder adds to a call: nanoseconds, with and without it, in turns.

    python benchmarks/recorder.py [--rounds N] [--calls N] [--steps N] [--write]

Three comparisons of calls that take turns. In shared memory, two ranks, each pinned to a core, call all_reduce of one
float32 with native code writing records and without. The record of a call on another library is compared with a
function that does nothing, as it is always written: by native code, and by Python as where ``comm-backend-ccl`` is not
installed. On torch's fake process group, which moves nothing, all_reduce with its record is compared with
torch.distributed's. A round is the mean of many calls, of the
slower rank where there are two. The table shows medians over the rounds, and the median of the differences (or the
ratio of medians) with its 95 % interval, by bootstrap over rounds.

A second table has steps of training by two ranks, with and without all of it: records, the looks of the watch and the
comparison of the ranks' calls (``lazy``). A round starts two ranks, which take ``--steps`` steps with it and as many
without, in turns: the same processes, groups and models, as two processes that do the same differ by more than that.
Each pair of turns gives a ratio; the table has the median over all pairs of all rounds. Where threads wake each other,
as in gloo, it differs by more than what is looked for; so the last column counts: records of a step, each at what the
first table found, and the processor time of the watch's threads, as a share of the step, as if a core had to wait for
all of it. Ranks are not pinned: the threads of gloo would wait for the core of their rank.

``--write`` puts the table into docs/flight-recorder.md.
"""

from __future__ import annotations

import argparse
import atexit
import os
import statistics
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns
from types import BuiltinFunctionType
from typing import Any

from measuring import cores, interval, machine, positive, put_between

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "flight-recorder.md"
BEGIN, END = "<!-- begin: python benchmarks/recorder.py --write -->", "<!-- end -->"
WARM_UP_CALLS = 2000
#: Blocks of a round, between which the contestants take turns.
BLOCKS = 20

Rounds = dict[str, list[float]]
#: By name: what prepares a turn, and the call.
Contestants = dict[str, tuple[Callable[[], object], Callable[[], object]]]


def in_turns(contestants: Contestants, calls: int) -> dict[str, float]:
    """Return the nanoseconds of a call by contestant."""
    taken = dict.fromkeys(contestants, 0)
    for _ in range(BLOCKS):
        for name, (prepare, call) in contestants.items():
            prepare()
            call()
            begin = perf_counter_ns()
            for _ in range(calls // BLOCKS):
                call()
            taken[name] += perf_counter_ns() - begin
    return {name: ns / (calls // BLOCKS * BLOCKS) for name, ns in taken.items()}


def rounds_of(contestants: Contestants, rounds: int, calls: int) -> Rounds:
    for prepare, call in contestants.values():
        prepare()
        for _ in range(WARM_UP_CALLS):
            call()
    found: Rounds = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, ns in in_turns(contestants, calls).items():
            found[name].append(ns)
    return found


def in_shared_memory(rounds: int, calls: int) -> Rounds:
    """Return what calls take on this rank, of two in shared memory, pinned to cores."""
    import torch

    import comm_orchestrator as dist
    from comm_backend_ccl import shared_memory
    from comm_utils.flight_recorder import RECORDER, open_ring

    torch.set_num_threads(1)
    dist.init_distributed("ccl", verbose=False)
    os.sched_setaffinity(0, {cores(2)[dist.get_rank()]})
    descriptor, path = RECORDER.descriptor, RECORDER.path
    assert path is not None, "the flight recorder has no file"
    tensor = torch.zeros(1)
    reader = open_ring(path)

    def call() -> None:
        dist.all_reduce(tensor)

    def turn(descriptor: int) -> Callable[[], None]:
        def prepare() -> None:
            shared_memory.record_to(descriptor)
            dist.barrier()

        return prepare

    found = rounds_of({"off": (turn(-1), call), "on": (turn(descriptor), call)}, rounds, calls)
    # Whether it was as the names say, and the calls gave what they had to.
    for expected, of in ((0, -1), (100, descriptor)):
        shared_memory.record_to(of)
        before = reader.count(1)
        for _ in range(100):
            call()
        assert reader.count(1) - before == expected, (expected, reader.count(1) - before)
    tensor.fill_(dist.get_rank() + 1)
    dist.all_reduce(tensor)
    assert tensor.item() == 3
    reader.close()
    dist.destroy_process_group()
    return found


def on_fake_group(rounds: int, calls: int) -> Rounds:
    """Return what calls take on torch's fake group, by whom, and what a record takes."""
    import torch
    import torch.distributed as c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import comm_orchestrator as dist
    from comm_utils import kernels
    from comm_utils.flight_recorder import RECORDER, open_ring

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {cores(1)[0]})
    c10d.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    dist.init_distributed(verbose=False)
    path = RECORDER.path
    assert path is not None, "the flight recorder has no file"
    tensor, other = torch.ones(1), torch.ones(1)

    def ours() -> None:
        dist.all_reduce(tensor)

    def theirs() -> None:
        c10d.all_reduce(other)

    def record(name: str) -> Callable[[], None]:
        group = RECORDER.group_index(name, [0, 1], "", "")
        kind = RECORDER.kind(group, "all_reduce", "all_reduce", "float32", "sum")
        assert isinstance(kind.begin, BuiltinFunctionType) is (name == "native"), "comm-backend-ccl has no native code"

        def call() -> None:
            kind.end(kind.begin(1, 0))

        return call

    native_record = record("native")
    offered, kernels.recording_functions = kernels.recording_functions, lambda *_: None
    python_record = record("python")
    kernels.recording_functions = offered

    def nothing() -> None: ...

    reader = open_ring(path)
    before = reader.count(0)
    contestants = {"torch": theirs, "ours": ours, "native": native_record, "python": python_record, "nothing": nothing}
    found = rounds_of({name: (nothing, call) for name, call in contestants.items()}, rounds, calls)
    assert reader.count(0) - before >= 3 * rounds * (calls // BLOCKS * BLOCKS), "the calls were not recorded"
    reader.close()
    c10d.destroy_process_group()
    return found


#: Whether calls are recorded and the watch looks; the turns of a world of :func:`begin_steps` switch it.
_observed = True


def switchable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a ``Kind`` that does nothing while :data:`_observed` is False."""

    def begin(elements: int, depth: int, *rest: Any, **options: Any) -> int:
        recorded: int = function(elements, depth + 1, *rest, **options) if _observed else 0
        return recorded

    def other(number: int, *rest: Any) -> None:
        if _observed:
            function(number, *rest)

    return begin if function.__name__ == "begin" else other


def observe(observed: bool) -> None:
    """Record calls and let the watch look from now on, or not."""
    from comm_backend_ccl import shared_memory
    from comm_utils.flight_recorder import RECORDER

    global _observed
    _observed = observed
    shared_memory.record_to(RECORDER.descriptor if observed else -1)


def demo_step() -> Callable[[], object]:
    """Return a step of docs/examples/digits.py, on drawn images."""
    import torch

    import comm_orchestrator as dist

    torch.manual_seed(dist.get_rank())
    images, labels = torch.rand(32, 64), torch.randint(10, (32,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    def step() -> None:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            assert parameter.grad is not None, "every parameter is used"
            dist.all_reduce(parameter.grad, op="avg")
        optimizer.step()

    return step


def million(wrap: Callable[[Any], Any]) -> Callable[[], object]:
    """Return a step of a model of a million parameters whose gradients ``wrap`` has averaged."""
    import torch

    import comm_orchestrator as dist

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(500, 500) for _ in range(4)))
    inputs = torch.rand(32, 500, generator=torch.Generator().manual_seed(dist.get_rank()))
    wrapped, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        wrapped(inputs).square().mean().backward()
        optimizer.step()

    return step


def ddp_step() -> Callable[[], object]:
    """Return a step of torch's DistributedDataParallel."""
    from torch.nn.parallel import DistributedDataParallel

    return million(DistributedDataParallel)


def hooks_step() -> Callable[[], object]:
    """Return a step with the data-parallel hooks of this project."""
    import comm_orchestrator as dist

    def hooked(model: Any) -> Any:
        dist.register_data_parallel_hooks(model)
        return model

    return million(hooked)


#: By name: the backend, and what makes a step.
STEPS: dict[str, tuple[str, Callable[[], Callable[[], object]]]] = {
    "of the demo, gloo": ("gloo", demo_step),
    "of the demo, shared memory": ("ccl", demo_step),
    "with DDP, a million parameters, gloo": ("gloo", ddp_step),
    "with data-parallel hooks, a million parameters, gloo": ("gloo", hooks_step),
    "with data-parallel hooks, a million parameters, shared memory": ("ccl", hooks_step),
}


def watch_ns() -> int:
    """Return the processor time that the threads of the watch have taken."""
    threads = [one.native_id for one in threading.enumerate() if one.name.startswith("comm-watch")]
    return sum(int(Path(f"/proc/self/task/{one}/schedstat").read_text().split()[0]) for one in threads)


def _step() -> object:
    return None


def begin_steps(name: str) -> None:
    """Set up a world of this rank, and a step that :func:`take_steps` takes."""
    import torch

    import comm_orchestrator as dist
    from comm_utils.flight_recorder import recorder
    from comm_utils.flight_recorder.kinds import Kind, make_kind
    from comm_utils.watch.watch import WATCH

    global _step
    torch.set_num_threads(1)
    backend, make = STEPS[name]
    look = WATCH._look
    WATCH._look = lambda: look() if _observed else None  # type: ignore[method-assign]
    recorder.make_kind = lambda *given: Kind(*map(switchable, make_kind(*given)))
    dist.init_distributed(backend, verbose=False)
    atexit.register(dist.destroy_process_group)
    _step = make()


def recorded_calls() -> tuple[int, int]:
    """Return how many calls of this rank Python has recorded, and native code."""
    from comm_utils.flight_recorder import RECORDER, open_ring

    assert RECORDER.path is not None, "the flight recorder has no file"
    reader = open_ring(RECORDER.path)
    try:
        return reader.count(0), reader.count(1)
    finally:
        reader.close()


def take_steps(steps: int, observed: bool) -> tuple[float, ...]:
    """Return the nanoseconds of the steps and of the watch's threads, and the records of Python and native code."""
    import comm_orchestrator as dist

    observe(observed)
    dist.barrier()
    before, begin, watched = recorded_calls(), perf_counter_ns(), watch_ns()
    for _ in range(steps):
        _step()
    dist.barrier()
    took, watched = perf_counter_ns() - begin, watch_ns() - watched
    records = [after - one for after, one in zip(recorded_calls(), before, strict=True)]
    # The calls that DDP makes of torch are not ours to record.
    assert (sum(records) > 0) is observed, (observed, records, steps)
    return took, watched, *records


def steps_of(rounds: int, steps: int, name: str) -> Rounds:
    """Return, of each turn, the nanoseconds of a step of the slower rank, observed and not; and of all that are.

    The latter are "all" that the slower rank took, "watched" of its watch's threads, and its records: "python" and
    "native".
    """
    from comm_utils.testing import RankPool

    found: Rounds = {name: [] for name in ("off", "on", "all", "watched", "python", "native")}
    for _ in range(rounds):
        with RankPool(2, timeout_s=600, setup=begin_steps, setup_args=(name,)) as pool:
            for observed in (True, False):
                pool.run(take_steps, max(20, steps), observed)
            for number in range(BLOCKS):
                for which in ("off", "on") if number % 2 else ("on", "off"):
                    of_ranks: list[Any] = pool.run(take_steps, steps, which == "on")
                    slower = max(of_ranks)
                    found[which].append(slower[0] / steps)
                    if which == "on":
                        for one, value in zip(("all", "watched", "python", "native"), slower, strict=True):
                            found[one].append(value)
    return found


def with_interval(of: Callable[[Sequence[int]], float], samples: int, digits: int) -> str:
    low, high = interval(of, samples)
    return f"{of(range(samples)):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def measured(target: Callable[..., Rounds], ranks: int, rounds: int, calls: int) -> Rounds:
    """Return the rounds of the slower rank."""
    from comm_utils.testing import run_ranks

    of_ranks: list[Any] = run_ranks(target, ranks, rounds, calls, timeout_s=1800)
    return {name: [max(each) for each in zip(*(one[name] for one in of_ranks), strict=True)] for name in of_ranks[0]}


def main(arguments: list[str] | None = None, write: Callable[[str], object] = print) -> None:
    """Measure, print the table, and put it into the page where that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--calls", type=int, default=200_000, help="calls a round, of each contestant")
    parser.add_argument("--steps", type=int, default=30, help=f"steps a turn; a round has {BLOCKS} of each contestant")
    parser.add_argument("--write", action="store_true", help="put the table into docs/flight-recorder.md")
    given = parser.parse_args(arguments)
    if given.calls < BLOCKS:
        parser.error(f"--calls: got {given.calls}, expected at least {BLOCKS}")
    facts = machine()
    lines: list[str] = []

    def say(*some: str) -> None:
        lines.extend(some)
        for one in some:
            write(one)

    def row(name: str, found: Rounds, without: str, recorded: str, added: str) -> None:
        times = (f"{statistics.median(found[one]):.0f}" for one in (without, recorded))
        say(f"| {name} | {' | '.join((*times, added))} |")

    def difference(found: Rounds, without: str, recorded: str) -> tuple[float, str]:
        def of(some: Sequence[int]) -> float:
            return statistics.median(found[recorded][one] - found[without][one] for one in some)

        return of(range(given.rounds)), f"{with_interval(of, given.rounds, 1)} ns"

    say(
        f"all_reduce of one element, {given.rounds} rounds of {given.calls} calls. Measured on {facts['processor']},",
        f"{facts['cores']} cores, Linux {facts['kernel']}.",
        "",
        "| calls | without, ns | with, ns | what it adds |",
        "|---|---:|---:|---:|",
    )
    shared = measured(in_shared_memory, 2, given.rounds, given.calls)
    native_ns, added = difference(shared, "off", "on")
    row("all_reduce, shared memory, 2 ranks", shared, "off", "on", added)
    fake = measured(on_fake_group, 1, given.rounds, given.calls)
    record_ns, added = difference(fake, "nothing", "native")
    row("the record of a call on another library", fake, "nothing", "native", added)
    row("the same without comm-backend-ccl", fake, "nothing", "python", difference(fake, "nothing", "python")[1])

    def ratio(some: Sequence[int]) -> float:
        return statistics.median(fake["ours"][i] for i in some) / statistics.median(fake["torch"][i] for i in some)

    added = f"{with_interval(ratio, given.rounds, 2)} times"
    row("all_reduce, fake group: torch.distributed, and ours", fake, "torch", "ours", added)
    say(
        "",
        f"Of training, {given.rounds} rounds of {BLOCKS} pairs of turns of {given.steps} steps:",
        "",
        "| a step, 2 ranks | without, µs | with, µs | with / without | counted |",
        "|---|---:|---:|---:|---:|",
    )
    for name in STEPS:
        step = steps_of(given.rounds, given.steps, name)

        def times(some: Sequence[int], step: Rounds = step) -> float:
            return statistics.median(step["on"][one] / step["off"][one] for one in some)

        medians = (f"{statistics.median(step[one]) / 1000:.0f}" for one in ("off", "on"))
        sums = {one: sum(step[one]) for one in ("all", "watched", "python", "native")}
        counted = sums["watched"] + sums["python"] * record_ns + sums["native"] * max(0.0, native_ns)
        shares = f"{with_interval(times, len(step['on']), 3)} | {100 * counted / sums['all']:.2f} %"
        say(f"| {name} | {' | '.join(medians)} | {shares} |")
    if given.write:
        put_between(PAGE, BEGIN, END, lambda _: "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
