"""What the flight recorder adds to a call: nanoseconds, with and without it, in turns.

    python benchmarks/recorder.py [--rounds N] [--calls N] [--steps N] [--write]

Three comparisons of calls that take turns. In shared memory, two ranks, each pinned to a core, call all_reduce of one
float32 with native code writing records and without. The record that Python writes of a call on another library is
compared with a function that does nothing, as Python always writes records. On torch's fake process group, which moves
nothing, all_reduce with its record is compared with torch.distributed's. A round is the mean of many calls, of the
slower rank where there are two. The table shows medians over the rounds, and the median of the differences (or the
ratio of medians) with its 95 % interval, by bootstrap over rounds.

A second table has steps of training by two ranks, with and without all of it: records, the watch's thread and the
comparison of the ranks' calls (``lazy``). A round starts two ranks with it and two without, which take turns of
``--steps`` steps while the other two wait; what a round counts is the ratio of the medians of its turns. Ranks are not
pinned: the threads of gloo would wait for the core of their rank.

``--write`` puts the table into docs/flight-recorder.md.
"""

from __future__ import annotations

import argparse
import atexit
import os
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import Any
from unittest import mock

from measuring import cores, interval, machine

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
    """Return what calls take on torch's fake group, by whom, and what a record in Python takes."""
    import torch
    import torch.distributed as c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import comm_orchestrator as dist
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

    kind = RECORDER.kind(
        RECORDER.group_index("benchmark", [0, 1], "", ""), "all_reduce", "all_reduce", "float32", "sum"
    )

    def records() -> None:
        kind.end(kind.begin(1, 0))

    def nothing() -> None: ...

    reader = open_ring(path)
    before = reader.count(0)
    contestants = {"torch": theirs, "ours": ours, "record": records, "nothing": nothing}
    found = rounds_of({name: (nothing, call) for name, call in contestants.items()}, rounds, calls)
    assert reader.count(0) - before >= 2 * rounds * (calls // BLOCKS * BLOCKS), "the calls were not recorded"
    reader.close()
    c10d.destroy_process_group()
    return found


@contextmanager
def unobserved() -> Iterator[None]:
    """Make worlds that record nothing, not even in private memory, and that nobody watches."""
    from comm_utils.flight_recorder import recorder
    from comm_utils.flight_recorder.kinds import Kind
    from comm_utils.watch.watch import WATCH

    def nothing(*_: object, **__: object) -> None: ...

    silent = mock.patch.object(recorder, "make_kind", return_value=Kind(lambda *_, **__: 0, *[nothing] * 3))
    with silent, mock.patch.object(WATCH, "start", new=nothing):
        yield


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


def begin_steps(name: str, observed: bool) -> None:
    """Set up a world of this rank, with records and watch or without, and a step that :func:`take_steps` takes."""
    import torch

    import comm_orchestrator as dist

    global _step
    torch.set_num_threads(1)
    backend, make = STEPS[name]
    if not observed:
        stack = ExitStack()
        atexit.register(stack.close)
        stack.enter_context(unobserved())
    dist.init_distributed(backend, verbose=False, config={"flight_recorder": {"enabled": observed}})
    atexit.register(dist.destroy_process_group)
    _step = make()


def take_steps(steps: int) -> tuple[float, float]:
    """Return the nanoseconds of a step, and what the threads of the watch took meanwhile, in % of a core."""
    import comm_orchestrator as dist

    dist.barrier()
    begin, watched = perf_counter_ns(), watch_ns()
    for _ in range(steps):
        _step()
    dist.barrier()
    took = perf_counter_ns() - begin
    return took / steps, 100 * (watch_ns() - watched) / took


def steps_of(rounds: int, steps: int, name: str) -> Rounds:
    """Return the nanoseconds of a step of the slower rank, with records and watch and without; and the watch's %."""
    from comm_utils.testing import RankPool

    found: Rounds = {"off": [], "on": [], "watch": []}
    for _ in range(rounds):
        turns: Rounds = {"off": [], "on": []}
        with ExitStack() as stack:
            pools = {
                which: stack.enter_context(
                    RankPool(2, timeout_s=600, setup=begin_steps, setup_args=(name, which == "on"))
                )
                for which in turns
            }
            for pool in pools.values():
                pool.run(take_steps, max(20, steps))
            for number in range(BLOCKS):
                for which in ("off", "on") if number % 2 else ("on", "off"):
                    of_ranks: list[Any] = pools[which].run(take_steps, steps)
                    turns[which].append(max(ns for ns, _ in of_ranks))
                    if which == "on":
                        found["watch"].append(max(share for _, share in of_ranks))
        for which, taken in turns.items():
            found[which].append(statistics.median(taken))
    return found


def with_interval(of: Callable[[Sequence[int]], float], rounds: int, digits: int) -> str:
    low, high = interval(of, rounds)
    return f"{of(range(rounds)):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def measured(target: Callable[..., Rounds], ranks: int, rounds: int, calls: int) -> Rounds:
    """Return the rounds of the slower rank."""
    from comm_utils.testing import run_ranks

    of_ranks: list[Any] = run_ranks(target, ranks, rounds, calls, timeout_s=1800)
    return {name: [max(each) for each in zip(*(one[name] for one in of_ranks), strict=True)] for name in of_ranks[0]}


def main(arguments: list[str] | None = None, write: Callable[[str], object] = print) -> None:
    """Measure, print the table, and put it into the page where that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=200_000, help="calls a round, of each contestant")
    parser.add_argument("--steps", type=int, default=30, help=f"steps a turn; a round has {BLOCKS} of each contestant")
    parser.add_argument("--write", action="store_true", help="put the table into docs/flight-recorder.md")
    given = parser.parse_args(arguments)
    if given.calls < BLOCKS:
        parser.error(f"--calls: got {given.calls}, expected at least {BLOCKS}")
    facts = machine()
    lines = [
        f"all_reduce of one element, {given.rounds} rounds of {given.calls} calls. Measured on {facts['processor']},",
        f"{facts['cores']} cores, Linux {facts['kernel']}.",
        "",
        "| calls | without, ns | with, ns | what it adds |",
        "|---|---:|---:|---:|",
    ]

    def row(name: str, found: Rounds, without: str, recorded: str, added: str) -> None:
        times = (f"{statistics.median(found[one]):.0f}" for one in (without, recorded))
        lines.append(f"| {name} | {' | '.join((*times, added))} |")

    def difference(found: Rounds, without: str, recorded: str) -> str:
        def of(some: Sequence[int]) -> float:
            return statistics.median(found[recorded][one] - found[without][one] for one in some)

        return f"{with_interval(of, given.rounds, 1)} ns"

    shared = measured(in_shared_memory, 2, given.rounds, given.calls)
    row("all_reduce, shared memory, 2 ranks", shared, "off", "on", difference(shared, "off", "on"))
    fake = measured(on_fake_group, 1, given.rounds, given.calls)
    row("a record in Python", fake, "nothing", "record", difference(fake, "nothing", "record"))

    def ratio(some: Sequence[int]) -> float:
        return statistics.median(fake["ours"][i] for i in some) / statistics.median(fake["torch"][i] for i in some)

    added = f"{with_interval(ratio, given.rounds, 2)} times"
    row("all_reduce, fake group: torch.distributed, and ours", fake, "torch", "ours", added)
    lines += [
        "",
        f"Of training, {given.rounds} rounds of {BLOCKS} turns of {given.steps} steps:",
        "",
        "| a step, 2 ranks | without, µs | with, µs | with / without | the watch's threads, % of a core |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in STEPS:
        step = steps_of(given.rounds, given.steps, name)

        def times(some: Sequence[int], step: Rounds = step) -> float:
            return statistics.median(step["on"][one] / step["off"][one] for one in some)

        medians = (f"{statistics.median(step[one]) / 1000:.0f}" for one in ("off", "on"))
        watch = f"{statistics.median(step['watch']):.2f}"
        lines.append(f"| {name} | {' | '.join((*medians, with_interval(times, given.rounds, 3), watch))} |")
    text = "\n".join(lines)
    write(text)
    if given.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
