"""The state of a sharded model and its optimizer, by parameter, for checkpoints at any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from comm_collectives.hooks.sharded.checkpoint_tensor import CheckpointTensor
from comm_collectives.hooks.sharded.flat_shard import FlatShard, Segment
from comm_utils.errors import ArgumentError
from comm_utils.given import shown

__all__ = ["checked_model_state", "load_optimizer_state", "model_state", "optimizer_state"]


def model_state(model: nn.Module, flats: Sequence[FlatShard], values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return this rank's part of the model's state, under the names of ``model.state_dict()``.

    Args:
        model: the model.
        flats: the flat memories of all parameters that are sharded.
        values: ``model.state_dict(keep_vars=True)``; what is not sharded is taken from it, such as buffers.
        prefix: put before every name.
    """
    places = {id(one): (flat, place) for flat in flats for place, one in enumerate(flat.parameters)}
    state = dict(values)
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and id(value) not in places:
            state[name] = value.detach()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in places:
            flat, place = places[id(parameter)]
            state[name] = _part(flat, place, flat.shard)
    return {prefix + name: value for name, value in state.items()}


def _part(flat: FlatShard, place: int, shard: torch.Tensor) -> CheckpointTensor:
    begin, end, start = flat.range_of(place)
    return CheckpointTensor(flat.parameters[place].shape, begin, shard[start : start + end - begin])


def checked_model_state(
    model: nn.Module, own: Mapping[str, Any], state: Mapping[str, Any], prefix: str
) -> Callable[[], None]:
    """Return a function that writes ``state`` into ``model``, as far as it is not there already.

    Args:
        model: the model.
        own: its :func:`model_state`, with the same prefix.
        state: by the names of ``own``, parts that are the same, or whole tensors.
        prefix: stands before every name.

    Raises:
        ArgumentError: names the first tensor of another shape, or part.
    """
    extra: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        extra[f"{prefix}{name}._extra_state" if name else f"{prefix}_extra_state"] = module
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, mine in own.items():
        if name in extra or not isinstance(mine, torch.Tensor) or name not in state:
            continue
        if isinstance(mine, CheckpointTensor):
            into, begin = mine.part, mine.begin
        else:
            into, begin = mine, 0
        loaded = _loaded_part(name, state[name], mine.size(), begin, into.numel()).view(into.shape)
        if loaded.data_ptr() != into.data_ptr():
            copies.append((into, loaded))

    def write() -> None:
        with torch.no_grad():
            for into, loaded in copies:
                into.copy_(loaded)
        for name, module in extra.items():
            if name in own and name in state:
                module.set_extra_state(state[name])

    return write


def _loaded_part(name: str, value: object, shape: torch.Size, begin: int, numel: int) -> torch.Tensor:
    """Return (numel,), the elements from ``begin`` on of a tensor of ``shape`` that a state has under ``name``.

    Raises:
        ArgumentError: ``value`` is neither the same part nor a whole tensor.
    """
    if isinstance(value, CheckpointTensor):
        if (value.size(), value.begin, value.part.numel()) == (shape, begin, numel):
            return value.part
        got = repr(value)
    elif isinstance(value, torch.Tensor) and value.shape == shape:
        return value.detach().reshape(-1)[begin : begin + numel]
    else:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else shown(value)
    raise ArgumentError(
        f"load_state_dict: state: {name!r} has {got}; expected elements {begin} to {begin + numel} of shape "
        f"{tuple(shape)}, as in what state_dict() returns here, or a whole tensor"
    )


def optimizer_state(optimizer: Optimizer, flats: Sequence[FlatShard], prefix: str) -> dict[str, Any]:
    """Return this rank's part of the optimizer's state, in the form of ``torch.distributed.checkpoint.state_dict``.

    An optimizer that made no step yet is described with zeros of the shapes that a step makes, and with step 0.

    Returns:
        ``"state"``: by parameter of the model, what the optimizer keeps for it. ``"param_groups"``: the options of each
        group, with the names of its parameters. ``prefix`` stands before the names of parameters, and before
        ``"param_groups"``, which would be one entry of the checkpoint otherwise.

    Raises:
        ArgumentError: the optimizer keeps something that is neither of the shape of its tensor nor one number.
    """
    state: dict[str, dict[str, Any]] = {}
    by_tensor = _states(optimizer, flats)
    for flat, segment in _segments(optimizer, flats):
        for key, value in by_tensor.get(id(segment.parameter), {}).items():
            for place in segment.positions:
                entry = state.setdefault(prefix + flat.names[place], {})
                if not isinstance(value, torch.Tensor) or value.dim() == 0:
                    entry[key] = value.clone() if isinstance(value, torch.Tensor) else value
                    continue
                if value.shape != segment.parameter.shape:
                    raise ArgumentError(
                        f"state_dict: optimizer: {type(optimizer).__name__} keeps {key!r} of shape "
                        f"{tuple(value.shape)} for a tensor of shape {tuple(segment.parameter.shape)}; expected one "
                        "that treats each element alike, such as SGD or Adam"
                    )
                begin, end, start = flat.range_of(place)
                place_in = start - segment.begin if begin < end else 0
                part = value.detach()[place_in : place_in + end - begin]
                entry[key] = CheckpointTensor(flat.parameters[place].shape, begin, part)
    names = {id(one.parameter): [prefix + flat.names[place] for place in one.positions] for flat, one in _all(flats)}
    return {
        "state": state,
        prefix + "param_groups": [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [name for one in group["params"] for name in names[id(one)]],
            }
            for group in optimizer.param_groups
        ],
    }


