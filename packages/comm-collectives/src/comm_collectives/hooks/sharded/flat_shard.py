"""Parameters one after another in flat memory, of which each rank owns an equal part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from comm_collectives.all_gather import all_gather_into_tensor
from comm_collectives.annotations import Group
from comm_collectives.compression.defaults import no_default
from comm_collectives.groups import get_rank, get_world_size
from comm_collectives.hooks.buckets import flat_layout, flat_memory
from comm_collectives.hooks.sharded.freed_parameter import as_gathered, hide, show
from comm_utils.backend import Work
from comm_utils.errors import ArgumentError
from comm_utils.torch_support import factories
from comm_utils.torch_support.flattening import count_versions

__all__ = ["FlatShard", "Segment"]


@dataclass
class Segment:
    """A range of this rank's part that one tensor of the optimizer stands for.

    Attributes:
        parameter: a view of the part; the optimizer updates it, and finds its gradient in ``.grad``.
        begin, end: the range, in elements of the part.
        positions: the parameters of the model of which it has elements, by position in the flat memory.
    """

    parameter: nn.Parameter
    begin: int
    end: int
    positions: tuple[int, ...]


class FlatShard:
    """Parameters of one dtype and device in flat memory, and this rank's part of it.

    In stages 1 and 2, the flat memory stays, parameters are views of it, and the part is a slice of it. In stage 3, the
    part has memory of its own, and the flat memory exists while the parameters are gathered. Its storage is resized
    then: what autograd saved of it is valid again with the next gathering.

    Args:
        names: of the parameters in the model.
        parameters: of one dtype and device, at least one.
        group: whose ranks own a part each.
        frees: memory of the parameters is freed between uses (stage 3).

    Attributes:
        full: (W * n,), the flat memory, with zeros between and behind the parameters.
        shard: (n,), this rank's part.
        segments: tensors of the optimizer that are views of the part; none where parameters need no gradients.
        is_gathered: ``full`` has the values of all ranks, and the parameters are views of it.
        is_saved: a graph of autograd was given the memory of this gathering; the next one takes other memory.
        on_read: called before values of a freed parameter are read, by code that no hook announced; it may gather.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter], group: Group, frees: bool) -> None:
        self.names, self.parameters, self.group, self.frees = list(names), list(parameters), group, frees
        self.rank, self.world_size = get_rank(group), get_world_size(group)
        self.layout = flat_layout(parameters, multiple_of=self.world_size)
        self.shard_numel = self.layout.numel // self.world_size
        self.begin = self.rank * self.shard_numel
        self.dtype, self.device = parameters[0].dtype, parameters[0].device
        self.requires_grad = parameters[0].requires_grad
        self.is_gathered = True
        self.is_saved = False
        self.on_read: Callable[[], None] = _nothing
        self._gathered_version = 0
        self._work: Work | None = None
        self._references = 0
        numel = self.layout.numel
        self._size_bytes = numel * self.dtype.itemsize
        with torch.no_grad():
            if frees:
                self.full = factories.zeros(numel, dtype=self.dtype, device=self.device)
            else:
                self.full = flat_memory(numel, self.dtype, self.device, group)
            self._views = self.views_of(self.full)
            for parameter, view in zip(self.parameters, self._views, strict=True):
                view.copy_(parameter)
                parameter.data = view
            self.shard = self.full[self.begin : self.begin + self.shard_numel]
            if frees:
                self.shard = flat_memory(self.shard_numel, self.dtype, self.device, group).copy_(self.shard)
                # Values of a freed parameter in its shape, should anything get at them.
                value = float("nan") if self.dtype.is_floating_point else 0
                nothing = factories.full((), value, dtype=self.dtype, device=self.device)
                self._placeholders = [nothing.expand(one.shape) for one in self.parameters]
        self.segments: list[Segment] = []
        if self.requires_grad:
            everything = tuple(range(len(self.parameters)))
            self.segments = [self.segment(0, self.shard_numel, everything)]
        self.notice_gathered()

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the view of each parameter in ``flat``, which has the layout of this flat memory."""
        return [
            flat[span.start : span.end].view(one.shape)
            for span, one in zip(self.layout.spans, self.parameters, strict=True)
        ]

    def segment(self, begin: int, end: int, positions: tuple[int, ...]) -> Segment:
        """Return a tensor for the optimizer that stands for elements ``begin`` to ``end`` of this rank's part."""
        return Segment(nn.Parameter(self.shard[begin:end]), begin, end, positions)

    def range_of(self, position: int) -> tuple[int, int, int]:
        """Return what this rank owns of the parameter at ``position``.

        Returns:
            The first element of the flattened parameter, the one after the last, and the place of the first in
            ``shard``. The first two are equal where the rank owns nothing.
        """
        span = self.layout.spans[position]
        begin, end = max(span.start, self.begin), min(span.end, self.begin + self.shard_numel)
        if begin >= end:
            return 0, 0, 0
        return begin - span.start, end - span.start, begin - self.begin

    def own_gaps(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of ``part``, which has the layout of this rank's part, that belong to no parameter."""
        starts = [*(span.start for span in self.layout.spans[1:]), self.layout.numel]
        ends = [span.end for span in self.layout.spans]
        inside = [
            (max(begin - self.begin, 0), min(end - self.begin, self.shard_numel))
            for begin, end in zip(ends, starts, strict=True)
        ]
        return [part[begin:end] for begin, end in inside if begin < end]

    def start_gather(self) -> None:
        """Start to bring the parts of all ranks together; :meth:`finish_gather` makes the parameters valid."""
        if self._work is not None:
            return
        if self.frees:
            self.full.untyped_storage().resize_(self._size_bytes)
        # In stages 1 and 2 the part is a slice of the result: encoded, it would lose small updates of the optimizer.
        compression = no_default(self.group)
        self._work = all_gather_into_tensor(self.full, self.shard, self.group, async_op=True, compression=compression)

    def finish_gather(self) -> None:
        """Wait for the gathering, which is started where it was not."""
        if self._work is None:
            self.start_gather()
        work, self._work = self._work, None
        assert work is not None
        work.wait()
        if self.frees:
            for parameter, view in zip(self.parameters, self._views, strict=True):
                show(parameter)
                parameter.data = view
            self._references = _sharing(self.full)
        self.is_gathered = True
        self.notice_gathered()

    def notice_gathered(self) -> None:
        """Take the part as it is now for what the ranks have gathered."""
        self._gathered_version = self.shard._version

    def count_versions(self) -> None:
        """Have autograd refuse a backward of a forward before: the optimizer or a checkpoint has written values."""
        count_versions(self.parameters)

    @property
    def padding(self) -> int:
        """Return the elements behind the last parameter, whose number depends on that of the ranks."""
        return self.layout.numel - self.layout.spans[-1].end

    @property
    def is_changed(self) -> bool:
        """Return whether the part was written to after the last gathering; False in stage 3, whose uses gather it."""
        return not self.frees and self.shard._version != self._gathered_version

    def refuse_conversion(self, call: str) -> None:
        """Check that no parameter was converted or moved after the registration.

        Args:
            call: the user's call, for messages.

        Raises:
            ArgumentError: names the parameter.
        """
        with as_gathered():
            for name, one in zip(self.names, self.parameters, strict=True):
                if one.dtype != self.dtype or one.device != self.device:
                    raise ArgumentError(
                        f"{call}: parameter {name!r} is {one.dtype} on {one.device}; expected {self.dtype} on "
                        f"{self.device}, as when the hooks were registered: remove() the hooks, convert the model, and "
                        "register them again"
                    )

    @property
    def is_in_flight(self) -> bool:
        """Return whether a gathering was started and is not finished."""
        return self._work is not None

    def free(self, keeps_aliases: bool = False) -> None:
        """Free the memory of the parameters (stage 3); nothing to do where they are not gathered.

        Args:
            keeps_aliases: leave it to tensors that came to share it since the gathering, and take other memory for the
                next one. Where a graph of autograd saves such tensors, this would keep all parameters of a forward.
        """
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()
        elif not self.is_gathered:
            return
        is_shared = self.is_saved or (keeps_aliases and _sharing(self.full) > self._references)
        self.is_saved = False
        if self.is_gathered:
            for name, parameter, placeholder in zip(self.names, self.parameters, self._placeholders, strict=True):
                parameter.data = placeholder
                hide(parameter, name, self._read)
        self.is_gathered = False
        if is_shared:
            self._take_other_memory()
        self.full.untyped_storage().resize_(0)

    def _take_other_memory(self) -> None:
        # In a forward in inference mode, too: later passes write to it.
        with torch.inference_mode(False), torch.no_grad(), as_gathered():
            self.full = factories.zeros(self.layout.numel, dtype=self.dtype, device=self.device)
            self._views = self.views_of(self.full)

    def tensors(self) -> list[torch.Tensor]:
        """Return the memory that it takes now."""
        return [self.shard, self.full] if self.is_gathered or self.is_in_flight else [self.shard]

    def _read(self) -> None:
        self.on_read()  # as it is at the time of the read

    def keep_own(self) -> None:
        """Copy this rank's part of the gathered parameters to ``shard``, after they were changed."""
        if self.frees:
            with torch.no_grad():
                for parameter, view in zip(self.parameters, self._views, strict=True):
                    if parameter.data_ptr() != view.data_ptr():  # after ``parameter.data = ...``
                        view.copy_(parameter)
                self.shard.copy_(self.full[self.begin : self.begin + self.shard_numel])

    def keep_replaced(self, call: str) -> None:
        """Copy what ``parameter.data = ...`` has put in the place of views of the flat memory, in stages 1 and 2.

        Args:
            call: the user's call, for messages.

        Raises:
            ArgumentError: names a parameter that has another shape, or whose values a step would be lost to.
        """
        replaced = [] if self.frees else list(self._replaced())
        if not replaced:
            return
        was_changed = self.is_changed
        for name, parameter, view in replaced:
            if parameter.dtype != view.dtype or parameter.device != view.device:
                continue  # refuse_conversion() says so
            if parameter.shape != view.shape:
                raise ArgumentError(
                    f"{call}: parameter {name!r} has shape {tuple(parameter.shape)}; expected {tuple(view.shape)}, as "
                    "when the hooks were registered: remove() the hooks before its data is replaced"
                )
            if was_changed:
                raise ArgumentError(
                    f"{call}: the data of parameter {name!r} was replaced while results of optimizer.step() were not "
                    "gathered; call handle.attach(optimizer) once, or handle.gather() after each step"
                )
            with torch.no_grad():
                view.copy_(parameter)
            parameter.data = view
        if not was_changed:
            self.notice_gathered()

    def _replaced(self) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
        for name, parameter, view in zip(self.names, self.parameters, self._views, strict=True):
            if parameter.data_ptr() != view.data_ptr() and view.numel():
                yield name, parameter, view

    def release(self) -> None:
        """Give the parameters ordinary memory of their own, with the values of all ranks; the optimizer's as well."""
        if not self.is_gathered or self.is_in_flight:
            self.finish_gather()
        with torch.no_grad():
            for _, parameter, view in () if self.frees else self._replaced():
                if (parameter.dtype, parameter.device, parameter.shape) == (view.dtype, view.device, view.shape):
                    view.copy_(parameter)
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.data = view.clone()
            for segment in self.segments:
                segment.parameter.data = segment.parameter.detach().clone()
        self._views.clear()
        self.segments.clear()
        self.full = self.shard = factories.empty(0, dtype=self.dtype, device=self.device)


def _sharing(tensor: torch.Tensor) -> int:
    """Return how many tensors share the memory of ``tensor``, as Python's variables or in a graph of autograd."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def _nothing() -> None:
    pass
