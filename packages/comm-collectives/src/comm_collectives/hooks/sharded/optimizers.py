"""Optimizers of a sharded model: what they are checked for, and what happens before and after their steps."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from comm_collectives.hooks.sharded.flat_shard import FlatShard
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown

__all__ = [
    "check_optimizer",
    "described",
    "flats_of",
    "notice_loss_scaling",
    "notice_zero_grad",
    "refuse_closure",
    "refuse_model_parameters",
    "refuse_scaled_step",
    "watch_state_calls_of",
]

_PART = "comm_collectives.part"
_REMEDY = "build it from the groups that handle.parameter_groups() returns"


def check_optimizer(call: str, optimizer: object, names: Mapping[int, str], flats: Sequence[FlatShard]) -> Optimizer:
    """Return ``optimizer``, which has tensors of ``flats`` and nothing else.

    Args:
        call: the user's call, for messages.
        names: of the model's parameters, by ``id``.
        flats: the flat memories of all parameters that require gradients.

    Raises:
        ArgumentTypeError: it is no optimizer.
        ArgumentError: it has a parameter of the model, or a tensor of something else.
    """
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(f"{call}: optimizer: got {shown(optimizer)}; expected a torch.optim.Optimizer")
    known = {id(segment.parameter) for flat in flats for segment in flat.segments}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _refuse(call, parameter, names)
            if id(parameter) not in known:
                raise ArgumentError(
                    f"{call}: optimizer: got one with a tensor of shape {tuple(parameter.shape)} that is no part of "
                    f"this model, or was made by an earlier parameter_groups(); {_REMEDY}"
                )
    return optimizer


def _refuse(call: str, parameter: torch.Tensor, names: Mapping[int, str]) -> None:
    if id(parameter) in names:
        raise ArgumentError(
            f"{call}: optimizer: got one with parameter {names[id(parameter)]!r} of the model, whose gradients are "
            f"reduced into shards; {_REMEDY}"
        )


def described(optimizer: Optimizer, flats: Sequence[FlatShard]) -> dict[str, object]:
    """Return what has to be the same on all ranks: the class, and each group's parameters and options, by name."""
    names = {
        id(one.parameter): [flat.names[place] for place in one.positions] for flat in flats for one in flat.segments
    }
    found: dict[str, object] = {"optimizer": type(optimizer).__name__, "number of groups": len(optimizer.param_groups)}
    for number, group in enumerate(optimizer.param_groups):
        members = [name for one in group["params"] for name in names.get(id(one), [])]
        found[f"group {number}: parameters"] = members
        options = {name: value for name, value in group.items() if name != "params"}
        found.update({f"group {number}: {name}": _comparable(options[name]) for name in sorted(options)})
    return found


