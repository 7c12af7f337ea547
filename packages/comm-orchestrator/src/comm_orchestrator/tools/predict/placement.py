"""Placement of the ranks of a recorded job on other hosts, and growth of its groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from comm_utils.errors import ArgumentError
from comm_utils.observability.cost_model import Shape
from comm_utils.observability.traces import RankTrace
from comm_utils.observability.traces.labels import shortened

__all__ = ["SUBGROUPS", "Placement", "in_words"]

#: What becomes of groups of some of the ranks.
SUBGROUPS = ("keep", "mesh")


def in_words(shape: Shape) -> str:
    """Return such as ``2 x 4 ranks``, or ``5 ranks on 2 hosts`` where hosts have different numbers of them."""
    if shape.ranks == shape.nodes * shape.per_node:
        return f"{shape.nodes} x {shape.per_node} ranks"
    return f"{shape.ranks} ranks on {shape.nodes} hosts"


@dataclass(frozen=True)
class Placement:
    """``nodes`` hosts with ``per_node`` ranks each, filled host by host, or the hosts as they were recorded.

    Attributes:
        hosts: of each recorded rank.
        per_node: of the fullest host.
        world_size: ranks of the predicted job.
        subgroups: ``keep``: groups of some of the ranks have the same ranks as before. ``mesh``: those that take every
            s-th rank of the whole job, as the data-parallel groups of a mesh with s ranks inside do, go on to its end.
    """

    hosts: tuple[str, ...]
    nodes: int
    per_node: int
    world_size: int
    subgroups: str = "keep"

    @classmethod
    def of(
        cls, traces: Sequence[RankTrace], nodes: int | None, per_node: int | None, subgroups: str = "keep"
    ) -> Placement:
        """As recorded, where ``nodes`` and ``per_node`` are None; where one is, it is that of the recorded job."""
        hosts = tuple(trace.host for trace in traces)
        recorded = Shape(len(hosts), len(set(hosts)))
        if nodes is None and per_node is None:
            return cls(hosts, recorded.nodes, recorded.per_node, recorded.ranks, subgroups)
        nodes, per_node = nodes or recorded.nodes, per_node or recorded.per_node
        return cls(hosts, nodes, per_node, nodes * per_node, subgroups)

    def __str__(self) -> str:
        return in_words(Shape(self.world_size, self.nodes))

    @property
    def recorded(self) -> Shape:
        """Return the recorded job."""
        return Shape(len(self.hosts), len(set(self.hosts)))

    @property
    def as_recorded(self) -> bool:
        """Return whether the predicted job has as many hosts and ranks as the recorded one."""
        return self.recorded == Shape(self.world_size, self.nodes)

    def shape(self, ranks: tuple[int, ...]) -> Shape:
        """Return the group that takes the place of the recorded group of ``ranks``.

        Raises:
            ArgumentError: it does not fit into the predicted job.
        """
        if self.as_recorded:
            return Shape(len(ranks), len({self.hosts[rank] for rank in ranks}))
        if sorted(ranks) == list(range(len(self.hosts))):
            return Shape(self.world_size, self.nodes)
        members = ranks
        stride = self._stride(ranks) if self.subgroups == "mesh" else 0
        if stride:
            if self.world_size % stride:
                raise ArgumentError(
                    f"--subgroups mesh: got a group of every {stride}th rank and {self.world_size} ranks; expected a "
                    f"multiple of {stride} ranks"
                )
            members = tuple(range(min(ranks), self.world_size, stride))
        if max(members) >= self.world_size:
            raise ArgumentError(
                f"got {self}; expected at least {max(members) + 1}, because the recorded "
                f"group {shortened(ranks)} stays as it is"
            )
        return Shape(len(members), len({rank // self.per_node for rank in members}))

    def _stride(self, ranks: tuple[int, ...]) -> int:
        steps = {later - rank for rank, later in pairwise(sorted(ranks))}
        if len(steps) != 1:
            return 0
        (step,) = steps
        return step if step > 1 and step * len(ranks) == len(self.hosts) else 0
