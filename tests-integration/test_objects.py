"""Python objects between processes, on gloo."""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import numpy
import pytest
import torch
import torch.distributed as c10d
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import comm_orchestrator as dist
from comm_collectives.object_codec import (
    ObjectDecodeError,
    ObjectExchangeError,
    encode_object,
    object_policy,
    set_object_policy,
)
from comm_collectives.objects import channel as transport
from comm_collectives.objects.agreement import record_of
from comm_collectives.objects.channel import INLINE_BYTES, Channel
from comm_utils.active import active_backend
from comm_utils.errors import ArgumentError, ArgumentTypeError, CollectiveMismatchError, CommError
from comm_utils.testing import RankPool, per_rank, run_ranks

Pools: TypeAlias = Callable[[int], RankPool]

PROMPTLY_S = 20.0


@dist.register_object_type
@dataclasses.dataclass
class Part:
    rank: int
    weights: Any


def part(rank: int) -> Any:
    return {
        "part": Part(rank, torch.full((rank, 3), float(rank), dtype=torch.bfloat16)),
        "ids": numpy.arange(rank),
        "losses": [0.5] * rank,
        (rank, "key"): {None, 2**100},
    }


def plain(value: Any) -> Any:
    """What a pool can hand back and a test can compare."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, Part):
        return value.rank, value.weights.dtype, value.weights.tolist()
    return value.tolist() if isinstance(value, numpy.ndarray) else value


def outcome(call: Callable[[], Any]) -> Any:
    """The value, or the error's class and text; in both cases within seconds, and the group works afterwards."""
    start = time.monotonic()
    try:
        result = call()
    except CommError as error:
        result = type(error).__name__, str(error)
    assert time.monotonic() - start < PROMPTLY_S
    assert dist.allgather_object(dist.get_rank()) == list(range(dist.get_world_size()))
    return result


def names(outcomes: list[Any]) -> list[Any]:
    return [one[0] if isinstance(one, tuple) else one for one in outcomes]


# --- what arrives


def everything() -> None:
    W, rank = dist.get_world_size(), dist.get_rank()
    expected = [plain(part(r)) for r in range(W)]
    collected = [None] * W
    dist.all_gather_object(collected, part(rank))
    assert [plain(one) for one in collected] == expected
    assert [plain(one) for one in dist.allgather_object(part(rank))] == expected
    for root in range(W):
        collected = [None] * W if rank == root else None
        dist.gather_object(part(rank), collected, dst=root)
        assert collected is None or [plain(one) for one in collected] == expected
        shared = [part(7), None] if rank == root else [None, "overwritten"]
        dist.broadcast_object_list(shared, src=root)
        assert [plain(one) for one in shared] == [plain(part(7)), None]
        assert plain(dist.broadcast_object(part(root), root)) == plain(part(root))
        mine = [None]
        dist.scatter_object_list(mine, [part(r) for r in range(W)] if rank == root else None, src=root)
        assert plain(mine[0]) == expected[rank]
        total = dist.reduce_object(torch.full((2,), rank, dtype=torch.int16), root)
        assert (total is None) == (rank != root)
        assert total is None or total.tolist() == [sum(range(W))] * 2
        joined = dist.reduce_object([rank], root, lambda a, b: a + b)
        assert joined == (list(range(W)) if rank == root else None)


@pytest.mark.parametrize("W", [1, 2, 3, 4])
def test_every_call(pools: Pools, W: int) -> None:
    pools(W).run(everything)


def observed() -> None:
    dist.configure(enabled=True)
    try:
        everything()
    finally:
        dist.configure(enabled=False)
        dist.reset_log()


def test_every_call_while_it_is_observed(pools: Pools) -> None:
    pools(3).run(observed)


def gathered(objects: list[Any]) -> list[Any]:
    return dist.allgather_object(objects[dist.get_rank()])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)


@given(objects=st.lists(values, min_size=3, max_size=3))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_objects(pools: Pools, objects: list[Any]) -> None:
    assert pools(3).run(gathered, objects) == [objects] * 3


def very_different_sizes() -> None:
    W, rank = dist.get_world_size(), dist.get_rank()
    size = 5_000_000 if rank == 1 else rank
    for collected in (dist.allgather_object(torch.full((size,), rank, dtype=torch.uint8)), gather_on_last(size)):
        if collected is not None:
            assert [len(one) for one in collected] == [5_000_000 if r == 1 else r for r in range(W)]
            assert all(bool((one == r).all()) for r, one in enumerate(collected))
    mine = [None]
    dist.scatter_object_list(mine, [b"x" * (10 ** (2 * r)) for r in range(W)] if rank == 1 else None, 1)
    assert len(mine[0]) == 10 ** (2 * rank)  # type: ignore[arg-type]


