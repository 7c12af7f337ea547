"""Stage 3: parameters exist while modules use them.

ZeRO's partitioned parameters (Rajbhandari et al. 2020, section 5.3), by hooks of modules:

1. Before the forward of a module, the parameters of its unit are gathered. The unit that the last pass used next is
   gathered in the background meanwhile.
2. After the forward, they are freed, unless the next use is of the same unit.
3. Before the backward of a module, they are gathered again. They are freed when all their gradients have arrived and
   the backward has reached another module, outside of whose call the module is: until then, the backward may read them.

The backward of a module is noticed at the tensors in its output. Where something in the output may hide some, the
parameters stay gathered from the forward to the end of the backward instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from comm_collectives.hooks.model_hook import ModelHook
from comm_collectives.hooks.sharded.flat_shard import FlatShard
from comm_collectives.hooks.sharded.parameter_access import watch_parameters
from comm_collectives.hooks.sharded.saved_values import keep_saved_values
from comm_collectives.hooks.sharded.tensors_in import outputs_of
from comm_collectives.hooks.sharded.units import Unit
from comm_collectives.hooks.sharded.use_order import UseOrder
from comm_utils.errors import ArgumentError

__all__ = ["Gathering"]


class Gathering:
    """The hooks of all modules of a model.

    Args:
        model: the model.
        roots: units with the modules whose calls use all of their parameters.
        prefetch: gather the next unit in the background.
        begin_backward: called when a backward reaches the output of a module.
        is_backward: returns whether a backward runs.
        agree: called before the backward gathers a unit; leads to calls of :meth:`complete`, the same on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        roots: Sequence[tuple[Unit, nn.Module]],
        prefetch: bool,
        begin_backward: Callable[[], None],
        is_backward: Callable[[], bool],
        agree: Callable[[], None],
    ) -> None:
        self.units = [unit for unit, _ in roots]
        self._prefetches, self._begin_backward, self._is_backward = prefetch, begin_backward, is_backward
        self._agree = agree
        self._forward, self._backward = UseOrder(), UseOrder()
        self._depth = 0
        self._is_open = False
        # Read by modules that they do not belong to, in any pass so far.
        self._outside: list[Unit] = []
        # Of modules whose output may hide tensors.
        self._kept: list[Unit] = []
        self._current: Unit | None = None
        # By id, flat memories all of whose gradients this backward has brought, on all ranks.
        self._done: set[int] = set()
        self._undo: list[Callable[[], object]] = []
        for each in self.units:
            for flat in each.flats:
                flat.on_read = partial(self._accessed, each)
        unit_of = {id(one): unit for unit in self.units for flat in unit.flats for one in flat.parameters}
        for module in model.modules():
            units = [unit for unit, root in roots if root is module]
            own = {id(unit): unit for one in module._parameters.values() if (unit := unit_of.get(id(one)))}
            units += [unit for unit in own.values() if unit not in units]
            if units or module is model:
                self._register(module, units, is_root=module is model)
            if own:
                self._undo.append(watch_parameters(module, unit_of, self._accessed))

    def _register(self, module: nn.Module, units: list[Unit], is_root: bool) -> None:
        # torch.compile takes an error of what it traces for a reason to run it without compilation.
        refuse = cast("Any", torch.compiler.disable)(_refuse_compilation)

        calls, own = 0, module

        def before(module: nn.Module, inputs: Any) -> None:
            nonlocal calls
            if module is not own:  # a copy has the hooks, and its parameters are its own
                return
            calls += 1
            if torch.compiler.is_compiling():
                refuse()
            if is_root:
                self._enter_model()
            for unit in units:
                unit.depth += 1
                if unit.depth == 1 or not unit.is_gathered():
                    self._use(unit)

        def after(module: nn.Module, inputs: Any, outputs: Any) -> None:
            nonlocal calls
            if module is not own or not calls:  # an earlier hook refused the call
                return
            calls -= 1
            if torch.is_grad_enabled():
                self._watch_backward(outputs, units, is_root)
            for unit in units:
                unit.depth -= 1
                if not unit.depth:
                    self._leave(unit)
            if is_root:
                self._leave_model()

        # The hook after a forward that failed has to be called as well.
        hooks: list[RemovableHandle] = [
            module.register_forward_pre_hook(ModelHook(before)),
            module.register_forward_hook(ModelHook(after), always_call=True),
        ]
        self._undo += [hook.remove for hook in hooks]

    # --- forward

    def _enter_model(self) -> None:
        self._depth += 1
        if self._depth > 1 or self._is_backward():
            return
        # What an earlier pass left may be older than the last step of the optimizer.
        for unit in self.units:
            unit.depth, unit.is_needed = 0, False
        self.free_all()
        self._forward.begin()

    def _leave_model(self) -> None:
        self._depth -= 1
        if self._depth or self._is_backward():
            return
        self._forward.end()
        for unit in self.units:
            unit.is_needed = False
        if self._is_open:
            return
        kept = self._forward.expected[-1:] if torch.is_grad_enabled() else []
        for unit in self.units:
            if unit not in kept and not self._stays(unit):
                _free(unit, keeps_aliases=not torch.is_grad_enabled())

    def _use(self, unit: Unit) -> None:
        """Gather ``unit``, and begin with the one that follows it."""
        if self._is_backward():
            self._use_in_backward(unit)
            return
        follows = None
        if self._depth:
            self._forward.use(unit)
            follows = self._forward.next()
        self._gather(unit, follows)

    def _leave(self, unit: Unit) -> None:
        if self._is_open or unit.is_needed or self._is_backward():
            return
        is_last = self._forward.is_at_end() and torch.is_grad_enabled()
        if self._stays(unit) or (self._depth and (self._forward.next() is unit or is_last)):
            return
        _free(unit, keeps_aliases=not torch.is_grad_enabled())

    def _stays(self, unit: Unit) -> bool:
        """Return whether a backward may reach ``unit`` unnoticed."""
        return unit in self._kept and torch.is_grad_enabled()

    def _gather(self, unit: Unit, follows: Unit | None) -> None:
        for flat in unit.flats:
            if not flat.is_gathered:
                flat.start_gather()
        for flat in unit.flats:
            if not flat.is_gathered:
                flat.finish_gather()
        if self._prefetches and follows is not None and follows is not unit:
            for flat in follows.flats:
                if not flat.is_gathered:
                    flat.start_gather()

    def _accessed(self, unit: Unit) -> None:
        """Gather a unit of which a parameter is read; between the passes nothing is sent."""
        runs = self._depth or self._is_backward() or any(one.depth for one in self.units)
        if not runs:
            return
        if not unit.depth:
            unit.is_needed = True
            if unit not in self._outside:
                self._outside.append(unit)
        self._use(unit)

    # --- backward

    def _watch_backward(self, outputs: Any, units: list[Unit], is_root: bool) -> None:
        # The backward goes on in the modules that call this one when it has left it.
        callers = [unit for unit in self.units if unit.depth]

        def begin(gradient: torch.Tensor) -> None:
            if torch.is_grad_enabled():
                _refuse_second_backward()
            self._begin_backward()
            for unit in units:
                if unit is not self._current or not unit.is_gathered():
                    self._use_in_backward(unit, callers)

        if not units and not is_root:
            return
        found = outputs_of(outputs)
        for tensor in found.tensors:
            cast("Any", tensor).register_hook(begin)
        if found.is_opaque:
            for unit in units:
                for noticed in (self._outside, self._kept):
                    if unit not in noticed:
                        noticed.append(unit)

    def begin_backward(self) -> None:
        """Gather what a backward needs from its beginning."""
        self._backward.begin()
        self._done.clear()
        self._current = None
        if not self._backward.expected:
            self._backward.expected = self._forward.expected[::-1]
        for unit in self._outside:
            unit.is_needed = True
            self._gather(unit, None)

    def _use_in_backward(self, unit: Unit, callers: Sequence[Unit] = ()) -> None:
        if self._current is not None:  # otherwise nothing is complete
            self._agree()
        self._current = unit
        self._backward.use(unit)
        if not self._is_open:
            self._free_used(unit, callers)
        self._gather(unit, self._backward.next())

    def _free_used(self, unit: Unit, callers: Sequence[Unit]) -> None:
        """Free what the backward has left when it reaches ``unit``."""
        for other in self.units:
            if other is unit or other in callers or other.is_needed or other.depth or other.encloses(unit):
                continue
            for flat in other.flats:
                # No gradient announces that parameters without gradients were used.
                if flat.is_gathered and (id(flat) in self._done or not flat.requires_grad):
                    flat.free()

    def complete(self, flat: FlatShard) -> None:
        """Have the next unit that the backward reaches free parameters whose gradients have all arrived.

        Not at once: autograd hands on a gradient that is complete before it computes others of the same module.
        """
        self._done.add(id(flat))

    def end_backward(self) -> None:
        """Free everything."""
        self._backward.end()
        self._done.clear()
        self._current = None
        for unit in self.units:
            unit.is_needed = False
        self.free_all()

    # --- outside of passes

    def free_all(self, keeps_aliases: bool = False) -> None:
        """Free all parameters, except within :meth:`opened`."""
        if not self._is_open:
            for unit in self.units:
                _free(unit, keeps_aliases)

    def opened(self, writes: bool) -> Iterator[None]:
        """Gather all parameters, and free them when the iterator goes on.

        Args:
            writes: keep what was written to them meanwhile.
        """
        was_open, self._is_open = self._is_open, True
        flats = [flat for unit in self.units for flat in unit.flats]
        try:
            for flat in flats:
                if not flat.is_gathered:
                    flat.start_gather()
            for flat in flats:
                if not flat.is_gathered:
                    flat.finish_gather()
            with keep_saved_values(flats):
                yield
            for flat in flats:
                flat.refuse_conversion("full_parameters")
            if writes:
                for flat in flats:
                    flat.keep_own()
        finally:
            self._is_open = was_open
            self.free_all(keeps_aliases=True)

    @contextmanager
    def as_open(self) -> Iterator[None]:
        """Let calls of the model's ``state_dict()`` pass meanwhile, which see parameters as they are."""
        was_open, self._is_open = self._is_open, True
        try:
            yield
        finally:
            self._is_open = was_open

    @property
    def is_open(self) -> bool:
        """Return whether all parameters are gathered for the caller."""
        return self._is_open

    def remove(self) -> None:
        """Remove the hooks."""
        while self._undo:
            self._undo.pop()()
        self.units = []
        self._outside.clear()
        self._kept.clear()


def _refuse_compilation() -> None:
    raise ArgumentError(
        "torch.compile: got a model with the hooks of register_sharded_hooks(stage=3); expected stage 1 or 2, whose "
        "parameters are not freed, or a model that is not compiled"
    )


def _refuse_second_backward() -> None:
    raise ArgumentError(
        "backward: got create_graph=True with the hooks of register_sharded_hooks(stage=3), which free parameters that "
        "a second backward needs; use torch.autograd.grad(..., create_graph=True) in stage 1 or 2"
    )


def _free(unit: Unit, keeps_aliases: bool = False) -> None:
    for flat in unit.flats:
        flat.free(keeps_aliases)
