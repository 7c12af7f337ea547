"""What each rank does for test_properties.py: calls on tensors that all ranks can derive, compared with a reference.

A *plan* is a dict of plain values that describes one call; all ranks get the same. Nothing but the call under test
travels.
"""

from __future__ import annotations

import atexit
import os
import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from property_reference import assert_reduced, is_defined, operand
from property_tensors import DENSE_LAYOUTS, READ_LAYOUTS, Placed, as_memory, dtype_of, random_bits, same_bits

import comm_orchestrator as dist

__all__ = ["CALLS", "run_program", "start_rank"]

_MOST_GROUPS = 12
#: What messages call it, where a plan's name for a call is not the function's.
_NAMES = {"reduce_scatter_one": "reduce_scatter"}
_TIMEOUT_S = 60.0
# What a backend refuses is in test_ccl.py.
_HAS_TAGS = True

Plan = dict[str, Any]
_groups: dict[tuple[Any, ...], Any] = {}


def start_rank() -> None:
    torch.set_num_threads(1)
    dist.init_distributed(os.environ["PROPERTY_BACKEND"], timeout=_TIMEOUT_S, verbose=False)
    atexit.register(dist.destroy_process_group)


def run_program(plans: list[Plan], seed: int) -> list[bytes | None]:
    """Make every call of a program, then wait for the asynchronous ones in an order of this rank's own.

    Returns:
        For every call whose result is the same on all members, that result's bytes on members, None on others.
    """
    if len(_groups) > _MOST_GROUPS:
        # Here and not later: before a program starts, every rank has ended the one before.
        for group in _groups.values():
            dist.destroy_process_group(group)
        _groups.clear()
    calls = [_Call(plan, number) for number, plan in enumerate(plans)]
    for call in calls:
        call.start()
    shuffled = list(calls)
    random.Random(f"{seed} {dist.get_rank()}").shuffle(shuffled)
    for call in shuffled:
        call.finish()
    return [call.common_result for call in calls]


def _group_of(plan: Plan) -> tuple[Any, list[int]]:
    """The group that a plan describes, and the global ranks in it, in their order."""
    world = list(range(dist.get_world_size()))
    ranks, form = plan["ranks"], plan["form"]
    if ranks is None:
        return (None if form == "none" else dist.get_world_group()), world
    key = (tuple(ranks), form)
    if key not in _groups:
        if form == "members" and dist.get_rank() not in ranks:
            _groups[key] = dist.NON_GROUP_MEMBER
        else:
            _groups[key] = dist.new_group(list(ranks), sort_ranks=form == "sorted")
    return _groups[key], sorted(ranks) if form == "sorted" else list(ranks)


