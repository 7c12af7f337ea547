"""gloo with one operation more: the backend, its provider and the function that programs call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.distributed import ProcessGroup

from comm_backend_torch import TorchBackend, provider
from comm_collectives.registered import collective_of
from comm_collectives.work import After
from comm_utils.backend import Availability, Setup, Work
from more_collectives.rows import REDUCE_SCATTER_IN_PLACE

reduce_scatter_in_place = collective_of(REDUCE_SCATTER_IN_PLACE)


class ExtendedBackend(TorchBackend):
    def get_backend(self, group: ProcessGroup | None = None) -> str:
        return "extended"

    def reduce_scatter_in_place(
        self, tensor: torch.Tensor, op: object = "sum", group: ProcessGroup | None = None, async_op: bool = False
    ) -> Work | None:
        """Leave part r of the reduced tensor in its place on rank r; the other parts are overwritten with anything."""
        parts = tensor.view(self.get_world_size(group), -1)
        works = [self.reduce(part, None, op, group, True, rank) for rank, part in enumerate(parts)]
        work = After([one for one in works if one is not None], None, tensor)
        return work if async_op else self._waited(work)

    def _waited(self, work: Work) -> None:
        work.wait()


def availability() -> Mapping[str, Availability]:
    return {"extended": provider.availability()["gloo"]}


def initialize(setup: Setup) -> ExtendedBackend:
    provider.initialize(replace(setup, backend="gloo"))
    return ExtendedBackend(setup.timeout)


def adopts(backend: str) -> bool:
    return False


def adopt() -> ExtendedBackend:
    raise NotImplementedError
