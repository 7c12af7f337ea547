"""Running a schedule: stages compute, activations and gradients travel between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from numbers import Real
from typing import Any

import torch
from torch import nn

from comm_collectives.annotations import Group
from comm_collectives.groups import get_rank, get_world_size
from comm_collectives.hooks.apply import apply
from comm_collectives.hooks.call_agreement import agree_on_call
from comm_collectives.hooks.group_arguments import group_along
from comm_collectives.hooks.model_agreement import as_refusal
from comm_collectives.hooks.pipeline.actions import BACKWARD, FORWARD, Compute, Message, Schedule
from comm_collectives.hooks.pipeline.channel import StageChannel
from comm_collectives.hooks.pipeline.check import ScheduleReport, check_schedule
from comm_collectives.hooks.pipeline.gradient_hooks import check_no_sync, check_tied
from comm_collectives.hooks.pipeline.loss import check_loss, check_loss_function
from comm_collectives.hooks.pipeline.tied import TiedParameter
from comm_utils.errors import ArgumentError, ArgumentTypeError, CommError
from comm_utils.given import shown

__all__ = ["run_schedule"]

_CALL = "run_schedule"


def run_schedule(
    schedule: Schedule,
    stages: Callable[..., Any] | Sequence[Callable[..., Any]],
    inputs: Any = None,
    targets: Any = None,
    loss_function: Callable[..., torch.Tensor] | None = None,
    group: Any = None,
    *,
    gradient_scale: float | None = None,
    tied: Sequence[TiedParameter] = (),
    no_sync: Callable[[], AbstractContextManager[Any]] | None = None,
    device: torch.device | str | None = None,
) -> list[torch.Tensor]:
    """Run the stages of this rank for all micro-batches; gradients are accumulated in ``.grad`` of their parameters.

    Before anything else, the ranks compare their schedules, with one all_gather of 8 bytes.

    Args:
        schedule: the same on every rank, for as many ranks as the group has.
        stages: this rank's stage, or its ``chunks`` stages in the order of the model. Each takes what the stage before
            returns: a tensor or several.
        inputs: on the rank of the first stage, a list with one entry for each micro-batch, a tensor or a tuple of
            tensors; or one tensor to divide along dimension 0. Ignored elsewhere.
        targets: on the rank of the last stage, likewise; None where the loss takes none.
        loss_function: on the rank of the last stage, called with the output and the target of a micro-batch; returns a
            scalar. None where the last stage returns the loss itself, or where there is no backward pass.
        group: the pipeline group, ``ParallelGroups`` or a ``DeviceMesh``; None is the world group.
        gradient_scale: factor of each micro-batch's loss in the gradients; None for 1 / micro-batches, which makes them
            those of the mean.
        tied: parameters that several stages share; their gradients are summed at the end.
        no_sync: entered for all backward passes but this rank's last one, such as ``no_sync`` of data-parallel hooks.
            With several stages, the hooks are those of one call for all of them: register them on a ``ModuleList``.
        device: of activations; None for that of the first parameter of the stages, or the CPU.

    Returns:
        On the rank of the last stage, the losses (or outputs, without a loss function) of the micro-batches in order,
        detached and not scaled; elsewhere an empty list.

    Raises:
        ArgumentError: this rank's arguments are wrong; other ranks raise as well and name the rank. Or a loss that is
            to be differentiated is no scalar: this is seen on its rank alone, and the others wait for the timeout, or
            notice that the rank ended.
        CollectiveMismatchError: ranks have different schedules; names the ranks. No activation was sent.
    """
    group = group_along(_CALL, "group", group, "pipeline")
    error: CommError | None = None
    run: _Run | None = None
    place = _device_of(stages)
    try:
        place = place if device is None else _checked_device(device)
        run = _Run(schedule, stages, inputs, targets, loss_function, group, gradient_scale, no_sync, place)
        check_tied(_CALL, tied)
    except Exception as raised:
        error = as_refusal(_CALL, raised)
    fingerprint = schedule.fingerprint if isinstance(schedule, Schedule) else 0
    agree_on_call(_CALL, "schedule", fingerprint, str(schedule), error, group, place)
    assert run is not None  # agree_on_call has raised the error
    for one in tied:
        one.start()
    losses = run.run()
    for one in tied:
        one.reduce_gradients()
    return losses


@lru_cache(maxsize=64)
def _report(schedule: Schedule) -> ScheduleReport:
    return check_schedule(schedule)


class _Run:
    def __init__(
        self,
        schedule: Schedule,
        stages: Any,
        inputs: Any,
        targets: Any,
        loss_function: Any,
        group: Group,
        gradient_scale: float | None,
        no_sync: Callable[[], AbstractContextManager[Any]] | None,
        device: torch.device,
    ) -> None:
        if not isinstance(schedule, Schedule):
            raise ArgumentTypeError(
                f"{_CALL}: schedule: got {shown(schedule)}; expected a Schedule, such as gpipe(2, 4)"
            )
        W, self.rank = get_world_size(group), get_rank(group)
        if schedule.ranks != W:
            raise ArgumentError(
                f"{_CALL}: schedule: got one for {schedule.ranks} ranks; expected {W}, the size of the pipeline group"
            )
        _report(schedule)
        self.schedule, self.last = schedule, schedule.stages - 1
        own = schedule.stages_of(self.rank)
        self.stages = dict(zip(own, _checked_stages(stages, len(own)), strict=True))
        self.inputs = _microbatches("inputs", inputs, schedule) if 0 in self.stages else None
        self.targets: list[Any] | None = None
        self.loss_function = None
        if self.last in self.stages:
            self.loss_function = loss_function
            self.targets = None if targets is None else _microbatches("targets", targets, schedule)
            check_loss_function(_CALL, loss_function, self.targets, schedule.has_backward)
        if gradient_scale is not None and (isinstance(gradient_scale, bool) or not isinstance(gradient_scale, Real)):
            raise ArgumentTypeError(f"{_CALL}: gradient_scale: got {shown(gradient_scale)}; expected a number or None")
        if no_sync is not None and not callable(no_sync):
            raise ArgumentTypeError(
                f"{_CALL}: no_sync: got {shown(no_sync)}; expected a function such as no_sync of a handle, or None"
            )
        self.scale = 1 / schedule.microbatches if gradient_scale is None else gradient_scale
        self.no_sync = no_sync or nullcontext
        if no_sync is not None:
            check_no_sync(_CALL, schedule, self.rank, self.stages)
        self.channel = StageChannel(group, device)
        self.backwards = sum(isinstance(one, Compute) and one.kind == BACKWARD for one in schedule.actions[self.rank])
        # By stage and micro-batch, from the pass that makes them until the one that uses them.
        self.entered: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.results: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.gradients: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.local: dict[tuple[str, int, int], list[torch.Tensor]] = {}
        self.outgoing: dict[Message, list[torch.Tensor]] = {}
        self.messages = {
            (one.kind, one.to_stage, one.microbatch): one
            for action in schedule.actions[self.rank]
            if not isinstance(action, Compute)
            for one in action.messages
            if one.dst == self.rank
        }
        self.losses: dict[int, torch.Tensor] = {}

    def run(self) -> list[torch.Tensor]:
        with torch.set_grad_enabled(self.schedule.has_backward):
            for action in self.schedule.actions[self.rank]:
                if not isinstance(action, Compute):
                    outgoing = {one: self.outgoing.pop(one) for one in action.messages if one.src == self.rank}
                    self.channel.exchange(action.messages, outgoing)
                elif action.kind == FORWARD:
                    self._forward(action.stage, action.microbatch)
                else:
                    self.backwards -= 1
                    with self.no_sync() if self.backwards else nullcontext():
                        self._backward(action.stage, action.microbatch)
        self.channel.finish_sends()
        return [self.losses[number] for number in sorted(self.losses)]

    def _forward(self, stage: int, number: int) -> None:
        if self.inputs is not None and stage == 0:
            entered = self.inputs[number]
        else:
            entered = self._arrived(FORWARD, stage, number)
        self.entered[stage, number] = entered
        output = self.stages[stage](*[_enter(one) for one in entered])
        if stage == self.last:
            loss = output
            if self.loss_function is not None:
                extra = () if self.targets is None else self.targets[number]
                loss = self.loss_function(output, *extra)
            check_loss(_CALL, loss, self.loss_function is not None, self.schedule.has_backward, number)
            self.losses[number] = loss.detach()
            results = [loss]
        else:
            results = list(output) if isinstance(output, (tuple, list)) else [output]
            self._check_output(stage, results)
            self._hand_on(FORWARD, stage, number, results)
        if self.schedule.has_backward:
            self.results[stage, number] = results
        else:
            del self.entered[stage, number]

    def _backward(self, stage: int, number: int) -> None:
        results = self.results.pop((stage, number))
        entered = self.entered.pop((stage, number))
        if stage == self.last:
            if results[0].requires_grad:
                (results[0] * self.scale).backward()  # type: ignore[no-untyped-call]
        else:
            needing = [one.requires_grad for one in results]
            if (BACKWARD, stage, number) in self.messages:
                needing = [one.requires_grad for one in self.channel.types(stage)]
            awaited = [one for one, needs_gradient in zip(results, needing, strict=True) if needs_gradient]
            pairs = zip(awaited, self._arrived(BACKWARD, stage, number), strict=True)
            # The first micro-batch may have required more gradients than this one.
            wanted = [(one, gradient) for one, gradient in pairs if one.requires_grad]
            if wanted:
                torch.autograd.backward([one for one, _ in wanted], [gradient for _, gradient in wanted])
        if stage:
            leaves = [one for one in entered if one.requires_grad]
            back = [torch.zeros_like(one) if one.grad is None else one.grad for one in leaves]
            self._hand_on(BACKWARD, stage, number, back)

    def _arrived(self, kind: str, stage: int, number: int) -> list[torch.Tensor]:
        """Return the activations, or gradients, that ``stage`` takes."""
        message = self.messages.get((kind, stage, number))
        if message is None:
            tensors = self.local.pop((kind, stage, number))
            needing = [one.requires_grad for one in tensors]
            tensors = [one.detach() for one in tensors]
        else:
            tensors = self.channel.receive(message)
            needing = [one.requires_grad for one in self.channel.types(message.stage)] if kind == FORWARD else []
        if kind == FORWARD and self.schedule.has_backward:
            for one, needs_gradient in zip(tensors, needing, strict=True):
                one.requires_grad_(needs_gradient)
        return tensors

    def _hand_on(self, kind: str, stage: int, number: int, tensors: list[torch.Tensor]) -> None:
        target = stage + 1 if kind == FORWARD else stage - 1
        dst = self.schedule.rank_of(target)
        if dst == self.rank:
            self.local[kind, target, number] = tensors
        else:
            self.outgoing[Message(kind, stage, number, self.rank, dst)] = tensors

    def _check_output(self, stage: int, results: list[Any]) -> None:
        for one in results:
            if not isinstance(one, torch.Tensor):
                raise ArgumentTypeError(
                    f"{_CALL}: stage {stage} returned {shown(one)}; expected a tensor or a tuple of tensors"
                )


class _Enter(torch.autograd.Function):
    """The same memory as a result, which a stage may change in place: torch refuses that for leaves and their views."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        # No copy, and the same version: where the stage before has saved the memory for its backward, torch raises.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _enter(given: Any) -> Any:
    is_leaf = isinstance(given, torch.Tensor) and given.requires_grad and given.is_leaf
    return apply(_Enter, given) if is_leaf else given