def _comparable(value: object) -> object:
    """Return ``value`` without what differs between ranks by itself: devices of tensors, and addresses of objects."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_comparable(one) for one in value]
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    return type(value).__name__


def watch_state_calls_of(
    optimizer: Optimizer, flats: Sequence[FlatShard], stage: int
) -> Sequence[Callable[[], object]]:
    """Have ``load_state_dict()`` raise for the state of another rank's part; return what ends this.

    ``state_dict()`` says which part it is of, under a key of its own.

    Args:
        optimizer: checked.
        flats: the flat memories of all parameters that require gradients.
        stage: of sharding.
    """

    def part() -> dict[str, object]:
        names = {id(one.parameter): [flat.names[at] for at in one.positions] for flat in flats for one in flat.segments}
        return {
            "rank": flats[0].rank,
            "world size": flats[0].world_size,
            "stage": stage,
            "parameters": [[names.get(id(one), []) for one in group["params"]] for group in optimizer.param_groups],
        }

    def describe(_: Optimizer, state: dict[str, Any]) -> None:
        state[_PART] = part()

    def compare(_: Optimizer, state: dict[str, Any]) -> None:
        given, own = state.get(_PART), part()
        if given is None and not state.get("state"):
            return  # options alone
        for name, expected in own.items():
            got = given.get(name) if isinstance(given, Mapping) else None
            if got != expected:
                described = "no sharded optimizer" if given is None else f"{name} {shown(got)}"
                raise ArgumentError(
                    f"optimizer.load_state_dict: state: got that of {described}; expected {name} {shown(expected)}, "
                    "because each rank has the state of its part alone: save handle.state_dict(optimizer) on all ranks "
                    "by torch.distributed.checkpoint, and load it by handle.load_state_dict(state, optimizer)"
                )

    hooks = (
        optimizer.register_state_dict_post_hook(describe),
        optimizer.register_load_state_dict_pre_hook(compare),
    )
    return [hook.remove for hook in hooks]


def flats_of(optimizer: Optimizer, flats: Sequence[FlatShard]) -> list[FlatShard]:
    """Return the flat memories of which ``optimizer`` has tensors."""
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    return [flat for flat in flats if any(id(segment.parameter) in held for segment in flat.segments)]


def notice_loss_scaling(optimizer: Optimizer) -> Callable[[], None]:
    """Have a ``torch.amp.GradScaler`` call ``step()`` on every rank; return what ends this.

    It looks for infinities in this rank's part alone, and would leave the step out on some ranks.
    """
    hooked: Any = optimizer
    name = "_step_supports_amp_scaling"
    before = vars(optimizer).get(name)
    hooked._step_supports_amp_scaling = True

    def undo() -> None:
        if before is None:
            vars(optimizer).pop(name, None)
        else:
            hooked._step_supports_amp_scaling = before

    return undo


def notice_zero_grad(optimizer: Optimizer, before: Callable[[], None]) -> Callable[[], None]:
    """Call ``before`` at the beginning of each ``optimizer.zero_grad()``, which has no hooks; return what ends this."""
    hooked: Any = optimizer
    name, was = "zero_grad", vars(optimizer).get("zero_grad")
    called: Callable[..., None] = optimizer.zero_grad
    is_on = True

    @functools.wraps(called)
    def zero_grad(*positional: Any, **named: Any) -> None:
        if is_on:
            before()
        called(*positional, **named)

    hooked.zero_grad = zero_grad

    def undo() -> None:
        nonlocal is_on
        is_on = False
        if vars(optimizer).get(name) is not zero_grad:
            return  # it was replaced once more, and is called from there
        if was is None:
            del vars(optimizer)[name]
        else:
            hooked.zero_grad = was

    return undo


def refuse_closure(positional: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raise where ``step()`` got a closure, whose backward would run after gradients were checked.

    Args:
        positional: arguments of ``step()``, with the optimizer.
        named: the others.

    Raises:
        ArgumentError: it did.
    """
    if any(callable(one) for one in (*positional[1:], *named.values())):
        raise ArgumentError(
            "optimizer.step: closure: got one; closures are not supported by sharded hooks; call backward() before "
            "step()"
        )


def refuse_scaled_step(optimizer: Optimizer) -> None:
    """Raise where a ``torch.amp.GradScaler`` called ``step()``.

    Raises:
        ArgumentError: it did.
    """
    values = vars(optimizer)
    if values.get("found_inf") is not None:
        # The scaler takes them off again after a step that succeeded only.
        values.pop("found_inf")
        values.pop("grad_scale", None)
        raise ArgumentError(
            "optimizer.step: got called by a torch.amp.GradScaler, which looks for infinities in this rank's part of "
            "the gradients only; train in bfloat16, which needs no scaling, or in float32"
        )


def refuse_model_parameters(names: Mapping[int, str]) -> Callable[[], None]:
    """Have every optimizer's ``step()`` raise that has one of these parameters; return what ends this.

    Args:
        names: of the model's parameters, by ``id``.
    """
    checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def check(optimizer: Optimizer, positional: Any, named: Any) -> None:
        groups = optimizer.param_groups
        if checked.get(optimizer) != len(groups):
            for group in groups:
                for parameter in group["params"]:
                    _refuse("optimizer.step", parameter, names)
            checked[optimizer] = len(groups)

    return register_optimizer_step_pre_hook(check).remove
