"""The gradients of one flat memory on their way to the optimizer's tensors."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

import torch

from comm_collectives.compression.states import owned_by
from comm_collectives.hooks.gradient_reduction import GradientReduction
from comm_collectives.hooks.sharded.flat_shard import FlatShard
from comm_collectives.hooks.sharded.gradient_memory import GradientMemory
from comm_utils.backend import Work
from comm_utils.errors import ArgumentError
from comm_utils.torch_support import factories

__all__ = ["GradientBucket"]


class GradientBucket:
    """Collects the gradients of the parameters of ``flat``, reduces them, and gives this rank's part to the optimizer.

    Args:
        flat: the parameters.
        reduction: how gradients of the ranks become one.
        memory: where its flat memory comes from and goes after the reduction; None for memory of its own that stays
            (stage 1).

    Attributes:
        pending: parameters whose gradient this backward has not brought yet.
        is_started: this backward has started the reduction.
    """

    def __init__(self, flat: FlatShard, reduction: GradientReduction, memory: GradientMemory | None) -> None:
        self.flat, self._reduction, self._memory = flat, reduction.of_bucket(flat.names[0]), memory
        self.pending = len(flat.parameters)
        self.is_started = False
        self._full: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        # Whether a view has a gradient, of this backward or of earlier ones within no_sync().
        self._filled = [False] * len(flat.parameters)
        # The same, of earlier ones alone.
        self._earlier = list(self._filled)
        self._arrived = [False] * len(flat.parameters)
        # Of this rank's part. It stays, as the optimizer's tensors need it after every backward.
        self._shard: torch.Tensor | None = None
        self._shard_views: list[torch.Tensor] = []
        self._output: torch.Tensor | None = None
        self._work: Work | None = None

    @property
    def holds_gradients(self) -> bool:
        """Return whether there are gradients that were not reduced."""
        return True in self._filled

    def begin_backward(self) -> None:
        """Expect a gradient of every parameter."""
        self.pending = len(self.flat.parameters)
        self.is_started = False
        self._earlier = list(self._filled)
        self._arrived = [False] * len(self.flat.parameters)

    def add(self, position: int, gradient: torch.Tensor) -> None:
        """Take the gradient of a parameter.

        Raises:
            ArgumentError: it is the second one of this backward, or is to be differentiated again.
        """
        if gradient.requires_grad:
            raise ArgumentError(
                f"backward: the gradient of parameter {self.flat.names[position]!r} is to be differentiated again "
                "(create_graph=True), which its reduction cannot be; use torch.autograd.grad in stage 1 or 2"
            )
        if self._arrived[position]:
            raise ArgumentError(
                f"backward: parameter {self.flat.names[position]!r} got a second gradient in one backward, after the "
                "first was counted; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        self._arrived[position] = True
        self.pending -= 1
        if self._full is None:
            self._take_memory()
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if self._filled[position]:
            self._views[position].add_(gradient)
        else:
            self._views[position].copy_(gradient)
            self._filled[position] = True

    def _take_memory(self) -> None:
        flat = self.flat
        memory = self._memory or GradientMemory(flat.group)
        self._full = memory.take(flat.layout.numel, flat.dtype, flat.device)
        self._views = flat.views_of(self._full)
        for gap in flat.layout.gaps(self._full):
            gap.zero_()

    def start(self) -> None:
        """Start the reduction; parameters without gradients count as zeros."""
        if self._full is None:
            self._take_memory()
        assert self._full is not None
        if False in self._filled:
            for view, filled in zip(self._views, self._filled, strict=True):
                if not filled:
                    view.zero_()
        self.is_started = True
        self._filled = [False] * len(self._filled)
        if self._shard is None:
            self._shard = factories.empty(self.flat.shard_numel, dtype=self.flat.dtype, device=self.flat.device)
            self.view_segments()
        accumulates = any(segment.parameter.grad is not None for segment in self.flat.segments)
        self._output = torch.empty_like(self._shard) if accumulates else self._shard
        # Not to the flat memory, which other buckets use as well.
        with owned_by([self.flat.shard], self.flat.padding):
            self._work = self._reduction.start_scatter(self._output, self._full, self.flat.group)

    def view_segments(self) -> None:
        """Make the gradients of the optimizer's tensors, after these were made anew."""
        if self._shard is not None:
            self._shard_views = [self._shard[one.begin : one.end] for one in self.flat.segments]

    def finish(self) -> None:
        """Wait for the reduction, and add its result to the gradients of the optimizer's tensors."""
        if self._work is None:
            return
        work, self._work = self._work, None
        output, self._output = self._output, None
        work.wait()
        assert output is not None
        self._release_memory()
        if self._reduction.compresses(self.flat.dtype, self.flat.group):
            # Decoded, zeros between parameters are no zeros; they would count in the norm, and move the memory.
            for gap in self.flat.own_gaps(output):
                gap.zero_()
        for segment, view in zip(self.flat.segments, self._shard_views, strict=True):
            parameter = segment.parameter
            if output is self._shard:
                parameter.grad = view
            elif parameter.grad is None:
                parameter.grad = view.copy_(output[segment.begin : segment.end])
            else:
                parameter.grad.add_(output[segment.begin : segment.end])

    def _release_memory(self) -> None:
        if self._memory is not None and self._full is not None:
            self._views = []
            full, self._full = self._full, None
            self._memory.give_back(full)

    def abandon(self, keeps_earlier: bool) -> None:
        """Forget the gradients of a backward that failed.

        Args:
            keeps_earlier: keep those that earlier backwards within no_sync() brought for the same parameters, and what
                the failed one has added to them, as without hooks.
        """
        if not keeps_earlier:
            self._earlier = [False] * len(self._earlier)
        with suppress(Exception):  # the error that ended the backward is the one to report
            if True in self._earlier:
                self.finish()
            elif self._work is not None:
                self._work.wait()
        self._work = self._output = None
        # What was reduced waits no longer.
        self._filled = [now and before for now, before in zip(self._filled, self._earlier, strict=True)]
        if not self.holds_gradients:
            self._release_memory()

    def drop(self, keeps: Collection[int]) -> None:
        """Forget the gradients that wait for their reduction, except those of the parameters at these positions."""
        self._filled = [filled and place in keeps for place, filled in enumerate(self._filled)]
        if not self.holds_gradients:
            self._release_memory()

    def tensors(self) -> list[torch.Tensor]:
        """Return the memory of its own that it holds for gradients."""
        own = [self._shard, self._output, self._full if self._memory is None else None]
        return [one for one in own if one is not None]
