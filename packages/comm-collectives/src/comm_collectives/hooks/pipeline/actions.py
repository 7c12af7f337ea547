"""The data that a pipeline schedule consists of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from comm_collectives.hooks.call_agreement import fingerprint_of

__all__ = ["BACKWARD", "FORWARD", "Action", "Compute", "Exchange", "Message", "Schedule"]

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Compute:
    """The forward or backward pass of one stage for one micro-batch."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.microbatch} on stage {self.stage}"


@dataclass(frozen=True)
class Message:
    """Activations for the next stage, or gradients for the previous one.

    Attributes:
        kind: of the pass that produced it, :data:`FORWARD` or :data:`BACKWARD`.
        stage: which produced it.
        microbatch: which it is of.
        src: the rank, within the pipeline group, that sends it.
        dst: the rank that receives it.
    """

    kind: str
    stage: int
    microbatch: int
    src: int
    dst: int

    @property
    def to_stage(self) -> int:
        """Return the stage that needs it."""
        return self.stage + 1 if self.kind == FORWARD else self.stage - 1

    def __str__(self) -> str:
        what = "activations" if self.kind == FORWARD else "gradients"
        return f"{what} of micro-batch {self.microbatch} from stage {self.stage} (rank {self.src} to rank {self.dst})"


@dataclass(frozen=True)
class Exchange:
    """Messages that a rank starts together, whichever of them it sends or receives."""

    messages: tuple[Message, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.messages))


Action: TypeAlias = Compute | Exchange


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank of a pipeline, in order.

    Attributes:
        name: such as ``"1f1b"``.
        ranks: size of the pipeline group.
        chunks: number of stages of each rank; stage s is on rank s modulo ``ranks``.
        microbatches: number of parts of a batch.
        actions: the actions of each rank.
    """

    name: str
    ranks: int
    chunks: int
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """Return the number of stages of the model."""
        return self.ranks * self.chunks

    @property
    def has_backward(self) -> bool:
        """Return whether it has backward passes."""
        return any(isinstance(one, Compute) and one.kind == BACKWARD for rank in self.actions for one in rank)

    def rank_of(self, stage: int) -> int:
        """Return the rank, within the pipeline group, that has ``stage``."""
        return stage % self.ranks

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of ``rank``, in the order of the model."""
        return list(range(rank, self.stages, self.ranks))

    @cached_property
    def fingerprint(self) -> int:
        """Return a positive number of 62 bits that two different schedules do not share."""
        return fingerprint_of(repr(self))

    def __hash__(self) -> int:
        return self.fingerprint

    def __str__(self) -> str:
        return f"{self.name} of {self.ranks} ranks with {self.chunks} stages each and {self.microbatches} micro-batches"
