"""What is measured: operations, types and sizes, and how many calls a block of each has."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from measuring import KIB, MIB

__all__ = [
    "MEMORIES",
    "OTHERS",
    "OTHER_SIZES_BYTES",
    "SHORT_TYPES",
    "SIZES_BYTES",
    "TIGHT_BYTES",
    "TRAINING",
    "Block",
    "Task",
    "ways",
    "work",
]

SIZES_BYTES = (64, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 512 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
OTHER_SIZES_BYTES = (64, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
# Hot: calls follow one another on the same tensors. Fresh: its owner rewrites the input before each, and all meet.
MEMORIES = ("hot", "fresh")
OTHERS = ("broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
SHORT_TYPES = ("bfloat16", "float16")
# Each beside the same without communication.
TRAINING = ("ddp_step", "ddp_step_alone", "tensor_parallel_forward", "tensor_parallel_forward_alone")
# Up to here tensors stay in the core's cache, and many calls are timed together.
TIGHT_BYTES = MIB
# In place, a sum over ranks grows by their number at each call: so many can be made before float32 is out of range.
MOST_CALLS = {2: 200, 4: 50}
MOST_CALLS_FLOAT16 = 20


@dataclass(frozen=True)
class Task:
    """One operation on tensors of one size.

    ``size_bytes``: of the whole: what is reduced or sent to others, and of all_gather what comes out; 0 for training.
    ``way``: how a library is asked for it where there are several, see :func:`ways`.
    """

    ranks: int
    operation: str
    size_bytes: int
    dtype: str = "float32"
    way: str = ""
    memory: str = "hot"

    def by(self, way: str) -> Task:
        return dataclasses.replace(self, way=way)


@dataclass(frozen=True)
class Block:
    """``loops`` times: new data, a meeting, and ``calls`` calls back to back, which are timed together."""

    task: Task
    warm_up: int
    loops: int
    calls: int

    @classmethod
    def of(cls, task: Task, first: bool, quick: bool, slow: bool) -> Block:
        """``first``: of its task, so that it warms up in full; ``slow``: of a peer that takes 0.1 ms and more."""
        size = task.size_bytes
        if task.operation in TRAINING:
            return cls(task, 20 if first and not quick else 3, 5, 1)
        if size > TIGHT_BYTES:
            warm_up = (5 if quick else 20) if first else 0
            if task.memory == "fresh":
                return cls(task, warm_up, min(4, max(1, 128 * MIB // size)), 1)
            # At least two: the first call on new data is the fresh one.
            return cls(task, warm_up, 1, min(4, max(2, 128 * MIB // size)))
        if task.memory == "fresh":
            return cls(task, 20, 20, 1)
        if slow:
            # In a loop that lasts, whatever else the machine does would count every time.
            return cls(task, 20, 20, 10)
        most = MOST_CALLS_FLOAT16 if task.dtype == "float16" else MOST_CALLS[task.ranks]
        calls = min(most, 20 + 12 * MIB // size)
        return cls(task, 20, 5 if size <= 16 * KIB else 2, calls)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Block:
        return cls(**{**found, "task": Task(**found["task"])})


def work(ranks: int, sizes_bytes: Sequence[int] | None, memories: Sequence[str] = MEMORIES) -> Iterator[Task]:
    """All tasks of a world size; of ``sizes_bytes`` only, where they are given."""

    def wanted(*sizes: int) -> list[int]:
        return [size for size in sizes if sizes_bytes is None or size in sizes_bytes]

    def of(operation: str, sizes: Sequence[int], dtype: str = "float32") -> Iterator[Task]:
        return (Task(ranks, operation, size, dtype, memory=memory) for memory in memories for size in sizes)

    if ranks == 4:
        yield from of("all_reduce", wanted(64, 64 * KIB, MIB, 64 * MIB))
        return
    yield from of("all_reduce", sizes_bytes or SIZES_BYTES)
    for operation in OTHERS:
        yield from of(operation, wanted(*OTHER_SIZES_BYTES))
    for dtype in SHORT_TYPES:
        yield from of("all_reduce", wanted(16 * KIB, MIB, 64 * MIB), dtype)
    if sizes_bytes is None:
        yield from (Task(2, operation, 0) for operation in TRAINING)


def ways(peer: str, task: Task) -> list[str]:
    """How ``peer`` is asked for ``task``, "" being the plain way; nothing where it is for other things.

    "inference": ``inference_all_reduce``. "shared": on tensors of ``empty_shared``. "persistent": MPI's persistent
    requests, which are no single call and so count for no target.
    """
    mpi = peer in ("Open MPI", "MPICH", "Intel MPI")
    if task.operation in TRAINING and (mpi or peer == "DeepSpeed"):
        return []
    if task.operation != "all_reduce" or task.dtype != "float32":
        return [""]
    if peer == "ours":
        shared = ["shared"] if task.ranks == 2 and task.size_bytes >= 16 * MIB else []
        return ["", "inference", *shared]
    if mpi and task.ranks == 2 and task.size_bytes <= TIGHT_BYTES:
        return ["", "persistent"]
    return [""]