def load_optimizer_state(
    optimizer: Optimizer, flats: Sequence[FlatShard], state: Mapping[str, Any], prefix: str
) -> None:
    """Give ``optimizer`` the state that :func:`optimizer_state` returned and a checkpoint was loaded into.

    Zeros alone are the description of an optimizer that made no step: its first step makes the state, whose first
    values may be others.

    Raises:
        ArgumentError: it has another number of groups, nothing for a parameter, or different numbers for parameters
            that are updated together.
    """
    by_name: Mapping[str, Mapping[str, Any]] = state["state"]
    groups = state[prefix + "param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise ArgumentError(
            f"load_state_dict: state: got {len(groups)} groups of parameters; expected {len(optimizer.param_groups)}, "
            "those of the optimizer"
        )
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})
    expected = _states(optimizer, flats)
    loaded: dict[torch.Tensor, dict[str, Any]] = {}
    for flat, segment in _segments(optimizer, flats):
        kept: dict[str, Any] = {}
        for place in segment.positions:
            name = prefix + flat.names[place]
            if name not in by_name and expected.get(id(segment.parameter)):
                raise ArgumentError(
                    f"load_state_dict: state: got nothing for parameter {name!r}; expected the optimizer's state of "
                    "all parameters that it updates, as in what state_dict(optimizer) returns here"
                )
            for key, value in by_name.get(name, {}).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    begin, end, start = flat.range_of(place)
                    part = _loaded_part(name, value, flat.parameters[place].shape, begin, end - begin)
                    if key not in kept:
                        kept[key] = torch.zeros_like(segment.parameter, dtype=part.dtype).detach()
                    place_in = start - segment.begin if begin < end else 0
                    kept[key][place_in : place_in + end - begin].copy_(part)
                elif key not in kept:
                    kept[key] = value.clone() if isinstance(value, torch.Tensor) else value
                elif kept[key] != value:
                    raise ArgumentError(
                        f"load_state_dict: state: {key!r} of parameter {name!r} is {value}, and {kept[key]} of others "
                        "that are updated together with it; expected the same"
                    )
        if kept:
            loaded[segment.parameter] = kept
    if any(map(_says_something, loaded.values())) or not _begins_without_state(optimizer, flats):
        optimizer.state.update(loaded)
    else:
        optimizer.state.clear()


def _all(flats: Sequence[FlatShard]) -> Iterator[tuple[FlatShard, Segment]]:
    return ((flat, segment) for flat in flats for segment in flat.segments)


def _segments(optimizer: Optimizer, flats: Sequence[FlatShard]) -> list[tuple[FlatShard, Segment]]:
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    return [(flat, segment) for flat, segment in _all(flats) if id(segment.parameter) in held]


def _says_something(kept: Mapping[str, Any]) -> bool:
    return any(
        bool(value.any()) if isinstance(value, torch.Tensor) else value != 0
        for value in kept.values()
        if isinstance(value, (torch.Tensor, int, float)) and not isinstance(value, bool)
    )


def _begins_without_state(optimizer: Optimizer, flats: Sequence[FlatShard]) -> bool:
    """Return whether the first step makes the state; Adagrad has one from the start."""
    kept = dict(optimizer.state)
    optimizer.state.clear()
    try:
        _states(optimizer, flats)
    except Exception:  # whatever it misses
        return False
    finally:
        optimizer.state.update(kept)
    return True


def _states(optimizer: Optimizer, flats: Sequence[FlatShard]) -> dict[int, dict[str, Any]]:
    """Return what ``optimizer`` keeps by ``id`` of its tensors; as after a step of zeros if it made no step yet."""
    if optimizer.state:
        return {id(tensor): kept for tensor, kept in optimizer.state.items()}
    tensors = [one for group in optimizer.param_groups for one in group["params"]]
    gradients, rates = [one.grad for one in tensors], [group.get("lr") for group in optimizer.param_groups]
    values = [one.detach().clone() for one in tensors]
    unchanged = [flat for flat in flats if not flat.is_changed]
    try:
        for one in tensors:
            one.grad = torch.zeros_like(one)
        for group in optimizer.param_groups:
            if group.get("lr") is not None:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        # Not optimizer.step(): learning rate schedulers count its calls, and hooks act on them.
        step = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
        step(optimizer)
        made = {id(tensor): kept for tensor, kept in optimizer.state.items()}
    finally:
        optimizer.state.clear()
        with torch.no_grad():
            for one, gradient, value in zip(tensors, gradients, values, strict=True):
                one.grad = gradient
                one.copy_(value)
        for flat in unchanged:
            flat.notice_gathered()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
    for kept in made.values():
        for key, value in kept.items():
            if isinstance(value, torch.Tensor):
                value.zero_()
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                kept[key] = type(value)(0)
    return made