def gather_on_last(size: int) -> Any:
    W, rank = dist.get_world_size(), dist.get_rank()
    collected = [None] * W if rank == W - 1 else None
    dist.gather_object(torch.full((size,), rank, dtype=torch.uint8), collected, dst=W - 1)
    return collected


def test_very_different_sizes(pools: Pools) -> None:
    pools(4).run(very_different_sizes)


def as_torch_does() -> None:
    W, rank = dist.get_world_size(), dist.get_rank()
    value = {"rank": rank, "tensor": [1, 2, (3.5, "x")], "text": "ü" * rank}
    ours, theirs = [None] * W, [None] * W
    dist.all_gather_object(ours, value)
    c10d.all_gather_object(theirs, value)
    assert ours == theirs
    ours, theirs = [value, 1], [value, 1]
    dist.broadcast_object_list(ours, 1)
    c10d.broadcast_object_list(theirs, 1)
    assert ours == theirs
    ours, theirs = [None], [None]
    parts = [value, 1, None][:W] if rank == 0 else None
    dist.scatter_object_list(ours, parts)
    c10d.scatter_object_list(theirs, parts)
    assert ours == theirs


def test_results_are_those_of_torch_distributed(pools: Pools) -> None:
    pools(3).run(as_torch_does)


# --- groups


def in_a_group() -> Any:
    rank = dist.get_rank()
    group = dist.new_group([1, 3])
    collected = ["untouched"] * 2
    dist.all_gather_object(collected, rank, group)
    shared = [rank]
    dist.broadcast_object_list(shared, src=3, group=group)
    by_group_rank = [rank]
    dist.broadcast_object_list(by_group_rank, group=group, group_src=0)
    reduced = dist.reduce_object(rank, 3, "sum", group)
    received = [None]
    if rank == 1:
        dist.send_object_list(["hello"], group=group, group_dst=1)
    elif rank == 3:
        assert dist.recv_object_list(received, group=group) == 1
    else:
        assert dist.recv_object_list(received, 1, group) == -1
    dist.destroy_process_group(group)
    return collected, shared, by_group_rank, reduced, received


def test_groups_and_their_ranks(pools: Pools) -> None:
    outside = [(["untouched"] * 2, [rank], [rank], None, [None]) for rank in (0, 2)]
    assert pools(4).run(in_a_group) == [
        outside[0],
        ([1, 3], [3], [1], None, [None]),
        outside[1],
        ([1, 3], [3], [1], 4, ["hello"]),
    ]


# --- point to point


