"""The backward of a sharded model: gradients go to the ranks that own them, while the rest of it runs.

Stages 1 and 2 of ZeRO (Rajbhandari et al. 2020, sections 5.1 and 5.2), with buckets of flat memory:

1. A hook of each parameter copies its gradient into the flat memory of its bucket, and frees it.
2. A bucket with all gradients is reduced: each rank gets the sum or average of the part that it owns. In stages 1 and
   2, buckets are started in one order on all ranks, that of their parameters from the last to the first, once those of
   handles before this one are started (``backward_end``). In stage 3,
   reductions have to take the same places among the gatherings on all ranks, also where a rank does not use a
   parameter: before a module is gathered, the ranks agree on the buckets that are complete on all of them.
3. From stage 2 on, the flat memory then serves another bucket. At most two reductions are in flight.
4. The end of the backward starts buckets that are incomplete, with zeros, and waits for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from comm_collectives.annotations import Group
from comm_collectives.collectives import all_reduce
from comm_collectives.hooks.backward_end import BackwardEnd
from comm_collectives.hooks.gradient_reduction import GradientReduction
from comm_collectives.hooks.sharded.flat_shard import FlatShard
from comm_collectives.hooks.sharded.gradient_bucket import GradientBucket
from comm_collectives.hooks.sharded.gradient_memory import GradientMemory
from comm_utils.errors import ArgumentError
from comm_utils.torch_support import factories

__all__ = ["Gradients"]

# Reductions that are in flight at a time, from stage 2 on.
_MOST_IN_FLIGHT = 2


class Gradients:
    """The hooks of all parameters that require gradients.

    Args:
        flats: their flat memories, in the order in which they are reduced.
        reduction: how gradients of the ranks become one.
        group: whose ranks own a part each.
        stage: 1, 2 or 3.

    Attributes:
        is_running: a backward of the model runs.
        on_begin, on_complete, on_end: called at the beginning of a backward; in stage 3, with a flat memory all of
            whose gradients have arrived on all ranks; and when all gradients are reduced.
        on_first_gradient: called before the first gradient of a backward is taken; what it raises ends the backward.
    """

    def __init__(self, flats: Sequence[FlatShard], reduction: GradientReduction, group: Group, stage: int) -> None:
        self._memory = GradientMemory(group) if stage > 1 else None
        self.buckets = [GradientBucket(flat, reduction, self._memory) for flat in flats]
        self._group, self._in_order = group, stage < 3
        self._next = 0
        # Of this backward, in stage 3: complete on all ranks.
        self._agreed: set[int] = set()
        self._in_flight: deque[GradientBucket] = deque()
        self._synchronizes = True
        self._arrived = False
        self._backward_end = BackwardEnd(self._end, group, self._start_complete, is_first=stage == 3)
        self.is_running = False
        self.on_begin: Callable[[], None] = _nothing
        self.on_first_gradient: Callable[[], None] = _nothing
        self.on_complete: Callable[[FlatShard], None] = _nothing_with
        self.on_end: Callable[[], None] = _nothing
        self._hooks = [
            cast("Any", parameter).register_post_accumulate_grad_hook(self._hook_of(bucket, position))
            for bucket in self.buckets
            for position, parameter in enumerate(bucket.flat.parameters)
        ]

    def _hook_of(self, bucket: GradientBucket, position: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            if bucket.flat.frees and not bucket.flat.is_gathered:
                _refuse_unnoticed(bucket.flat.names[position])
            if not self.is_running:
                self.begin()
            if not self._arrived:
                self.on_first_gradient()
            self._arrived = True
            bucket.add(position, gradient)
            if not bucket.pending:
                self._start_complete()

        return hook

    def begin(self) -> None:
        """Begin a backward, if none runs; :meth:`_end` is called when it has nothing left to do."""
        if self.is_running:
            if not self._backward_end.was_missed:
                return
            self.abandon(keeps_earlier=True)
        self._backward_end.expect()  # it may raise, and then no end would follow
        self.is_running = True
        self._next = 0
        self._agreed.clear()
        self._arrived = False
        for bucket in self.buckets:
            bucket.begin_backward()
        self.on_begin()

    def agree(self) -> None:
        """Start the buckets that are complete on all ranks; every rank calls it at the same places of a backward."""
        if len(self._agreed) == len(self.buckets):
            return
        complete = factories.tensor([not one.pending for one in self.buckets], dtype=torch.uint8)
        complete = complete.to(self.buckets[0].flat.device)
        all_reduce(complete, "min", self._group, compression="none")
        for place in complete.nonzero().flatten().tolist():
            if place not in self._agreed:
                self._agreed.add(place)
                self.on_complete(self.buckets[place].flat)
                if self._synchronizes:
                    self._start(self.buckets[place])

    def _start_complete(self) -> None:
        if not self._in_order or not self._synchronizes or not self._backward_end.may_start:
            return
        while self._next < len(self.buckets) and not self.buckets[self._next].pending:
            self._start(self.buckets[self._next])
            self._next += 1
        if self._next == len(self.buckets):
            self._backward_end.pass_turn()

    def _start(self, bucket: GradientBucket) -> None:
        if self._memory is not None:
            while len(self._in_flight) >= _MOST_IN_FLIGHT:
                self._in_flight.popleft().finish()
        bucket.start()
        self._in_flight.append(bucket)

    def _end(self) -> Iterator[None]:
        try:
            # torch.autograd.grad brings no gradients here.
            reduces = self._synchronizes and self._arrived
            if reduces:
                for bucket in self.buckets:
                    if not bucket.is_started:
                        self._start(bucket)
            yield
            if reduces:
                while self._in_flight:
                    self._in_flight.popleft().finish()
                if self._memory is not None:
                    self._memory.clear()
        except BaseException:
            self.abandon()
            raise
        finally:
            self.is_running = False
            self.on_end()

    def abandon_failed(self) -> None:
        """Forget the last backward if it ended with an error; gradients of earlier ones wait for the next."""
        if self.is_running and self._backward_end.was_missed:
            self.abandon(keeps_earlier=True)

    def abandon(self, keeps_earlier: bool = False) -> None:
        """Forget the gradients that were not reduced.

        Args:
            keeps_earlier: only those of the last backward; see :meth:`GradientBucket.abandon`.
        """
        self.is_running = False
        self._in_flight.clear()
        for bucket in self.buckets:
            bucket.abandon(keeps_earlier)

    def drop(self, tensors: Collection[int]) -> None:
        """Forget the gradients that wait for their reduction, except those for other tensors of an optimizer.

        Args:
            tensors: the ``id`` of each tensor whose gradient is dropped.
        """
        self.abandon_failed()
        if self.is_running:
            return
        for bucket in self.buckets:
            others = [one for one in bucket.flat.segments if id(one.parameter) not in tensors]
            bucket.drop({place for one in others for place in one.positions})

    @property
    def holds_gradients(self) -> bool:
        """Return whether gradients wait for a backward outside of :meth:`no_sync`."""
        return any(bucket.holds_gradients for bucket in self.buckets)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up the gradients of the backwards within on this rank; the first one outside reduces the sum."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    def tensors(self) -> list[torch.Tensor]:
        """Return all memory that holds gradients, or is kept for them."""
        found = [one for bucket in self.buckets for one in bucket.tensors()]
        return found + (self._memory.tensors() if self._memory is not None else [])

    def remove(self) -> None:
        """Remove the hooks and let go of all memory."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._backward_end.release()
        self.buckets.clear()
        self._memory = None


def _refuse_unnoticed(name: str) -> None:
    raise ArgumentError(
        f"backward: the gradient of parameter {name!r} was computed while its values were freed (stage 3), because the "
        "backward reached the module that uses it by no tensor in the module's output; return such tensors from "
        "forward(), in a list, tuple, dict or an attribute of an object, or use stage 1 or 2"
    )


def _nothing() -> None:
    pass


def _nothing_with(flat: FlatShard) -> None:
    pass
