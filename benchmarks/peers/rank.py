"""A rank of a peer, in a process of its own: it makes the calls that it is asked for, and says how long they took."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import Any, Protocol

from measuring import Meeting, cores

__all__ = ["CORES", "LIMIT_S", "Library", "Rank", "Served", "serve"]

# How long a rank may take to start, or to answer, before it ends itself.
LIMIT_S = 180
CORES = 2
# Where a launcher says which of its ranks this is.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")


class Library(Protocol):
    """What each module of ``libraries`` has for its ranks; ``facts`` are versions and the like, for the report."""

    facts: dict[str, str]

    def __init__(self, rank: int, ranks: int, meet: Callable[[], None]) -> None: ...

    def empty(self, elements: int, dtype: Any, way: str) -> Any:
        """A tensor of this library's own, or None where any does."""

    def call(self, task: Any, source: Any, target: Any) -> tuple[Callable[..., object], tuple[Any, ...]]:
        """The function for ``task`` and its arguments, ready; tensors: (n,), of ``task.dtype``, on the CPU.

        Raises:
            Unsupported: the library does not do this.
        """

    def close(self) -> None: ...


class Served(Protocol):
    """What a rank makes of the lines that it is sent; ``facts`` are for the report."""

    facts: dict[str, str]

    def answer(self, question: dict[str, Any]) -> dict[str, Any]: ...

    def close(self) -> None: ...


def one(number: int, function: Callable[..., object], a: Any) -> None:
    for _ in repeat(None, number):
        function(a)


def two(number: int, function: Callable[..., object], a: Any, b: Any) -> None:
    for _ in repeat(None, number):
        function(a, b)


def three(number: int, function: Callable[..., object], a: Any, b: Any, c: Any) -> None:
    for _ in repeat(None, number):
        function(a, b, c)


# Calls as one would write them: unpacking arguments at each would take as long as a tenth of the fastest call.
LOOPS: dict[int, Callable[..., None]] = {
    0: lambda number, function: one(number, lambda _: function(), None),
    1: one,
    2: two,
    3: three,
}


class Rank:
    def __init__(self, options: dict[str, Any], rank: int) -> None:
        import torch

        from peers.data import Data

        torch.set_num_threads(1)
        self.rank, self.ranks = rank, int(options["ranks"])
        fd = os.open(options["meeting"], os.O_RDWR)
        self.meet = Meeting(fd, rank, self.ranks, oversubscribed=self.ranks > CORES)
        os.close(fd)
        module = importlib.import_module(f"peers.libraries.{options['module']}")
        self.library: Library = module.Library(rank, self.ranks, self.meet)
        self.data = Data(rank, self.ranks)
        # Written now, so that no call is the first to touch a page.
        self.memory = [torch.zeros(options[name], dtype=torch.uint8) for name in ("source_bytes", "target_bytes")]
        self.prepared: dict[Any, Any] = {}
        self.blocks = 0
        self.facts = {"torch": torch.__version__, **self.library.facts}

    def prepare(self, task: Any) -> Any:
        import torch

        from peers.data import Prepared
        from peers.tasks import TRAINING

        if task.operation in TRAINING:
            from peers import training

            return training.prepare(task, self.library, self.rank, self.ranks)
        dtype = getattr(torch, task.dtype)
        whole = task.size_bytes // dtype.itemsize
        part = whole // self.ranks
        lengths = {"all_gather_into_tensor": (part, whole), "reduce_scatter_tensor": (whole, part)}
        in_place = task.operation in ("all_reduce", "broadcast")
        source, target = (
            memory[: length * dtype.itemsize].view(dtype)
            for memory, length in zip(self.memory, lengths.get(task.operation, (whole, whole)), strict=True)
        )
        own = self.library.empty(source.numel(), dtype, task.way)
        source = source if own is None else own
        target = source if in_place else target
        function, arguments = self.library.call(task, source, target)
        return Prepared(
            function,
            arguments,
            partial(self.data.fill, task, source, target),
            partial(self.data.wrong, task, source, target),
        )

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        from peers.tasks import Block

        return self.run(Block.from_json(question))

    def close(self) -> None:
        self.library.close()

    def run(self, block: Any) -> dict[str, Any]:
        """Make the calls of a block: ns for each loop, and the wrong parts of the last result."""
        from peers.data import Unsupported

        try:
            found = self.prepared.get(block.task) or self.prepare(block.task)
        except Unsupported as error:
            return {"unsupported": str(error)}
        self.prepared[block.task] = found
        make_calls, now_ns = LOOPS[len(found.arguments)], time.perf_counter_ns
        function, arguments, calls = found.function, found.arguments, block.calls
        times_ns, last = [], 0
        if block.warm_up:
            found.fill(0)
            self.meet()
            make_calls(block.warm_up, function, *arguments)
        for _ in range(block.loops):
            self.blocks = last = self.blocks + 1
            found.fill(last)
            self.meet()
            start = now_ns()
            make_calls(calls, function, *arguments)
            end = now_ns()
            times_ns.append((end - start) / calls)
        return {"times_ns": times_ns, "wrong": found.wrong(last, calls)}


def serve(text: str, make: Callable[[dict[str, Any], int], Served]) -> None:
    """What a rank does; nothing here outlives its caller by more than ``LIMIT_S``, as an alarm ends the process.

    ``make``: from the options and the rank.
    """
    signal.alarm(LIMIT_S)
    # Ctrl-C is for the process that measures, whatever a launcher passes on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    options = json.loads(text)
    rank = next(int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ)
    # Before any thread: what the process starts stays on its core.
    os.sched_setaffinity(0, {cores(CORES)[rank % CORES]})
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(options["socket"])
        answers, questions = sock.makefile("w"), sock.makefile("r")
        print(json.dumps({"rank": rank, "pid": os.getpid()}), file=answers, flush=True)
        own = make(options, rank)
        gc.freeze()
        gc.disable()
        print(json.dumps(own.facts), file=answers, flush=True)
        while True:
            signal.alarm(0)
            line = questions.readline()
            cpu_before_ns = time.process_time_ns()
            signal.alarm(LIMIT_S)
            if not line.strip():
                break
            found = own.answer(json.loads(line))
            gc.collect()
            found["cpu_ns"] = [cpu_before_ns, time.process_time_ns()]
            print(json.dumps(found), file=answers, flush=True)
        if line:  # an empty one asks for an orderly end; none at all means that the caller is gone
            own.close()
        else:
            os._exit(1)
