"""A rank of a variant, in a process of its own: it trains when it is asked to, and says how long everything took."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import torch
import torch.distributed as c10d
from language_model import batch, transformer
from measuring import Meeting
from peers.rank import CORES

from training.engines import ENGINES, WORLDS, Engine
from training.memory import Peak, give_back, used_bytes
from training.variants import SIZES

__all__ = ["Trainer"]

# Sequences a step of each rank.
OF_A_RANK = 4
WARM_UP_ELEMENTS = 1 << 22


class Trainer:
    """Steps of a transformer; ``options``: those of :func:`peers.rank.serve`."""

    def __init__(self, options: dict[str, Any], rank: int) -> None:
        torch.set_num_threads(1)
        self.rank, self.ranks = rank, int(options["ranks"])
        fd = os.open(options["meeting"], os.O_RDWR)
        self.meet = Meeting(fd, rank, self.ranks, oversubscribed=self.ranks > CORES)
        os.close(fd)
        self.module = options["module"]
        self.world = WORLDS[self.module]()
        self.engine: Engine | None = None
        self.done = 0
        self.facts = {"torch": torch.__version__, **self.world.facts}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = getattr(self, question.pop("do"))(**question)
        return found

    def build(self, millions: float) -> dict[str, Any]:
        """Make a model of this size, and forget the one before; how many parameters it has."""
        self.drop()
        size = SIZES[millions]
        model = transformer(size.layers, size.width)
        parameters = sum(one.numel() for one in model.parameters())
        self.engine, self.done = ENGINES[self.module](model), 0
        return {"parameters": parameters}

    def drop(self) -> dict[str, Any]:
        if self.engine is not None:
            self.engine.remove()
            self.engine = None
            gc.collect()
        return {}

    def train(self, steps: int) -> dict[str, Any]:
        """``times_ns`` of each step, and the mean ``loss`` of all."""
        assert self.engine is not None
        step, now_ns = self.engine.step, time.perf_counter_ns
        numbers = range(self.done, self.done + steps)
        texts = [batch(number, OF_A_RANK * self.ranks).chunk(self.ranks)[self.rank] for number in numbers]
        self.done += steps
        losses, times_ns = [], []
        self.meet()
        start = now_ns()
        for text in texts:
            losses.append(step(text))
            end = now_ns()
            times_ns.append(end - start)
            start = end
        return {"times_ns": times_ns, "loss": float(torch.stack(losses).mean())}

    def parameters(self) -> dict[str, Any]:
        """Sums of the bits of each tensor of ``parameters`` that this rank has whole."""
        assert self.engine is not None
        whole = (one.detach().view(torch.int32) for one in self.engine.whole())
        return {"parameters": [int(bits.sum(dtype=torch.int64)) for bits in whole]}

    def memory(self, millions: float, steps: int) -> dict[str, Any]:
        """Bytes that the model has in this rank between steps, and at most within one."""
        give_back()
        # What is imported at its first use, and the buffers that a library keeps, come with a smaller model.
        c10d.all_reduce(torch.ones(WARM_UP_ELEMENTS))
        self.build(min(SIZES))
        self.train(steps)
        self.drop()
        give_back()
        before = used_bytes()
        found = self.build(millions)
        self.train(steps)  # the optimizer makes its state in the first
        give_back()
        between = used_bytes()
        peak = Peak()
        peak.start()
        self.train(steps)
        found |= {"between_bytes": between - before, "most_bytes": peak.stop() - before}
        self.drop()
        return found

    def trace(self, folder: str, steps: int) -> dict[str, Any]:
        """Train with every operation recorded into ``folder``."""
        import comm_orchestrator as dist

        dist.start_trace(folder)
        found = self.train(steps)
        dist.stop_trace()
        return found

    def close(self) -> None:
        self.drop()
        self.world.close()
