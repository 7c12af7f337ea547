"""The ways in which the conformance suite makes a call: on which group, whether at once, how a root is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.distributed import ProcessGroup

from comm_utils.backend import Work
from comm_utils.testing.conformance_world import World, same, sample

__all__ = ["Way", "check_ended", "settle", "some_ranks", "ways"]

_UNWRITTEN = 5  # no sample has it


def some_ranks(size: int) -> list[int]:
    """Return the ranks of a group in falling order, without rank 0 where there are more than two."""
    return list(range(size - 1, 0, -1)) if size > 2 else list(range(size))[::-1]


@dataclass(frozen=True)
class Way:
    """One way of making calls; ``group`` has ``ranks`` in this order, and None is the world."""

    world: World
    group: ProcessGroup | None
    ranks: Sequence[int]
    async_op: bool = False
    by_group_rank: bool = False

    def __str__(self) -> str:
        start = "asynchronously" if self.async_op else "at once"
        name = "group ranks" if self.by_group_rank else "global ranks"
        return f"{start} on ranks {list(self.ranks)}, which names {name}"

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def position(self) -> int:
        return self.ranks.index(self.world.rank)

    @property
    def is_first(self) -> bool:
        """Return whether it is the plainest way, in which everything is tried."""
        return self.group is None and not self.async_op and not self.by_group_rank

    def named(self, role: str, position: int) -> dict[str, Any]:
        """Return the argument that names the member at ``position`` as ``role``, ``"src"`` or ``"dst"``."""
        return {f"group_{role}": position} if self.by_group_rank else {role: self.ranks[position]}

    def mine(self, dtype: torch.dtype, n: int) -> torch.Tensor:
        return self.world.mine(dtype, n)

    def everyones(self, dtype: torch.dtype, n: int) -> list[torch.Tensor]:
        return [sample(dtype, (n,), rank) for rank in self.ranks]

    def output(self, dtype: torch.dtype, n: int) -> torch.Tensor:
        """Return memory for a result; what the allocator gives may hold that of the last call."""
        return torch.full((n,), _UNWRITTEN, device=self.world.device).to(dtype)

    def call(
        self,
        method: Callable[..., Work | None],
        *tensors: Any,
        result: torch.Tensor | list[torch.Tensor] | None = None,
        inputs: Sequence[torch.Tensor] = (),
        **details: Any,
    ) -> None:
        """Make a call to its end.

        Args:
            result: the argument that has its result; None where this rank gets none.
            inputs: tensors that it leaves as they were.
        """
        what, copies = f"{method.__name__} {self}", [one.clone() for one in inputs]
        work = method(*tensors, group=self.group, async_op=self.async_op, **details)
        if self.async_op:
            check_ended(work, result, self.world.device, what)
        else:
            assert work is None, f"{what} returned {work!r:.80}"
        for one, copy in zip(inputs, copies, strict=True):
            same(one, copy.cpu(), f"input of {what}")


def ways(world: World) -> Iterator[Way]:
    """Yield the ways of this rank, the plainest first; a rank outside of the group has only those on the world."""
    on: list[tuple[ProcessGroup | None, list[int]]] = [(None, list(range(world.size)))]
    if world.size > 1 and world.rank in (members := some_ranks(world.size)):
        on.append((world.backend.create_group(members, "conformance-ways"), members))
    for (group, ranks), async_op, by_group_rank in product(on, (False, True), (False, True)):
        yield Way(world, group, ranks, async_op, by_group_rank)


def settle(device: str) -> None:
    """Have a device complete what is ordered on its streams."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()


def check_ended(work: Work | None, result: Any, device: str, what: str) -> None:
    """Wait with a handle, and check that all its members agree that the operation has ended well."""
    assert work is not None, f"{what} returned no handle"
    assert work.wait() is True, f"wait() of {what}"
    settle(device)
    assert work.is_completed(), f"is_completed() of {what} after wait()"
    assert work.is_success(), f"is_success() of {what} after wait()"
    assert work.exception() is None, f"exception() of {what}: {work.exception()}"
    work.synchronize()
    if result is not None:
        expected = result if isinstance(result, list) else [result]
        found = work.result()
        _check_tensors(found if isinstance(result, list) else [found], expected, f"result() of {what}")
        _check_tensors(work.get_future().wait(), expected, f"get_future() of {what}")


def _check_tensors(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str) -> None:
    assert isinstance(found, (list, tuple)), f"{what}: got {found!r:.80}; expected a list of tensors"
    places = [(one.data_ptr(), one.shape) for one in found]
    assert places == [(one.data_ptr(), one.shape) for one in expected], f"{what}: these are other tensors"