class _Call:
    """One call under test on this rank: its arguments, and what must hold afterwards."""

    def __init__(self, plan: Plan, number: int) -> None:
        self.plan = plan
        self.number = number
        self.group, self.ranks = _group_of(plan["group"])
        self.W = len(self.ranks)
        self.is_member = dist.get_rank() in self.ranks
        # A rank outside the group makes the same call as the first one in it, and nothing must happen.
        self.rank = self.ranks.index(dist.get_rank()) if self.is_member else 0
        self.async_op: bool = plan.get("async_op", False)
        self.read: list[Placed] = []
        self.written: list[Placed] = []
        self.check: Callable[[Any], None] = lambda value: None
        self.outcome: Any = None
        self.common_result: bytes | None = None
        self.refused = False

    def __str__(self) -> str:
        return f"call {self.number}, group rank {self.rank} of {self.ranks}, {self.plan}"

    # --- arguments

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.plan["dtype"])

    @property
    def root(self) -> int:
        return int(self.plan["root"]) % self.W

    def root_argument(self, name: str) -> dict[str, int]:
        if self.plan["by_group_rank"]:
            return {f"group_{name}": self.root}
        return {name: self.ranks[self.root]}

    @property
    def common(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.async_op}

    @property
    def op(self) -> Any:
        """The reduction as the plan spells it."""
        name, spelling = self.plan["op"], self.plan["spelling"]
        if spelling == "ours":
            return dist.ReduceOp[name.upper()]
        if spelling == "torch":
            return getattr(torch.distributed.ReduceOp, name.upper())
        if spelling == "wrapped":
            return torch.distributed.ReduceOp(getattr(torch.distributed.ReduceOp, name.upper()))
        upper = random.Random(spelling)
        return "".join(letter.upper() if upper.random() < 0.5 else letter for letter in name)

    def sources(self, shapes: list[Any], slot: int = 0, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Every rank's input, by its place in the group; this rank's own is what the call gets."""
        return [self._source(rank, slot, shape, dtype).values for rank, shape in enumerate(shapes)]

    def _source(self, rank: int, slot: int, shape: Any, dtype: torch.dtype | None) -> Placed:
        key = self.plan["seed"], rank, slot
        dtype = dtype or self.dtype
        if "op" in self.plan:
            values = operand(shape, dtype, self.plan["op"], self.plan["exact"], *key)
        else:
            values = random_bits(shape, dtype, *key)
        layouts = self.plan.get("layouts")
        if layouts is None:  # written in place: the same layout everywhere
            return Placed(values, DENSE_LAYOUTS[(self.plan["dense"] + slot) % len(DENSE_LAYOUTS)])
        return Placed(values, READ_LAYOUTS[layouts[(rank + slot) % len(layouts)]])

    def input(self, shape: Any, slot: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """This rank's input, which must not change."""
        placed = self._source(self.rank, slot, shape, dtype)
        self.read.append(placed)
        return placed.tensor

    def shared_input(self, output: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """An input that lies where the call will write."""
        with torch.inference_mode():
            output.detach().copy_(values.view(output.shape))
        for placed in self.written:
            placed.remember()
        return output

    def in_place(self, shape: Any, slot: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """This rank's input, to be overwritten."""
        placed = self._source(self.rank, slot, shape, dtype)
        self.written.append(placed)
        return placed.tensor

    def output(self, shape: Any, slot: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor full of something else, to be overwritten."""
        layouts = self.plan["out_layouts"]
        values = random_bits(shape, dtype or self.dtype, "output", self.rank, slot)
        placed = Placed(values, DENSE_LAYOUTS[layouts[(self.rank + slot) % len(layouts)]])
        self.written.append(placed)
        return placed.tensor

    # --- expectations

    def assert_moved(self, found: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
        assert same_bits(found, expected), f"{what} differs from what was sent; {self}"

    def assert_reduced(self, found: torch.Tensor, inputs: list[torch.Tensor]) -> None:
        assert_reduced(found, inputs, self.plan["op"], self.plan["exact"], str(self))

    @property
    def is_refused(self) -> bool:
        if "op" not in self.plan:
            return False
        names = [entry["dtype"] for entry in self.plan["entries"]] if "entries" in self.plan else [self.plan["dtype"]]
        return not all(is_defined(self.plan["op"], dtype_of(name)) for name in names)

    # --- the call

    def start(self) -> None:
        call = CALLS[self.plan["call"]](self)
        if self.is_member and self.is_refused:
            self._start_refused(call)
            return
        self.outcome = call()
        if not self.is_member:
            assert self.outcome in (None, -1, []), f"got {self.outcome!r} outside the group; {self}"
            self._assert_nothing_happened()

    def _start_refused(self, call: Callable[[], Any]) -> None:
        self.refused = True
        with pytest.raises(dist.ArgumentError, match=r"is not defined|not reduced") as refused:
            call()
        assert str(refused.value).startswith(_NAMES.get(self.plan["call"], self.plan["call"])), f"{refused}; {self}"
        self._assert_nothing_happened()

    def _assert_nothing_happened(self) -> None:
        for placed in (*self.read, *self.written):
            placed.assert_untouched(str(self))

    def finish(self) -> None:
        if self.refused or not self.is_member:
            return
        outcome = self.outcome
        if self.async_op:
            outcome = wait_for(outcome, self.plan["wait"], str(self))
        self.check(outcome)
        for placed in self.read:
            placed.assert_untouched(str(self))
        for placed in self.written:
            placed.assert_surroundings_untouched(str(self))


def wait_for(handle: Any, how: str, what: str) -> Any:
    """Wait for a handle in one of the ways there are, and return its ``result()``."""
    if how == "poll":
        end = time.monotonic() + _TIMEOUT_S
        while not handle.is_completed():
            assert time.monotonic() < end, f"is_completed() stays False; {what}"
            time.sleep(0.0002)
        assert handle.exception() is None, what
    elif how == "seconds":
        assert handle.wait(_TIMEOUT_S) is True, what
    elif how == "timedelta":
        assert handle.wait(timeout=timedelta(seconds=_TIMEOUT_S)) is True, what
    elif how == "result":
        handle.result()
    # Waiting again, or at last, changes nothing.
    assert handle.wait() is True, what
    assert handle.is_completed(), what
    assert handle.exception() is None, what
    return handle.result()


def flat_part(tensor: torch.Tensor, first: int, size: int) -> torch.Tensor:
    """Some of a dense tensor's elements, in the order of its memory, sharing it."""
    return tensor.detach().as_strided((size,), (1,), tensor.storage_offset() + first)


# --- every rank holds a tensor of the same shape


def _all_reduce(call: _Call) -> Callable[[], Any]:
    shape = call.plan["shape"]
    tensor = call.in_place(shape)
    inputs = call.sources([shape] * call.W)

    def check(value: Any) -> None:
        call.assert_reduced(tensor, inputs)
        assert value is (tensor if call.async_op else None)
        call.common_result = bytes(as_memory(tensor.detach().contiguous()).numpy())

    call.check = check
    if call.plan["call"] == "inference_all_reduce":
        return lambda: dist.inference_all_reduce(tensor, call.op, call.group)
    if call.plan["seed"] % 2:
        return lambda: dist.all_reduce(tensor, call.op, call.group, call.async_op)
    return lambda: dist.all_reduce(tensor, op=call.op, **call.common)


def _reduce(call: _Call) -> Callable[[], Any]:
    shape = call.plan["shape"]
    tensor = call.in_place(shape)
    inputs = call.sources([shape] * call.W)

    def check(value: Any) -> None:
        if call.rank == call.root:
            call.assert_reduced(tensor, inputs)
        else:
            call.written[0].assert_untouched(f"reduce, not dst; {call}")

    call.check = check
    return lambda: dist.reduce(tensor, op=call.op, **call.root_argument("dst"), **call.common)


def _broadcast(call: _Call) -> Callable[[], Any]:
    shape = call.plan["shape"]
    expected = call.sources([shape] * call.W)[call.root]
    tensor = call.input(shape) if call.rank == call.root else call.output(shape)
    call.check = lambda value: call.assert_moved(tensor, expected)
    return lambda: dist.broadcast(tensor, **call.root_argument("src"), **call.common)


# --- bringing together and handing out


def _even_or_uneven(call: _Call) -> list[Any]:
    shapes = call.plan["shapes"]
    return [shapes[0] if call.plan["even"] else shapes[rank % len(shapes)] for rank in range(call.W)]


def _all_gather(call: _Call) -> Callable[[], Any]:
    shapes = _even_or_uneven(call)
    expected = call.sources(shapes)
    outputs = [call.output(shape, slot) for slot, shape in enumerate(shapes)]
    if call.plan["shared"] is None:
        source = call.input(shapes[call.rank])
    else:
        same_size = [output for output in outputs if output.numel() == expected[call.rank].numel()]
        source = call.shared_input(same_size[call.plan["shared"] % len(same_size)], expected[call.rank])

    def check(value: Any) -> None:
        for rank, (output, values) in enumerate(zip(outputs, expected, strict=True)):
            call.assert_moved(output, values, f"entry {rank}")

    call.check = check
    return lambda: dist.all_gather(outputs, source, **call.common)


def _all_gather_one(call: _Call) -> Callable[[], Any]:
    shape = call.plan["shape"]
    expected = call.sources([shape] * call.W)
    source = call.input(shape)

    def check(value: Any) -> None:
        assert [tuple(part.shape) for part in value] == [tuple(shape)] * call.W, call
        for rank, (output, values) in enumerate(zip(value, expected, strict=True)):
            call.assert_moved(output, values, f"entry {rank}")

    call.check = check
    if call.plan["seed"] % 2:
        return lambda: dist.all_gather(source, call.group, async_op=call.async_op)
    return lambda: dist.all_gather(source, **call.common)


def _all_gather_into_tensor(call: _Call) -> Callable[[], Any]:
    shape = call.plan["shape"]
    expected = call.sources([shape] * call.W)
    stacked = (call.W, *shape)
    joined = (call.W * shape[0], *shape[1:]) if shape else (call.W,)
    if call.plan["shared"] is None:
        source = call.input(shape)
        output = call.output(joined if call.plan["even"] else stacked)
    else:
        output = call.output(stacked)
        source = call.shared_input(output[call.plan["shared"] % call.W], expected[call.rank])
    call.check = lambda value: call.assert_moved(output, torch.cat([values.reshape(-1) for values in expected]))
    if call.plan["seed"] % 2:
        return lambda: dist.all_gather_into_tensor(output=output, input=source, **call.common)
    return lambda: dist.all_gather_into_tensor(output, source, **call.common)


def _gather(call: _Call) -> Callable[[], Any]:
    shape = call.plan["shape"]
    expected = call.sources([shape] * call.W)
    is_root = call.rank == call.root
    outputs = [call.output(shape, slot) for slot in range(call.W)] if is_root else None
    if outputs is None or call.plan["shared"] is None:
        source = call.input(shape)
    else:
        source = call.shared_input(outputs[call.plan["shared"] % call.W], expected[call.rank])

    def check(value: Any) -> None:
        for rank, values in enumerate(expected if outputs else ()):
            assert outputs is not None
            call.assert_moved(outputs[rank], values, f"entry {rank}")

    call.check = check
    return lambda: dist.gather(source, outputs, **call.root_argument("dst"), **call.common)


def _scatter(call: _Call) -> Callable[[], Any]:
    shape = call.plan["shape"]
    # What the root holds for each rank: the root's inputs in as many slots.
    expected = [call._source(call.root, slot, shape, None).values for slot in range(call.W)]
    sources = [call.input(shape, slot) for slot in range(call.W)] if call.rank == call.root else None
    output = call.output(shape)
    if sources is not None and call.plan["shared"] is not None:
        slot = call.plan["shared"] % call.W
        del call.read[slot]
        sources[slot] = call.shared_input(output, expected[slot])
    call.check = lambda value: call.assert_moved(output, expected[call.rank])
    return lambda: dist.scatter(output, sources, **call.root_argument("src"), **call.common)


# --- every rank ends with a part


def _reduce_scatter(call: _Call) -> Callable[[], Any]:
    shapes = _even_or_uneven(call)
    mine = shapes[call.rank]
    inputs = [call._source(rank, call.rank, mine, None).values for rank in range(call.W)]
    sources = [call.input(shape, slot) for slot, shape in enumerate(shapes)]
    output = call.output(mine)
    if call.plan["shared"] is not None:
        same_size = [slot for slot, source in enumerate(sources) if source.numel() == output.numel()]
        slot = same_size[call.plan["shared"] % len(same_size)]
        values = call._source(call.rank, slot, shapes[slot], None).values
        del call.read[slot]
        sources[slot] = call.shared_input(output, values)
    call.check = lambda value: call.assert_reduced(output, inputs)
    return lambda: dist.reduce_scatter(output, sources, call.op, **call.common)


def _reduce_scatter_tensor(call: _Call) -> Callable[[], Any]:
    shape = call.plan["shape"]
    whole = (call.W * shape[0], *shape[1:]) if shape else (call.W,)
    inputs = call.sources([whole] * call.W)
    part = slice(call.rank * inputs[0].numel() // call.W, (call.rank + 1) * inputs[0].numel() // call.W)
    if call.plan["shared"] is None:
        source, output = call.input(whole), call.output(shape)
    else:
        source = call.output(whole)
        call.shared_input(source, inputs[call.rank])
        size = inputs[0].numel() // call.W
        first = call.plan["shared"] % call.W * size
        output = flat_part(source, first, size).view(shape)
        call.written[-1].tensor = output  # the rest of the input is only read
    call.check = lambda value: call.assert_reduced(output, [values.view(-1)[part] for values in inputs])
    if call.plan["call"] == "reduce_scatter_one":
        return lambda: dist.reduce_scatter(output, source, call.op, **call.common)
    return lambda: dist.reduce_scatter_tensor(output, source, call.op, **call.common)


def _all_to_all(call: _Call) -> Callable[[], Any]:
    sizes = call.plan["sizes"]
    trailing = call.plan["trailing"]
    shapes = [[(sizes[sender][receiver], *trailing) for receiver in range(call.W)] for sender in range(call.W)]
    expected = [call._source(sender, call.rank, shapes[sender][call.rank], None).values for sender in range(call.W)]
    sources = [call.input(shape, slot) for slot, shape in enumerate(shapes[call.rank])]
    outputs = [call.output(shapes[sender][call.rank], sender) for sender in range(call.W)]

    def check(value: Any) -> None:
        for sender, (output, values) in enumerate(zip(outputs, expected, strict=True)):
            call.assert_moved(output, values, f"entry {sender}")

    call.check = check
    return lambda: dist.all_to_all(outputs, sources, **call.common)


def _all_to_all_single(call: _Call) -> Callable[[], Any]:
    trailing = call.plan["trailing"]
    if call.plan["even"]:
        rows = [[call.plan["sizes"][0][0]] * call.W for _ in range(call.W)]
    else:
        rows = [list(call.plan["sizes"][sender][: call.W]) for sender in range(call.W)]
    inputs = call.sources([(sum(counts), *trailing) for counts in rows])
    starts = [sum(counts[: call.rank]) for counts in rows]
    mine = [counts[call.rank] for counts in rows]
    expected = torch.cat(
        [values[first : first + count] for values, first, count in zip(inputs, starts, mine, strict=True)]
    )
    output = call.output((sum(mine), *trailing))
    if call.plan["shared"] is not None and sum(mine) == sum(rows[call.rank]):
        source = call.shared_input(output, inputs[call.rank])
    else:
        source = call.input((sum(rows[call.rank]), *trailing))
    call.check = lambda value: call.assert_moved(output, expected)
    if call.plan["even"] and call.plan["seed"] % 2:
        return lambda: dist.all_to_all_single(output, source, **call.common)
    return lambda: dist.all_to_all_single(output, source, mine, rows[call.rank], **call.common)


# --- many tensors


def _all_reduce_coalesced(call: _Call) -> Callable[[], Any]:
    entries = [(slot, entry["shape"], dtype_of(entry["dtype"])) for slot, entry in enumerate(call.plan["entries"])]
    inputs = [call.sources([shape] * call.W, slot, dtype) for slot, shape, dtype in entries]
    tensors = [call.in_place(shape, slot, dtype) for slot, shape, dtype in entries]

    def check(value: Any) -> None:
        for tensor, values in zip(tensors, inputs, strict=True):
            call.assert_reduced(tensor, values)
        call.common_result = b"".join(bytes(as_memory(tensor.detach().contiguous()).numpy()) for tensor in tensors)

    call.check = check
    return lambda: dist.all_reduce_coalesced(tensors, call.op, **call.common)


def _all_gather_coalesced(call: _Call) -> Callable[[], Any]:
    entries = [(slot, entry["shape"], dtype_of(entry["dtype"])) for slot, entry in enumerate(call.plan["entries"])]
    expected = [call.sources([shape] * call.W, slot, dtype) for slot, shape, dtype in entries]
    sources = [call.input(shape, slot, dtype) for slot, shape, dtype in entries]
    outputs: list[Any] = [
        call.output((call.W, *shape), slot, dtype)
        if call.plan["entries"][slot]["one"]
        else [call.output(shape, slot + rank, dtype) for rank in range(call.W)]
        for slot, shape, dtype in entries
    ]

    def check(value: Any) -> None:
        for slot, (output, values) in enumerate(zip(outputs, expected, strict=True)):
            for rank in range(call.W):
                call.assert_moved(output[rank], values[rank], f"entry {slot} of rank {rank}")

    call.check = check
    only_lists = all(isinstance(output, list) for output in outputs)
    given = [list(row) for row in zip(*outputs, strict=True)] if only_lists else outputs
    return lambda: dist.all_gather_coalesced(given, sources, **call.common)


def _reduce_scatter_coalesced(call: _Call) -> Callable[[], Any]:
    entries = [(slot, entry["shape"], dtype_of(entry["dtype"])) for slot, entry in enumerate(call.plan["entries"])]
    inputs = [call.sources([shape] * call.W, slot, dtype) for slot, shape, dtype in entries]
    sources = [call.input(shape, slot, dtype) for slot, shape, dtype in entries]

    def check(value: Any) -> None:
        assert len(value) == len(entries), call
        for found, values in zip(value, inputs, strict=True):
            size = -(-values[0].numel() // call.W)
            part = slice(call.rank * size, (call.rank + 1) * size)
            call.assert_reduced(found, [whole.view(-1)[part] for whole in values])

    call.check = check
    if call.plan["op"] == "avg":  # the default, as in DeepSpeed
        return lambda: dist.reduce_scatter_coalesced(sources, call.group, async_op=call.async_op)
    return lambda: dist.reduce_scatter_coalesced(sources, call.group, call.op, call.async_op)


# --- messages


def _messages(call: _Call) -> Callable[[], Any]:
    """Every message of a list, by whoever takes part in it, in one of the ways to send and receive."""
    if call.W == 1:
        return lambda: None
    parts = []
    for slot, message in enumerate(call.plan["messages"]):
        sender = message["sender"] % call.W
        receiver = (sender + 1 + message["distance"] % (call.W - 1)) % call.W
        dtype = dtype_of(message["dtype"])
        # A receiver of messages from anyone needs tags to tell them apart.
        anyone = message["anyone"] and _HAS_TAGS
        tag = 1 + call.number * 100 + slot if _HAS_TAGS and (message["tagged"] or anyone) else 0
        expected = call._source(sender, slot, message["shape"], dtype).values
        if call.rank == sender:
            parts.append(("send", call.input(message["shape"], slot, dtype), receiver, tag, False, expected))
        elif call.rank == receiver:
            parts.append(("recv", call.output(message["shape"], slot, dtype), sender, tag, anyone, expected))
    how = call.plan["how"]
    handles: list[Any] = []

    def check(value: Any) -> None:
        for handle in handles:
            wait_for(handle, call.plan["wait"], str(call))
        for kind, tensor, _, _, _, expected in parts:
            if kind == "recv":
                call.assert_moved(tensor, expected, "message")

    call.check = check
    if how in ("batch", "torch batch"):
        return lambda: handles.extend(_batch(call, parts) if parts else [])
    return lambda: handles.extend(_one_by_one(call, how, parts))


def _peer(call: _Call, name: str, position: int) -> dict[str, int]:
    if call.plan["by_group_rank"]:
        return {f"group_{name}": position}
    return {name: call.ranks[position]}


def _one_by_one(call: _Call, how: str, parts: list[Any]) -> list[Any]:
    handles = []
    for kind, tensor, peer, tag, anyone, _ in parts:
        arguments: dict[str, Any] = {"group": call.group, "tag": tag}
        if not anyone:
            arguments |= _peer(call, "dst" if kind == "send" else "src", peer)
        if how == "blocking":
            outcome = getattr(dist, kind)(tensor, **arguments)
            wanted = None if kind == "send" else call.ranks[peer] if call.is_member else -1
            assert outcome == wanted, f"{kind} returned {outcome!r}, expected {wanted!r}; {call}"
            continue
        if how == "async_op":
            handles.append(getattr(dist, kind)(tensor, async_op=True, **arguments))
        else:
            handles.append(getattr(dist, f"i{kind}")(tensor, **arguments))
    return [handle for handle in handles if handle is not None]


def _batch(call: _Call, parts: list[Any]) -> list[Any]:
    made = []
    for kind, tensor, peer, tag, _, _ in parts:
        if call.plan["how"] == "torch batch" and call.is_member:
            function = getattr(torch.distributed, f"i{kind}")
            made.append(torch.distributed.P2POp(function, tensor, call.ranks[peer], call.group, tag))
        else:
            peers = {key.replace("dst", "peer"): value for key, value in _peer(call, "dst", peer).items()}
            made.append(dist.P2POp(getattr(dist, f"i{kind}"), tensor, group=call.group, tag=tag, **peers))
    handles: list[Any] = dist.batch_isend_irecv(made)
    assert call.is_member or handles == [], call
    return handles


#: By the name that a plan has for it; the last part of a name may tell forms of one call apart.
CALLS: dict[str, Callable[[_Call], Callable[[], Any]]] = {
    "all_reduce": _all_reduce,
    "inference_all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_one": _all_gather_one,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_one": _reduce_scatter_tensor,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "all_gather_coalesced": _all_gather_coalesced,
    "reduce_scatter_coalesced": _reduce_scatter_coalesced,
    "messages": _messages,
}
