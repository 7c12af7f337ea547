"""Error feedback as it is saved: its form, and its way into a world of another size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from comm_collectives.compression.feedback import Feedback, empty
from comm_collectives.compression.low_rank import LowRank
from comm_collectives.compression.members import Members
from comm_collectives.compression.shares import Shares
from comm_collectives.compression.states import State
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown

__all__ = ["POWERSGD", "check_state", "load", "reshard", "save"]

#: The method whose states are those of ``low_rank.LowRank``.
POWERSGD = "powersgd"


def save(state: State) -> dict[str, Any]:
    """Return a copy of the state of one tensor, with its rank and its group."""
    other = state.reduced if isinstance(state, Feedback) else state.factor
    found: dict[str, Any] = {"local": state.local.clone(), "other": other.clone(), "average": state.average}
    if state.members is not None:
        found.update(state.members.saved())
    if state.padding:
        found["padding"] = state.padding
    if isinstance(state, Feedback) and state.shares is not None:
        found["shares"] = state.shares.saved()
        if state.unsent is not None:
            found["unsent"] = state.unsent.clone()
    return found


def load(saved: Mapping[str, Any], low_rank: bool) -> State:
    """Return the state of one tensor that :func:`save` or :func:`reshard` returned."""
    local, other, average = _loaded(saved["local"]).view(-1), _loaded(saved["other"]), bool(saved["average"])
    members, padding = Members.loaded(saved), saved.get("padding", 0)
    if low_rank:
        return LowRank(local, other, average, members, padding)
    shares = Shares.loaded(saved["shares"]) if "shares" in saved else None
    unsent = _loaded(saved["unsent"]) if "unsent" in saved else None
    return Feedback(local, other, average, members=members, shares=shares, unsent=unsent, padding=padding)


def _in_one_step(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved state as that of a call in one step, on the CPU and without padding; ranks may have a GPU each."""
    saved = {name: one.cpu() if isinstance(one, torch.Tensor) else one for name, one in saved.items()}
    found = dict(saved)
    if "shares" in saved:
        local, other = (_loaded(saved[name]).view(-1) for name in ("local", "other"))
        world_size = saved.get("world_size", 1)
        found["local"] = Shares.loaded(saved["shares"]).whole(local, other, bool(saved["average"]), world_size)
        if "unsent" in saved:
            found["local"] += saved["unsent"]
        found["other"] = _nothing()
    found["local"] = found["local"][: found["local"].numel() - found.pop("padding", 0)]
    return found


def reshard(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """See ``Compression.reshard``."""
    if not isinstance(states, (list, tuple)):
        raise ArgumentTypeError(f"Compression.reshard: states: got {shown(states)}; expected a list, one a rank")
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise ArgumentTypeError(f"Compression.reshard: world_size: got {shown(world_size)}; expected an integer")
    for rank, one in enumerate(states):
        check_state(f"Compression.reshard: states[{rank}]", one, "what state_dict() returned")
    if not states or world_size < 1:
        raise ArgumentError(f"Compression.reshard: got {len(states)} states for {world_size} ranks")
    if len({(one["compression"], *sorted(one["tensors"])) for one in states}) != 1:
        raise ArgumentError("Compression.reshard: got states of different compressions or tensors")
    kind = states[0]["compression"]
    found: list[dict[str, Any]] = [{"compression": kind, "tensors": {}} for _ in range(world_size)]
    is_low_rank = str(kind).startswith(POWERSGD)
    for name, first in states[0]["tensors"].items():
        saved = [_in_one_step(one["tensors"][name]) for one in states]
        if len({(tuple(one["local"].shape), bool(one["average"])) for one in saved}) != 1:
            raise ArgumentError(
                f"Compression.reshard: got states of {name!r} with "
                f"{', '.join(str(one['local'].numel()) for one in saved)} elements, of "
                f"{', '.join('averages' if one['average'] else 'sums' for one in saved)}; expected the same of all"
            )
        _check_order(name, saved)
        # What an average lacks is divided by the number of ranks once it is sent with an input.
        scale, scale_of_sums = (world_size / len(states), world_size) if first["average"] else (1.0, 1)
        local = [torch.zeros_like(saved[0]["local"]) for _ in range(world_size)]
        for rank, one in enumerate(saved):
            local[rank % world_size] += one["local"] * scale
        if not is_low_rank:
            # Of a reduce_scatter, and of a state that was not used since it was resharded, there is none.
            sums = torch.cat([one["other"] for one in saved])[: local[0].numel()]
            local[0][: sums.numel()] += sums * scale_of_sums
        for rank in range(world_size):
            other = saved[0]["other"].clone() if is_low_rank else _nothing()
            moved = {"local": local[rank], "other": other, "average": first["average"]}
            found[rank]["tensors"][name] = {**moved, **Members(rank, world_size, None).saved()}
    return found


def check_state(call: str, state: object, expected: str) -> None:
    """Check the form of what ``state_dict()`` returns."""
    if isinstance(state, Mapping) and "compression" in state and isinstance(tensors := state.get("tensors"), Mapping):
        if all(_is_saved(one) for one in tensors.values()):
            return
        raise ArgumentTypeError(f"{call}: tensors: got {shown(dict(tensors))}; expected {expected}")
    raise ArgumentTypeError(f"{call}: got {shown(state)}; expected {expected}")


def _is_saved(one: object) -> bool:
    return (
        isinstance(one, Mapping)
        and "average" in one
        and all(isinstance(one.get(name), torch.Tensor) for name in ("local", "other"))
        and ("world_size" not in one or all(isinstance(one.get(name), int) for name in ("rank", "world_size")))
        and isinstance(padding := one.get("padding", 0), int)
        and 0 <= padding <= one["local"].numel()
        and ("shares" not in one or _has_shares(one))
    )


def _has_shares(one: Mapping[str, Any]) -> bool:
    try:
        shares = Shares.loaded(one["shares"])
    except (KeyError, TypeError, ValueError):
        return False
    counts = one["local"].numel(), one["other"].numel()
    return counts == (sum(shares.sent_counts), sum(shares.summed_counts))


def _check_order(name: str, saved: Sequence[Mapping[str, Any]]) -> None:
    """Check that states of ``name`` are those of all ranks of one group, in their order, as far as they say."""
    for place, one in enumerate(saved):
        members = Members.loaded(one)
        if members is not None and (members.rank, members.world_size) != (place, len(saved)):
            raise ArgumentError(
                f"Compression.reshard: states[{place}]: got the state of {name!r} of group rank {members.rank} of "
                f"{members.world_size}; expected that of group rank {place} of {len(saved)}: give the states of all "
                "ranks, in their order"
            )


def _nothing() -> torch.Tensor:
    return empty(0, torch.device("cpu"))


def _loaded(saved: torch.Tensor) -> torch.Tensor:
    """Return a copy as float32, as other programs may have saved it otherwise."""
    return saved.detach().to(torch.float32, copy=True).contiguous()