def _checked_device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ArgumentTypeError(
            f"{_CALL}: device: got {shown(device)}; expected a torch.device or its name, or None"
        ) from None


def _device_of(stages: Any) -> torch.device:
    for one in stages if isinstance(stages, (list, tuple)) else [stages]:
        for parameter in one.parameters() if isinstance(one, nn.Module) else ():
            return parameter.device
    return torch.device("cpu")


def _checked_stages(stages: Any, count: int) -> list[Callable[..., Any]]:
    is_list = isinstance(stages, (list, tuple, nn.ModuleList))
    found = list(stages) if is_list else [stages]
    if len(found) != count:
        raise ArgumentError(f"{_CALL}: stages: got {len(found)}; expected {count}, one for each chunk of this rank")
    for one in found:
        if not callable(one):
            raise ArgumentTypeError(f"{_CALL}: stages: got {shown(one)}; expected modules or functions")
    return found


def _microbatches(name: str, given: Any, schedule: Schedule) -> list[Any]:
    """Return a list of tensors for each micro-batch."""
    count = schedule.microbatches
    if isinstance(given, torch.Tensor):
        if not given.dim() or given.shape[0] % count:
            raise ArgumentError(
                f"{_CALL}: {name}: got shape {tuple(given.shape)}; expected a multiple of {count} along dimension 0, "
                "the number of micro-batches"
            )
        given = given.chunk(count)
    if not isinstance(given, (list, tuple)):
        raise ArgumentTypeError(f"{_CALL}: {name}: got {shown(given)}; expected a list of {count} micro-batches")
    if len(given) != count:
        raise ArgumentError(f"{_CALL}: {name}: got {len(given)} micro-batches; expected {count}, as the schedule has")
    found = [list(one) if isinstance(one, (tuple, list)) else [one] for one in given]
    if name == "inputs":
        shapes = [[tuple(one.shape) for one in entry if isinstance(one, torch.Tensor)] for entry in found]
        for number, shape in enumerate(shapes):
            if shape != shapes[0]:
                raise ArgumentError(
                    f"{_CALL}: {name}: got shapes {shape} in micro-batch {number}; expected {shapes[0]}, as in "
                    "micro-batch 0"
                )
    return found