def ring(use_batch: bool) -> Any:
    W, rank = dist.get_world_size(), dist.get_rank()
    received = [None, None]
    for sender in range(W):
        if rank == sender:
            dist.send_object_list([rank, "x" * rank * 100_000], (rank + 1) % W, use_batch=use_batch)
        elif rank == (sender + 1) % W:
            assert dist.recv_object_list(received, sender, use_batch=use_batch) == sender
    return received[0], len(received[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("use_batch", [False, True])
@pytest.mark.parametrize("W", [2, 3])
def test_a_ring(pools: Pools, W: int, use_batch: bool) -> None:
    assert pools(W).run(ring, use_batch) == [((rank - 1) % W, (rank - 1) % W * 100_000) for rank in range(W)]


def beside_a_tensor() -> Any:
    if dist.get_rank() == 0:
        dist.send_object_list(["object"], 1)
        return dist.send(torch.ones(3), 1)
    tensor = torch.zeros(3)
    work = dist.irecv(tensor, 0)
    received = [None]
    dist.recv_object_list(received, 0)
    work.wait()
    return received, tensor.tolist()


def test_an_object_does_not_meet_a_tensor_that_is_waited_for(pools: Pools) -> None:
    assert pools(2).run(beside_a_tensor)[1] == (["object"], [1, 1, 1])


def whoever_sends_first() -> Any:
    if dist.get_rank():
        return dist.send_object_list([dist.get_rank()], 0)
    received = [[None], [None]]
    sources = [dist.recv_object_list(one) for one in received]
    assert [[source] for source in sources] == received
    return sorted(sources)


def test_receiving_from_whoever_sends_first(pools: Pools) -> None:
    assert pools(3).run(whoever_sends_first)[0] == [1, 2]


# --- objects that cannot be sent, or are not accepted


def call_with(call: str, value: Any, **options: Any) -> Any:
    """A call in which rank 1 sends ``value`` and, where there is one, is the root."""
    W, rank = dist.get_world_size(), dist.get_rank()
    mine = value if rank == 1 else rank
    calls: dict[str, Callable[[], Any]] = {
        "all_gather_object": lambda: dist.all_gather_object([None] * W, mine, **options),
        "allgather_object": lambda: dist.allgather_object(mine, **options) and None,
        "gather_object": lambda: dist.gather_object(mine, [None] * W if rank == 2 else None, 2, **options),
        "reduce_object": lambda: dist.reduce_object(mine, 2, lambda a, b: None, **options),
        "broadcast_object": lambda: dist.broadcast_object(mine, 1, **options) and None,
        "broadcast_object_list": lambda: dist.broadcast_object_list([mine], 1, **options),
        "scatter_object_list": lambda: dist.scatter_object_list(
            [None], [0, 0, value] if rank == 1 else None, 1, **options
        ),
    }
    return outcome(calls[call])


CALLS = [
    "all_gather_object",
    "allgather_object",
    "gather_object",
    "reduce_object",
    "broadcast_object",
    "broadcast_object_list",
    "scatter_object_list",
]
# For errors that the packages' own tests raise in every call.
ONE_OF_EACH_WAY = ["all_gather_object", "scatter_object_list"]


@pytest.mark.parametrize("call", ONE_OF_EACH_WAY)
def test_every_rank_raises_at_once_where_one_cannot_send(pools: Pools, call: str) -> None:
    outcomes = pools(3).run(call_with, call, {"model": [Fraction(1, 2)]})
    assert names(outcomes) == ["ObjectExchangeError", "ArgumentTypeError", "ObjectExchangeError"]
    for remedy in ("['model'][0]: got a value of type fractions.Fraction", "allow_pickle=True", "register_object_type"):
        assert remedy in outcomes[1][1]
    assert f"{call}: rank 1 could not send" in outcomes[2][1]


def call_with_pickle(call: str, allow: list[bool]) -> Any:
    return call_with(call, Fraction(1, 2), allow_pickle=allow[dist.get_rank()])


@pytest.mark.parametrize("call", ONE_OF_EACH_WAY)
def test_every_rank_raises_at_once_where_one_does_not_unpickle(pools: Pools, call: str) -> None:
    outcomes = pools(3).run(call_with_pickle, call, [True, True, False])
    assert names(outcomes) == ["ObjectExchangeError", "ObjectExchangeError", "ObjectDecodeError"]
    assert "rank 1 sends a pickled object" in outcomes[2][1]
    assert pools(3).run(call_with_pickle, call, [True] * 3) == [None] * 3


def with_limits(call: str, limits: list[int]) -> Any:
    before = object_policy()
    set_object_policy(max_bytes=limits[dist.get_rank()])
    try:
        return call_with(call, b"x" * 5000)
    finally:
        set_object_policy(before.allow_pickle, before.max_bytes)


@pytest.mark.parametrize("call", CALLS)
def test_every_rank_raises_at_once_where_an_object_is_too_large(pools: Pools, call: str) -> None:
    outcomes = pools(3).run(with_limits, call, [10_000, 10_000, 4000])
    assert names(outcomes) == ["ObjectExchangeError", "ObjectExchangeError", "ObjectDecodeError"]
    assert "at most 4000 are accepted (configuration key objects.max_bytes" in outcomes[2][1]
    outcomes = pools(3).run(with_limits, call, [10_000, 4000, 10_000])
    assert names(outcomes) == ["ObjectExchangeError", "ArgumentError", "ObjectExchangeError"]


# --- peers that lie


class Harmful:
    """Unpickling it writes a file."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def hostile(call: str, message: bytes, size: int | None = None) -> Any:
    """Rank 0 takes part in ``call`` by hand with ``message``, which it says to be encoded and of ``size`` bytes."""

    def exchange() -> Any:
        if dist.get_rank():
            return dist.broadcast_object(None, 0) if call == "broadcast_object" else dist.allgather_object(0)
        channel = Channel(call, active_backend(), None)
        root = 0 if call == "broadcast_object" else -1
        number, *_, max_bytes = record_of(call, root, 0, [], False)
        announced = len(message) if size is None else size
        offers = channel.exchange([number, root, 0, announced, 0, max_bytes], message)
        if size is not None or len(message) <= INLINE_BYTES:
            return None
        if call == "broadcast_object":
            return channel.broadcast(bytearray(message), 0, 0) and None
        return channel.all_gather(bytearray(message), [numbers[3] for numbers, _ in offers]) and None

    return outcome(exchange)


@pytest.mark.parametrize("pad", [b"", b"x" * 500], ids=["small", "large"])
@pytest.mark.parametrize("call", ["broadcast_object", "allgather_object"])
def test_hostile_messages_are_refused_and_the_group_stays_usable(
    pools: Pools, call: str, pad: bytes, tmp_path: Path
) -> None:
    target = tmp_path / "harm"
    harmful = [pad, Harmful(str(target))]
    whole = bytes(encode_object({"a": [1, 2, 3], "pad": pad, "t": torch.ones(9)}))
    cases = {
        "unpickling lets the sender run any code here": bytes(encode_object(harmful, allow_pickle=True)),
        "does not begin with the header of an object": pickle.dumps(harmful) + b"\0" * 16,
        "bytes are due": whole[:-4],
        "left over": whole + b"\0",
    }
    for reason, message in cases.items():
        assert (len(message) > INLINE_BYTES) == bool(pad)
        outcomes = pools(3).run(hostile, call, message)
        assert names(outcomes) == [None, "ObjectDecodeError", "ObjectDecodeError"]
        assert reason in outcomes[1][1]
        assert "the object of rank 0 cannot be decoded" in outcomes[1][1]
    for size in (1 << 45, 3):
        outcomes = pools(3).run(hostile, call, b"", size)
        assert names(outcomes) == [None, "ObjectDecodeError", "ObjectDecodeError"]
    assert not target.exists()


# --- settings


def exchange_a_fraction(config: Any) -> Any:
    dist.init_distributed(dist_backend="gloo", verbose=False, config=config)
    try:
        return dist.allgather_object(Fraction(1, 2))
    except CommError as error:
        return type(error).__name__
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("env", "config", "expected"),
    [
        ({}, None, ["ArgumentTypeError"] * 2),
        ({"COMM_OBJECTS__ALLOW_PICKLE": "1"}, None, [[Fraction(1, 2)] * 2] * 2),
        ({}, {"objects": {"allow_pickle": True}}, [[Fraction(1, 2)] * 2] * 2),
        (
            {"COMM_OBJECTS__ALLOW_PICKLE": per_rank(["1", "0"])},
            None,
            ["ObjectExchangeError", "ArgumentTypeError"],
        ),
        ({"COMM_OBJECTS__MAX_BYTES": "10"}, {"objects": {"allow_pickle": True}}, ["ArgumentError"] * 2),
    ],
    ids=["default", "environment", "configuration", "one rank", "size"],
)
def test_settings(rank_environment: dict[str, Any], env: dict[str, Any], config: Any, expected: list[Any]) -> None:
    assert run_ranks(exchange_a_fraction, 2, config, env={**rank_environment, **env}) == expected


def run_out_of_memory(call: str) -> tuple[str, str, float]:
    dist.init_distributed(dist_backend="gloo", verbose=False)
    text = "x" * 5000
    inbox = transport.Inbox
    calls: dict[str, Callable[[], Any]] = {
        "allgather_object": lambda: dist.allgather_object(text),
        "gather_object": lambda: dist.gather_object(text, [None] * 2 if dist.get_rank() == 1 else None, 1),
        "broadcast_object": lambda: dist.broadcast_object(text, 0),
    }

    def no_memory(size_bytes: int, device: torch.device) -> transport.Inbox:
        if size_bytes >= len(text):
            raise MemoryError("none left")
        return inbox(size_bytes, device)

    if dist.get_rank() == 1:
        transport.Inbox = no_memory  # type: ignore[assignment, misc]
    found = []
    began = time.monotonic()
    for next_call in (calls[call], dist.barrier):
        try:
            next_call()
        except dist.CommError as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("fine")
    took_s = time.monotonic() - began
    dist.destroy_process_group()
    return found[0], found[1], took_s


@pytest.mark.parametrize("call", ["allgather_object", "gather_object", "broadcast_object"])
def test_a_rank_without_memory_breaks_the_group_at_once(rank_environment: dict[str, Any], call: str) -> None:
    found = run_ranks(run_out_of_memory, 2, call, timeout_s=120, env=rank_environment)
    (sender, sender_later, took_s), (receiver, later, _) = found
    assert receiver.startswith(f"BrokenGroupError: {call}: the delivery of objects raised MemoryError: none left")
    assert later.startswith("BrokenGroupError")
    # Where the library buffers what it sends, the next call is the first to fail.
    assert f"rank 1 gave up in {call}" in f"{sender}\n{sender_later}"
    assert took_s < 60


def test_errors_are_what_callers_catch() -> None:
    assert issubclass(ArgumentTypeError, TypeError)
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(ObjectDecodeError, ValueError)
    assert issubclass(ObjectExchangeError, RuntimeError)
    assert issubclass(CollectiveMismatchError, RuntimeError)
