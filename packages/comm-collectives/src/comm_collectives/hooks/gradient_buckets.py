"""One bucket of gradients: flat memory in which the gradients of some parameters lie, and its reduction."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from comm_collectives.annotations import Group
from comm_collectives.hooks.buckets import flat_layout, flat_memory, view_of
from comm_collectives.hooks.gradient_reduction import GradientReduction
from comm_utils.backend import Work
from comm_utils.errors import ArgumentError
from comm_utils.torch_support import factories

__all__ = ["GradientBucket"]


class GradientBucket:
    """Gradients that are reduced together.

    Autograd adds to gradients in place, so a gradient that is a view of the bucket stays one. Gradients that are not,
    as after ``zero_grad(set_to_none=True)``, are copied in.

    Args:
        names, parameters: those whose gradients the bucket has, of one dtype and device.
        flags: elements behind the gradients, for what else ranks want to add up; 0 for none.
        group: the group that the bucket is reduced over.
        reduction: how gradients of the ranks become one.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        flags: int,
        group: Group,
        reduction: GradientReduction,
    ) -> None:
        layout = flat_layout(parameters, extra_numel=flags)
        first = parameters[0]
        self.names, self.parameters, self._group = tuple(names), tuple(parameters), group
        self._reduction = reduction.of_bucket(names[0])
        self.flat = flat_memory(layout.numel, first.dtype, first.device, group)
        self._layout = layout
        self.views = [view_of(self.flat, span, one) for span, one in zip(layout.spans, parameters, strict=True)]
        # With the flags: where gradients are compressed, flags travel apart.
        self._gaps = layout.gaps(self.flat)
        #: (flags,), a view.
        self.flags = self.flat[layout.numel - flags :]
        self._work: Work | None = None
        # The versions of the memory after a reduction: in-place operations count them up.
        self._version: int | None = None

    def collect(self) -> list[int]:
        """Bring the gradients into the bucket, zeros for missing ones; return the places of those."""
        missing: list[int] = []
        views: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        owners: list[torch.nn.Parameter] = []
        begin, element_bytes = self.flat.data_ptr(), self.flat.element_size()
        for place, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            gradient, span = parameter.grad, self._layout.spans[place]
            if view.data_ptr() != begin + span.start * element_bytes and span.numel:
                # As module.to() does with gradients, which were views: they got memory of their own.
                view = self.views[place] = view_of(self.flat, span, parameter)
            if gradient is view:
                continue
            if gradient is None:
                view.zero_()
                missing.append(place)
                continue
            if gradient.requires_grad or gradient.dtype != view.dtype or gradient.layout is not torch.strided:
                gradient = _usable(gradient, view, self.names[place])
            views.append(view)
            gradients.append(gradient)
            owners.append(parameter)
        if views:
            torch._foreach_copy_(views, gradients)
            for parameter, view in zip(owners, views, strict=True):
                parameter.grad = view
        return missing

    def start(self) -> None:
        """Start the reduction of the bucket in place."""
        # Decoded, zeros are no zeros, and would be encoded in the next backward together with gradients.
        if self._gaps and self._reduction.compresses(self.flat.dtype, self._group):
            torch._foreach_zero_(self._gaps)
        self._work = self._reduction.start(self.flat, self._group)

    def wait(self) -> None:
        """Wait for the reduction that was started."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
            self._version = self.flat._version

    def added_since(self, latest: torch.Tensor | None) -> str | None:
        """Return the name of a parameter whose gradient is still the result of the last reduction; None for none.

        Args:
            latest: the parameter to whose gradient autograd has added, the first one since then; None for none.
        """
        kept = [place for place, view in enumerate(self.views) if self.parameters[place].grad is view]
        if self._version is None or not kept:
            return None
        additions = any(self.parameters[place] is latest for place in kept)
        return self.names[kept[0]] if self.flat._version - self._version <= additions else None

    def leave(self) -> None:
        """Give gradients that are in the bucket memory of their own."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is view:
                parameter.grad = view.clone()

    def drop(self) -> None:
        """Leave parameters whose gradients are in the bucket without one."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is view:
                parameter.grad = None

    def release(self) -> None:
        """Leave gradients that are not in the bucket, and give its memory back."""
        self.leave()
        self.views.clear()
        self._gaps.clear()
        self.flat = self.flags = factories.empty(0)


def _usable(gradient: torch.Tensor, view: torch.Tensor, name: str) -> torch.Tensor:
    """Return a dense gradient of the dtype of ``view``, or raise."""
    if gradient.requires_grad:
        raise ArgumentError(
            f"backward: the gradient of parameter {name!r} is to be differentiated again (create_graph=True), which "
            "its reduction cannot be; use torch.autograd.grad, or remove() the hooks before"
        )
    if gradient.dtype != view.dtype:
        raise ArgumentError(
            f"backward: parameter {name!r}: got a gradient of {gradient.dtype}; expected {view.dtype}, as when the "
            "hooks were registered; convert the model before, or remove() the hooks and register them again"
        )
    return gradient.to_dense()
