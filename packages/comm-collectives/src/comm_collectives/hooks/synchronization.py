"""The gradients of one backward: which have arrived, which buckets are started, and what the end of it does.

The steps of one backward, as in Li et al. 2020, PyTorch Distributed, section 3.2:

1. A hook of each parameter counts the gradients of its bucket. All ranks start their buckets in the same order, each as
   soon as all of its gradients are there, once those of handles before it are started (``backward_end``).
2. At the end of the backward, what is incomplete is started, with zeros for parameters that this rank did not use.
   Which parameters this rank used travels behind the gradients of the last bucket.
3. The backward returns when all buckets are reduced, so ``optimizer.step()`` needs nothing special.

The first backward has no buckets: it shows the order in which gradients arrive. That of the first rank becomes the
order of the buckets of all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import nn

from comm_collectives.annotations import Group
from comm_collectives.collectives import all_reduce, broadcast
from comm_collectives.hooks.backward_end import BackwardEnd
from comm_collectives.hooks.buckets import assign_buckets
from comm_collectives.hooks.gradient_buckets import GradientBucket
from comm_collectives.hooks.gradient_reduction import GradientReduction
from comm_collectives.hooks.required_gradients import RequiredGradients
from comm_collectives.hooks.sparse_gradients import reduce_rows
from comm_utils.backend import Work
from comm_utils.errors import ArgumentError
from comm_utils.torch_support import factories

__all__ = ["Synchronization"]

# A bucket that waits for so many gradients is started at the end.
_NEVER = 1 << 60


class Synchronization:
    """Reduces the gradients of some parameters at each backward.

    Args:
        names, parameters: those whose gradients are reduced.
        sparse: whether the gradient of each parameter is exchanged by rows.
        required: which parameters require gradients, which must stay so.
        reduction, group: how gradients are reduced, and where.
        sizes_bytes: of the first bucket, and of the others.
        overlap: start buckets while the backward runs.
        at_end: called after each reduction.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        sparse: Sequence[bool],
        required: RequiredGradients,
        reduction: GradientReduction,
        group: Group,
        sizes_bytes: tuple[int, int],
        overlap: bool,
        at_end: Callable[[], None],
    ) -> None:
        self.is_enabled = True
        self.buckets: list[GradientBucket] = []
        self._names, self._parameters, self._required = names, parameters, required
        self._dense = [place for place, is_sparse in enumerate(sparse) if not is_sparse]
        self._sparse = [place for place, is_sparse in enumerate(sparse) if is_sparse]
        self._reduction, self._group, self._sizes_bytes = reduction, group, sizes_bytes
        self._overlap, self._at_end = overlap, at_end
        self._end = BackwardEnd(self._finish, group, self._start_complete, on_failure=self._drop_started)
        # Gradients that each bucket waits for; the last entry is for gradients that start none.
        self._counts = [_NEVER]
        self._bucket_of = [0] * len(parameters)
        self._order: list[int] = []
        self._may_be_stale = False
        # Of the last reduction: the place of each sparse gradient, the gradient and its version.
        self._reduced_rows: list[tuple[int, weakref.ref[torch.Tensor], int]] = []
        self._reset()

    def _reset(self) -> None:
        self._seen = bytearray(len(self._parameters))
        self._pending = list(self._counts)
        self._started = 0
        self._missing: list[tuple[GradientBucket, int, list[int]]] = []
        self._flags: torch.Tensor | None = None
        self._flags_work: Work | None = None

    @property
    def is_running(self) -> bool:
        """Return whether a backward that reduces gradients is under way."""
        return self._end.is_expected

    def hook_of(self, place: int) -> Callable[[torch.Tensor], None]:
        """Return the hook for after autograd has added to the gradient of the parameter at ``place``."""
        end = self._end

        def arrived(parameter: torch.Tensor) -> None:
            if not end.is_expected and not self._begin(parameter):
                return
            if self._seen[place]:
                self._refuse_second(place)
            self._seen[place] = 1
            bucket = self._bucket_of[place]
            self._pending[bucket] -= 1
            if not self._pending[bucket]:
                self._start_complete()
            elif not self.buckets:
                self._order.append(place)

        return arrived

    def reduce(self) -> None:
        """Reduce the gradients that there are, outside of a backward."""
        if self._may_be_stale:
            self._refuse_stale("reduce_gradients", None)
        self._wait()
        self._reset()
        for _ in self._finish():
            pass

    def release(self) -> None:
        """Leave gradients that are tensors of their own, and give the memory of buckets back."""
        self._wait()
        for bucket in self.buckets:
            bucket.release()
        self.buckets = []
        self._reset()
        self._end.release()

    # --- a backward

    def _begin(self, parameter: torch.Tensor) -> bool:
        """Begin with the first gradient of a backward; return False where nothing is to be reduced."""
        if self._may_be_stale:
            self._refuse_stale("backward", parameter)
        if not self.is_enabled:
            return False
        self._required.refuse_changes()
        self._wait()
        self._reset()
        if not self.buckets:
            self._order = []
        self._end.expect()
        return True

    def _wait(self) -> None:
        """Wait for all that was started, by a backward that failed as well."""
        for bucket in self.buckets:
            bucket.wait()
        work, self._flags_work = self._flags_work, None
        if work is not None:
            work.wait()

    def _drop_started(self) -> None:
        """Drop the gradients of a failed backward that its reductions may go on to write to.

        The next backward waits for these, and begins after ``zero_grad(set_to_none=False)``. A copy would hold what is
        reduced in part, and need memory where its lack was the failure.
        """
        for bucket in self.buckets[: self._started]:
            bucket.drop()

    def _start_complete(self) -> None:
        if not self.buckets or not self._end.may_start:
            return
        while self._started < len(self.buckets) and not self._pending[self._started]:
            self._start_next()
        if self._started == len(self.buckets):
            self._end.pass_turn()

    def _start_next(self) -> None:
        bucket = self.buckets[self._started]
        self._started += 1
        missing = bucket.collect()
        if missing:
            self._missing.append((bucket, self._first_flags[self._started - 1], missing))
        is_last = self._started == len(self.buckets)
        if is_last:
            self._set_flags(bucket)
        bucket.start()
        if is_last and self._flags is not bucket.flags:
            assert self._flags is not None
            self._flags_work = all_reduce(self._flags, "max", self._group, True, compression="none")

    def _set_flags(self, last: GradientBucket) -> None:
        """Note which parameters this rank used: behind the gradients, or apart from what is compressed."""
        flags = last.flags
        if self._reduction.compresses(flags.dtype, self._group):
            flags = factories.empty(len(flags), dtype=torch.uint8, device=flags.device)
        flags.fill_(1)
        unused = [first + place for _, first, places in self._missing for place in places]
        if unused:
            flags[factories.tensor(unused, device=flags.device)] = 0
        self._flags = flags

    def _finish(self) -> Iterator[None]:
        if not self.buckets and self._dense:
            self._make_buckets()
        while self._started < len(self.buckets):
            self._start_next()
        yield
        self._reduce_sparse()
        self._wait()
        if self._missing:
            self._settle_missing()
        self._may_be_stale = self._reduction.op == "sum"
        self._at_end()

    def _settle_missing(self) -> None:
        """Give parameters that only other ranks used their gradients; the others have none."""
        assert self._flags is not None
        used = (self._flags != 0).tolist()
        for bucket, first, places in self._missing:
            for place in places:
                if used[first + place]:
                    bucket.parameters[place].grad = bucket.views[place]

    def _reduce_sparse(self) -> None:
        parameters = [self._parameters[place] for place in self._sparse]
        reduced = reduce_rows([one.grad for one in parameters], parameters, self._reduction, self._group)
        for parameter, gradient in zip(parameters, reduced, strict=True):
            parameter.grad = gradient
        self._reduced_rows = [
            (place, weakref.ref(one), one._version)
            for place, one in zip(self._sparse, reduced, strict=True)
            if one is not None
        ]

    def _make_buckets(self) -> None:
        seen = set(self._order)
        dense = set(self._dense)
        order = [place for place in self._order if place in dense]
        order += [place for place in reversed(self._dense) if place not in seen]
        agreed = factories.tensor(order, device=self._parameters[self._dense[0]].device)
        broadcast(agreed, None, self._group, group_src=0)
        order = agreed.tolist()
        first_bytes, other_bytes = self._sizes_bytes
        assigned = assign_buckets([self._parameters[place] for place in order], other_bytes, first_bytes)
        counts = list(map(len, assigned))
        buckets: list[GradientBucket] = []
        bucket_of = [0] * len(self._parameters)
        for number, members in enumerate(assigned):
            places = [order[member] for member in members]
            buckets.append(
                GradientBucket(
                    [self._names[place] for place in places],
                    [self._parameters[place] for place in places],
                    len(order) if number == len(assigned) - 1 else 0,
                    self._group,
                    self._reduction,
                )
            )
            for place in places:
                bucket_of[place] = number
        for place in self._sparse:
            bucket_of[place] = len(counts)
        # All of it or, where memory ran out, nothing.
        self.buckets = buckets
        self._first_flags = list(accumulate(counts, initial=0))
        if self._overlap:
            self._bucket_of, self._counts = bucket_of, [*counts, _NEVER]

    # --- wrong uses

    def _refuse_second(self, place: int) -> None:
        raise ArgumentError(
            f"backward: parameter {self._names[place]!r} got a second gradient in one backward, after the first was "
            "counted, as where a reentrant checkpoint uses a parameter twice; expected one: checkpoint with "
            "use_reentrant=False, or run backward() within no_sync() and call reduce_gradients() after it"
        )

    def _refuse_stale(self, call: str, latest: torch.Tensor | None) -> None:
        self._may_be_stale = latest is None  # a refused backward has written to gradients
        stale = [bucket.added_since(latest) for bucket in self.buckets]
        for place, reduced, version in self._reduced_rows:
            parameter, gradient = self._parameters[place], reduced()
            if gradient is not None and parameter.grad is gradient:
                is_kept = gradient._version - version <= (parameter is latest)
                stale.append(self._names[place] if is_kept else None)
        for name in stale:
            if name is not None:
                raise ArgumentError(
                    f"{call}: the gradient of parameter {name!r} is a sum over all ranks already, and would be added "
                    "up once more; call optimizer.zero_grad() before, or accumulate within no_sync(). Where a "
                    "reentrant checkpoint is the last layer, its end reduced the gradient: checkpoint with "
                    "use_reentrant=False"
                )
