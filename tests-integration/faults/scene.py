"""What every scene does on a rank: meet the others, call, write down what came of it, and start again."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import comm_orchestrator as dist
from faults.expected import LIMIT_S

__all__ = ["Scene", "Spec"]

_START_S = 15.0
_MEET_S = 30.0
_CALLS, _BETWEEN_S = 30, 0.05


@dataclass(frozen=True)
class Spec:
    """What a process is told; all of it is JSON.

    Attributes:
        scene: ``module:function`` below ``faults.scenes``.
        moment: before, during or after a collective.
        backend: the argument of ``init_distributed``.
        rank: of this process; processes of other roles have none of the ranks.
        world_size: number of ranks.
        culprit: the rank that is at fault.
        survivors: the ranks that start again.
        folder: where the ranks meet, and write down what came.
        ports: of the first, the second and the last start.
        seed: of a schedule.
    """

    scene: str
    moment: str
    backend: str
    rank: int
    world_size: int
    culprit: int
    survivors: list[int]
    folder: str
    ports: list[int]
    seed: int = 0


class Scene:
    """One rank of a cell."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.rank, self.world_size = spec.rank, spec.world_size
        self.is_culprit = spec.rank == spec.culprit
        self.moment = spec.moment
        self.folder = Path(spec.folder)
        self._log = os.open(self.folder / f"rank{spec.rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._next = 0
        self.note("process", pid=os.getpid(), second_port=spec.ports[1])

    def note(self, event: str, **facts: Any) -> None:
        """Write down what happens, so that it is kept however this process ends."""
        os.write(self._log, (json.dumps({"t": time.monotonic(), "event": event, **facts}) + "\n").encode())

    # --- the moments, without the library

    def tell(self, name: str) -> None:
        """Let every rank know that something has come about."""
        (self.folder / f"told-{name}").touch()

    def wait_for(self, name: str) -> None:
        """Wait until some process has told so."""
        self._until(name, self.folder / f"told-{name}")

    def meet(self, name: str) -> None:
        """Wait until every rank is here that lives."""
        self.tell(f"{name}-{self.rank}")
        for rank in range(self.world_size):
            self._until(name, self.folder / f"told-{name}-{rank}", self.folder / f"told-gone-{rank}")

    def pid_of(self, rank: int) -> int:
        """Return the process id that a rank, or the process behind the ranks, has written down."""
        first = (self.folder / f"rank{rank}.jsonl").read_text().splitlines()[0]
        return int(json.loads(first)["pid"])

    def _until(self, name: str, *paths: Path) -> None:
        end = time.monotonic() + _MEET_S
        while not any(path.exists() for path in paths):
            if time.monotonic() > end:
                self.note("lost", waited_for=name)
                raise SystemExit(3)
            time.sleep(0.003)

    def fault(self) -> None:
        """Say that the fault happens now; what survivors need is counted from here."""
        self.note("fault")
        self.tell("fault")

    # --- calls

    def start(self, port: int = 0, limit_s: float = _START_S, **environ: str) -> bool:
        """Set up; returns whether that went well.

        Args:
            port: which of the ports.
            limit_s: for the start.
            **environ: variables that differ from the others'.
        """
        os.environ["MASTER_PORT"] = str(self.spec.ports[port])
        config = {"timeouts": {"init_s": limit_s}}
        with _environment(environ):
            return self.attempt(
                "init_distributed",
                lambda: dist.init_distributed(self.spec.backend, verbose=False, timeout=LIMIT_S, config=config),
            )

    def attempt(self, label: str, call: Callable[[], Any], expected: Any = None) -> bool:
        """Make a call and write down how it ended; returns whether it raised nothing.

        Args:
            label: its name.
            call: returns a tensor, or nothing.
            expected: the numbers that the tensor should have; ``...``: whatever is returned is wrong.
        """
        self.note("begin", call=label)
        try:
            value = call()
        except Exception as error:
            kinds = [one.__name__ for one in type(error).__mro__]
            self.note("raised", call=label, kinds=kinds, message=str(error))
            return False
        right = expected is None or (expected is not ... and bool(torch.equal(value, expected)))
        self.note("returned", call=label, right=right)
        return True

    def add(self, group: Any = None, *, numbers: int = 16) -> bool:
        """Add numbers that no other call adds, and compare them."""
        self._next += 1
        tensor = torch.full((numbers,), float(self.rank + 10 * self._next))
        ranks = range(self.world_size)
        expected = torch.full((numbers,), float(sum(rank + 10 * self._next for rank in ranks)))

        def call() -> torch.Tensor:
            dist.all_reduce(tensor, group=group)
            return tensor

        return self.attempt("all_reduce", call, expected)

    def begin_to_add(self) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Begin the same asynchronously; returns its handle, its tensor, and what that should become."""
        self._next += 1
        tensor = torch.full((16,), float(self.rank + 10 * self._next))
        expected = torch.full((16,), float(sum(rank + 10 * self._next for rank in range(self.world_size))))
        self.note("begin", call="all_reduce")
        return dist.all_reduce(tensor, async_op=True), tensor, expected

    def finish_adding(self, begun: tuple[Any, torch.Tensor, torch.Tensor]) -> bool:
        """Wait for it, and compare."""
        work, tensor, expected = begun

        def wait() -> torch.Tensor:
            work.wait()
            return tensor

        return self.attempt("all_reduce", wait, expected)

    def warm(self) -> None:
        """Make three calls that are right, where the fault comes after some; then all ranks are ready for it."""
        if self.moment == "after":
            for _ in range(3):
                self.add()
        self.meet("ready")
        self.note("ready")

    def keep_calling(self, calls: int = _CALLS) -> None:
        """Add small numbers until there is an error, for a second and a half if there is none."""
        for _ in range(calls):
            if not self.add():
                return
            time.sleep(_BETWEEN_S)

    # --- the end

    def leave(self) -> None:
        """Destroy, and say how long it took."""
        begin = time.monotonic()
        problem = ""
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        self.note("destroyed", seconds=time.monotonic() - begin, problem=problem)

    def end(self) -> None:
        """Destroy, start again with those that live, add numbers, and end."""
        self.leave()
        survivors = [one for one in self.spec.survivors if not (self.folder / f"told-gone-{one}").exists()]
        if self.rank not in survivors:
            return
        place = survivors.index(self.rank)
        problem = ""
        try:
            os.environ |= {"MASTER_PORT": str(self.spec.ports[2]), "RANK": str(place), "LOCAL_RANK": str(place)}
            os.environ |= {"WORLD_SIZE": str(len(survivors)), "LOCAL_WORLD_SIZE": str(len(survivors))}
            os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
            config = {"timeouts": {"init_s": _START_S}}
            dist.init_distributed(self.spec.backend, verbose=False, timeout=LIMIT_S, config=config)
            tensor = torch.full((16,), float(place + 1))
            dist.all_reduce(tensor)
            expected = float(sum(range(1, len(survivors) + 1)))
            if tensor.tolist() != [expected] * 16:
                problem = f"wrong result: {tensor[0].item()} instead of {expected}"
            dist.destroy_process_group()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        self.note("again", problem=problem)


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ |= changes
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
