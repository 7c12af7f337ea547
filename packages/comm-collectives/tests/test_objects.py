"""Objects between ranks that are threads of this process: the exchange itself, without a library below it.

``tests-integration/test_objects.py`` has the same calls on real processes.
"""

from __future__ import annotations

import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import GroupMember

from comm_collectives import objects
from comm_collectives.object_codec import (
    ObjectDecodeError,
    ObjectExchangeError,
    encode_object,
    set_object_policy,
)
from comm_collectives.objects.agreement import record_of
from comm_collectives.objects.channel import INLINE_BYTES, Channel
from comm_collectives.work import Completed
from comm_utils.active import activate, active_backend, deactivate
from comm_utils.backend import Capabilities
from comm_utils.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectiveMismatchError,
    CommError,
    NotInitializedError,
)
from comm_utils.reduce_op import ReduceOp

HANG_S = 20.0


class Threads:
    """A backend whose ranks are threads. A rank that is left waiting raises ``BrokenBarrierError``."""

    def __init__(self, W: int, capabilities: Capabilities, ranks: list[int] | None = None) -> None:
        self.W = W
        self._capabilities = capabilities
        self._ranks = ranks or list(range(W))
        self._me = threading.local()
        self._barrier = threading.Barrier(W, timeout=HANG_S)
        self._slots: list[Any] = [None] * W
        self._queues: dict[Any, SimpleQueue[Any]] = defaultdict(SimpleQueue)
        self.calls: list[str] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(rank, *args)`` returns on every rank; an error of ours counts as a value."""

        def on_rank(rank: int) -> Any:
            self._me.rank = rank
            try:
                return function(rank, *args)
            except (CommError, ZeroDivisionError) as error:
                return error

        self._barrier.reset()
        with ThreadPoolExecutor(self.W) as pool:
            return list(pool.map(on_rank, range(self.W)))

    def check_group(self, group: Any = None) -> None:
        pass

    def during(self, call: str, timeout: Any = None) -> Threads:
        return self

    def get_backend(self, group: Any = None) -> str:
        return "threads"

    def get_rank(self, group: Any = None) -> int:
        rank: int = self._me.rank
        return rank

    def get_world_size(self, group: Any = None) -> int:
        return self.W

    def get_process_group_ranks(self, group: Any = None) -> list[int]:
        return list(self._ranks)

    def device_types(self, group: Any = None) -> tuple[str, ...]:
        return ("cpu",)

    def capabilities(self, group: Any = None, device_type: str = "cpu") -> Capabilities:
        return self._capabilities

    def _exchange(self, name: str, value: Any) -> list[Any]:
        self.calls.append(name)
        self._slots[self._me.rank] = value
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found

    def _moved(self, *tensors: torch.Tensor) -> None:
        assert all(tensor.dtype in self._capabilities.dtypes and tensor.dim() == 1 for tensor in tensors)

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, group: Any = None) -> None:
        self._moved(output, input)
        output.copy_(torch.cat(self._exchange("all_gather_into_tensor", input.clone())))

    def broadcast(self, tensor: torch.Tensor, src: Any, group: Any, async_op: bool, group_src: int) -> Any:
        self._moved(tensor)
        sent = self._exchange("broadcast", tensor.clone() if self._me.rank == group_src else None)[group_src]
        assert sent.numel() == tensor.numel()
        tensor.copy_(sent)
        return Completed(tensor) if async_op else None

    def scatter(self, tensor: torch.Tensor, parts: Any, src: Any, group: Any, async_op: bool, group_src: int) -> None:
        tensor.copy_(self._exchange("scatter", parts)[group_src][self._me.rank])

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, out: list[int], split: list[int], group: Any = None
    ) -> None:
        self._moved(output, input)
        assert sum(split) == input.numel()
        parts = [part[self._me.rank] for part in self._exchange("all_to_all_single", input.clone().split(split))]
        assert [part.numel() for part in parts] == out
        output.copy_(torch.cat(parts))

    def isend(self, tensor: torch.Tensor, dst: Any, group: Any, tag: int, group_dst: int) -> Completed:
        assert self._capabilities.tags or tag == 0
        self._queues[group_dst, tag, self._me.rank].put(tensor.clone())
        self._queues[group_dst, tag, None].put(self._me.rank)
        return Completed()

    def recv(self, tensor: torch.Tensor, src: Any, group: Any, tag: int, group_src: int | None) -> int:
        source = self._queues[self._me.rank, tag, None].get(timeout=HANG_S) if group_src is None else group_src
        tensor.copy_(self._queues[self._me.rank, tag, source].get(timeout=HANG_S))
        return self._ranks[source]


GLOO = Capabilities(frozenset(), frozenset((torch.uint8, torch.int64)), frozenset(), any_source=True, tags=True)
BYTES_ONLY = Capabilities(frozenset(), frozenset((torch.uint8,)), frozenset())


@pytest.fixture(autouse=True)
def _policy() -> Iterator[None]:
    yield
    set_object_policy()
    deactivate()


def threads(W: int, capabilities: Capabilities = GLOO, ranks: list[int] | None = None) -> Threads:
    backend = Threads(W, capabilities, ranks)
    activate(backend)  # type: ignore[arg-type]
    return backend


def kinds(outcomes: list[Any]) -> list[str]:
    return [type(outcome).__name__ for outcome in outcomes]


def still_works(backend: Threads) -> None:
    assert backend.run(lambda rank: objects.allgather_object(rank)) == [list(range(backend.W))] * backend.W


@pytest.fixture(params=[GLOO, BYTES_ONLY], ids=["gloo", "bytes_only"])
def capabilities(request: pytest.FixtureRequest) -> Any:
    return request.param


# --- what arrives


@pytest.mark.parametrize("W", [1, 2, 4])
def test_all_gather(W: int, capabilities: Capabilities) -> None:
    def on_rank(rank: int) -> Any:
        collected = [None] * W
        objects.all_gather_object(collected, {"rank": rank, "text": "x" * rank})
        return collected, objects.allgather_object(rank)

    expected = [{"rank": rank, "text": "x" * rank} for rank in range(W)]
    assert threads(W, capabilities).run(on_rank) == [(expected, list(range(W)))] * W


@given(st.lists(st.integers(0, 3_000_000), min_size=2, max_size=3))
@settings(max_examples=15, deadline=None)
def test_all_gather_of_very_different_sizes(sizes: list[int]) -> None:
    outcomes = threads(len(sizes)).run(lambda rank: list(map(len, objects.allgather_object(b"x" * sizes[rank]))))
    assert outcomes == [sizes] * len(sizes)


def test_a_large_object_does_not_pad_the_others() -> None:
    backend = threads(3)
    backend.run(lambda rank: objects.allgather_object(b"x" * (3_000_000 if rank == 1 else 0)))
    assert set(backend.calls) == {"all_gather_into_tensor", "broadcast"}


@pytest.mark.parametrize("W", [1, 3])
def test_gather(W: int, capabilities: Capabilities) -> None:
    def on_rank(rank: int, dst: int) -> Any:
        collected = [None] * W if rank == dst else None
        objects.gather_object("x" * rank, collected, group_dst=dst)
        return collected

    backend = threads(W, capabilities)
    for dst in range(W):
        expected = [["x" * rank for rank in range(W)] if rank == dst else None for rank in range(W)]
        assert backend.run(on_rank, dst) == expected


@pytest.mark.parametrize("W", [1, 3])
def test_broadcast(W: int, capabilities: Capabilities) -> None:
    sent = ["text", 12, {1: 2}]

    def on_rank(rank: int, src: int) -> Any:
        received = list(sent) if rank == src else [None] * 3
        objects.broadcast_object_list(received, src, device="cpu")
        return received, objects.broadcast_object(sent if rank == src else "ignored", src)

    backend = threads(W, capabilities)
    for src in range(W):
        assert backend.run(on_rank, src) == [(sent, sent)] * W


@pytest.mark.parametrize("W", [1, 3])
def test_scatter(W: int, capabilities: Capabilities) -> None:
    def on_rank(rank: int, src: int) -> Any:
        received = [None, "kept"]
        objects.scatter_object_list(received, ["x" * r * 100 for r in range(W)] if rank == src else None, src)
        return received

    backend = threads(W, capabilities)
    for src in range(W):
        assert backend.run(on_rank, src) == [["x" * rank * 100, "kept"] for rank in range(W)]


def test_point_to_point(capabilities: Capabilities) -> None:
    sent = ["text", torch.arange(3).tolist(), None]

    def on_rank(rank: int) -> Any:
        if rank == 0:
            return objects.send_object_list(list(sent), dst=1)
        received = [None] * 3
        return objects.recv_object_list(received, src=0), received

    assert threads(2, capabilities).run(on_rank) == [None, (0, sent)]


def test_ranks_are_global() -> None:
    def on_rank(rank: int) -> Any:
        return objects.broadcast_object(rank, 7), objects.reduce_object(rank, 4), default(rank)

    def default(rank: int) -> str:
        try:
            objects.broadcast_object_list([None])
        except ArgumentError as error:
            return str(error)
        return ""

    outcomes = threads(2, ranks=[4, 7]).run(on_rank)
    assert [outcome[:2] for outcome in outcomes] == [(1, 1), (1, None)]
    assert "src: missing" in outcomes[0][2]


def test_a_rank_outside_the_group_does_nothing() -> None:
    outside: Any = GroupMember.NON_GROUP_MEMBER
    threads(1)
    kept = ["kept"]
    assert objects.all_gather_object(kept, 1, outside) is None
    assert objects.broadcast_object_list(kept, 0, outside) is None
    assert objects.gather_object(1, kept, 0, outside) is None
    assert objects.scatter_object_list(kept, None, 0, outside) is None
    assert objects.send_object_list(kept, 0, outside) is None
    assert objects.recv_object_list(kept, 0, outside) == -1
    assert objects.allgather_object(1, outside) is None
    assert objects.broadcast_object(1, 0, outside) is None
    assert objects.reduce_object(1, 0, group=outside) is None
    assert kept == ["kept"]


def test_nothing_works_before_initialisation() -> None:
    with pytest.raises(NotInitializedError):
        objects.allgather_object(1)


# --- reduce_object


@pytest.mark.parametrize(
    ("numbers", "op", "expected"),
    [
        ([1, 2, 3], "sum", 6),
        ([1, 2, 4], "avg", 7 / 3),
        ([0.5, 2, 3], "PRODUCT", 3.0),
        ([1, float("nan"), 3], "max", "nan"),
        ([float("nan"), 2, 3], ReduceOp.MIN, "nan"),
        ([3, 1, 2], "min", 1),
        ([Decimal(1), Decimal("nan"), Decimal(3)], "min", Decimal("nan")),
        ([Decimal("nan"), Decimal(1), Decimal(3)], "max", Decimal("nan")),
        ([1, 3, 2], torch.distributed.ReduceOp.MAX, 3),
        ([6, 3, 10], "band", 2),
        ([6, 3, 8], "bor", 15),
        ([True, False, True], "bxor", False),
        ([1j, 2, 3.5], "sum", 5.5 + 1j),
        ([10**30, 1, -1], "sum", 10**30),
        (["a", "b", "c"], lambda a, b: a + b, "abc"),
        ([[1], [2], [3]], lambda a, b: [a, b], [[[1], [2]], [3]]),
    ],
)
def test_reduce(numbers: list[Any], op: Any, expected: Any) -> None:
    outcomes = threads(3).run(lambda rank: objects.reduce_object(numbers[rank], 1, op))
    assert outcomes[0] is outcomes[2] is None
    assert str(outcomes[1]).lower() == "nan" if str(expected).lower() == "nan" else outcomes[1] == expected


@pytest.mark.parametrize(
    ("number", "op", "expected"),
    [
        (np.int8(100), "sum", 300),
        (np.int8(100), "avg", 100.0),
        (np.uint64(2**63), "product", 2**189),
        (np.float16(60000), "sum", 180000.0),
        (np.complex64(2), "avg", 2 + 0j),
        (np.bool_(True), "sum", 3),
        (np.bool_(True), "band", True),
        (np.timedelta64(2, "s"), "sum", np.timedelta64(6, "s")),
    ],
)
@pytest.mark.filterwarnings("error")
def test_reduce_of_numbers_of_numpy(number: Any, op: str, expected: Any) -> None:
    result = threads(3).run(lambda rank: objects.reduce_object(number, 0, op))[0]
    assert (type(result), result) == (type(expected), expected)


@pytest.mark.parametrize(
    ("dtype", "op", "expected"),
    [
        (torch.int32, "sum", [3, 6]),
        (torch.uint16, "max", [2, 3]),
        (torch.bfloat16, "avg", [1, 2]),
        (torch.float16, "sum", [3, 6]),
        (torch.float32, "min", [0, 1]),
        (torch.complex64, "sum", [3, 6]),
        (torch.bool, "band", [False, True]),
    ],
)
def test_reduce_of_tensors(dtype: torch.dtype, op: str, expected: list[Any]) -> None:
    def on_rank(rank: int) -> Any:
        tensor = torch.tensor([[rank], [rank + 1]]).to(dtype)
        result = objects.reduce_object(tensor, 0, op)
        assert tensor.tolist() == torch.tensor([[rank], [rank + 1]]).to(dtype).tolist()
        return None if result is None else (result.dtype, result.shape, result.view(-1).tolist())

    assert threads(3).run(on_rank) == [(dtype, (2, 1), expected), None, None]


def test_reduce_of_a_tensor_that_requires_a_gradient() -> None:
    result = threads(2).run(lambda rank: objects.reduce_object(torch.ones(2, requires_grad=True), 0))[0]
    assert result.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("values", "op", "reason"),
    [
        ([1, "x"], "sum", "op 'sum' takes a number or a tensor; for other objects pass a function"),
        ([1, [2]], "max", "got a list"),
        ([1, 1j], "max", "op 'max' is not defined for a complex"),
        ([1, 1.5], "band", "op 'band' is not defined for a float"),
        ([torch.ones(1), torch.ones(1)], "bor", "not defined for torch.float32"),
        ([torch.ones(1, dtype=torch.int8)] * 2, "avg", "not defined for torch.int8"),
    ],
)
def test_what_cannot_be_reduced_is_refused_where_it_is(values: list[Any], op: str, reason: str) -> None:
    backend = threads(2)
    outcomes = backend.run(lambda rank: objects.reduce_object(values[rank], 0, op))
    assert isinstance(outcomes[1], ArgumentError)
    assert reason in str(outcomes[1])
    assert isinstance(outcomes[0], (ObjectExchangeError, ArgumentError))
    still_works(backend)


def test_objects_that_do_not_go_together() -> None:
    backend = threads(2)
    for values in ([torch.ones(1), torch.ones(2)], [torch.ones(1), 1], [torch.ones(1), torch.ones(1).int()]):
        outcomes = backend.run(lambda rank, values=values: objects.reduce_object(values[rank], 0))
        assert "rank 1 of the group sent" in str(outcomes[0])
        assert outcomes[1] is None
    still_works(backend)


@pytest.mark.parametrize(
    ("values", "op", "reason"),
    [
        ([1.5, Decimal(1)], "sum", "'sum' fails with TypeError for a Decimal of rank 1 of the group and a float of"),
        ([Decimal(1), Decimal("snan")], "max", "'max' fails with InvalidOperation for a Decimal of rank 1"),
        ([Decimal("9e999999")] * 2, "sum", "'sum' fails with Overflow for a Decimal of rank 1"),
    ],
)
def test_numbers_that_do_not_go_together(values: list[Any], op: str, reason: str) -> None:
    backend = threads(2)
    outcomes = backend.run(lambda rank: objects.reduce_object(values[rank], 0, op))
    assert isinstance(outcomes[0], ArgumentError)
    assert reason in str(outcomes[0])
    assert outcomes[1] is None
    still_works(backend)


def test_an_error_of_the_callers_function_is_the_callers() -> None:
    backend = threads(2)
    assert kinds(backend.run(lambda rank: objects.reduce_object(rank, 0, lambda a, b: a // 0))) == [
        "ZeroDivisionError",
        "NoneType",
    ]
    still_works(backend)


# --- objects that cannot be sent, or are not accepted


def all_gather(value: Any, rank: int, **options: Any) -> Any:
    return objects.allgather_object(value, **options)


def gather(value: Any, rank: int, **options: Any) -> Any:
    return objects.gather_object(value, [None] * 3 if rank == 1 else None, 1, **options)


def reduce(value: Any, rank: int, **options: Any) -> Any:
    return objects.reduce_object(value, 1, lambda a, b: b, **options)


def broadcast(value: Any, rank: int, **options: Any) -> Any:
    return objects.broadcast_object(value, 1, **options)


def broadcast_list(value: Any, rank: int, **options: Any) -> Any:
    return objects.broadcast_object_list([value], 1, **options)


def scatter(value: Any, rank: int, **options: Any) -> Any:
    return objects.scatter_object_list([None], [0, value, 0] if rank == 1 else None, 1, **options)


CALLS = [all_gather, gather, reduce, broadcast, broadcast_list, scatter]


@pytest.mark.parametrize("call", CALLS)
def test_one_rank_cannot_send(call: Any) -> None:
    backend = threads(3)
    outcomes = backend.run(lambda rank: call(object() if rank == 1 else rank, rank))
    assert kinds(outcomes) == ["ObjectExchangeError", "ArgumentTypeError", "ObjectExchangeError"]
    assert "got a value of type builtins.object" in str(outcomes[1])
    assert "rank 1 could not send an object" in str(outcomes[0])
    assert backend.calls == ["all_gather_into_tensor"] * 3
    still_works(backend)


def test_several_ranks_cannot_send() -> None:
    outcomes = threads(3).run(lambda rank: objects.allgather_object(object() if rank else 0))
    assert "ranks 1, 2 could not send" in str(outcomes[0])


@pytest.mark.parametrize("call", CALLS)
def test_an_object_is_too_large_to_be_sent(call: Any) -> None:
    set_object_policy(max_bytes=1000)
    backend = threads(3)
    outcomes = backend.run(lambda rank: call(b"x" * 1001 if rank == 1 else rank, rank))
    assert kinds(outcomes) == ["ObjectExchangeError", "ArgumentError", "ObjectExchangeError"]
    still_works(backend)


class Unprintable:
    def __getstate__(self) -> Any:
        raise OSError("no state")


def test_an_error_while_pickling_does_not_leave_the_others_waiting() -> None:
    backend = threads(2)
    outcomes = backend.run(lambda rank: objects.allgather_object(Unprintable() if rank else 0, allow_pickle=True))
    assert kinds(outcomes) == ["ObjectExchangeError", "ArgumentTypeError"]
    still_works(backend)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("refusing", [0, 2])
def test_one_rank_does_not_unpickle(call: Any, refusing: int) -> None:
    backend = threads(3)
    value = Fraction(1, 2)

    def on_rank(rank: int) -> Any:
        return call(value if rank == 1 else 0, rank, allow_pickle=rank != refusing)

    outcomes = backend.run(on_rank)
    if call in (gather, reduce):  # rank 1, which receives, accepts everything
        assert not any(isinstance(outcome, CommError) for outcome in outcomes)
    else:
        expected = ["ObjectExchangeError"] * 3
        expected[refusing] = "ObjectDecodeError"
        assert kinds(outcomes) == expected
        for outcome in outcomes:
            assert "COMM_OBJECTS__ALLOW_PICKLE=1" in str(outcome)
        assert f"rank {refusing} does not accept what rank 1 sends" in str(outcomes[1])
    still_works(backend)


def test_the_one_receiver_does_not_unpickle() -> None:
    backend = threads(3)
    value = Fraction(1, 2)
    outcomes = backend.run(lambda rank: gather(value if rank == 0 else 0, rank, allow_pickle=rank != 1))
    assert kinds(outcomes) == ["ObjectExchangeError", "ObjectDecodeError", "ObjectExchangeError"]
    still_works(backend)


def test_pickle_where_all_allow_it() -> None:
    backend = threads(2)
    value = Fraction(1, 2)
    assert backend.run(lambda rank: objects.allgather_object(value, allow_pickle=True)) == [[value] * 2] * 2
    set_object_policy(allow_pickle=True)
    assert backend.run(lambda rank: objects.broadcast_object(value, 0)) == [value] * 2
    assert kinds(backend.run(lambda rank: objects.broadcast_object(value, 0, allow_pickle=False))) == [
        "ArgumentTypeError",
        "ObjectExchangeError",
    ]


def test_point_to_point_refusals(capabilities: Capabilities) -> None:
    backend = threads(2, capabilities)

    def exchange(value: Any, allow: tuple[bool, bool] = (False, False), length: int = 1) -> list[Any]:
        def on_rank(rank: int) -> Any:
            if rank == 0:
                return objects.send_object_list([value], 1, allow_pickle=allow[0])
            received = [None] * length
            objects.recv_object_list(received, 0, allow_pickle=allow[1])
            return received

        return backend.run(on_rank)

    assert kinds(exchange(object())) == ["ArgumentTypeError", "ObjectExchangeError"]
    assert kinds(exchange(Fraction(1, 2), (True, False))) == ["ObjectExchangeError", "ObjectDecodeError"]
    assert exchange(Fraction(1, 2), (True, True)) == [None, [Fraction(1, 2)]]
    assert kinds(exchange(1, length=2)) == ["ObjectExchangeError", "CollectiveMismatchError"]
    assert exchange("fine") == [None, ["fine"]]


# --- peers that lie


def announce(call: str, message: bytes, size: int | None = None, root: int = -1, detail: int = 0) -> Channel:
    """Take part in a call by hand, saying that ``message`` has ``size`` bytes."""
    channel = Channel(call, active_backend(), None)
    record = list(record_of(call, root, detail, [bytearray(message)], False))
    record[3] = len(message) if size is None else size
    record[4] = 0  # not pickled
    channel.exchange(record, message)
    return channel


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def hostile_messages(tmp_path: Path, pad: bytes) -> dict[str, bytes]:
    whole = bytes(encode_object({"a": [1, 2, 3], "t": torch.ones(5), "pad": pad}))
    return {
        "pickled": bytes(encode_object([pad, Harmful(tmp_path / "harm")], allow_pickle=True)),
        "truncated": whole[:-5],
        "noise": bytes(range(100)) + pad,
        "too long": whole + b"\0" * 9,
    }


@pytest.mark.parametrize("pad", [b"", b"x" * 500], ids=["within the record", "after it"])
@pytest.mark.parametrize("case", ["pickled", "truncated", "noise", "too long"])
def test_a_hostile_message_is_refused_by_its_receivers_alone(case: str, pad: bytes, tmp_path: Path) -> None:
    backend = threads(3)
    message = hostile_messages(tmp_path, pad)[case]
    assert (len(message) > INLINE_BYTES) == bool(pad)

    def in_broadcast(rank: int) -> Any:
        if rank:
            return objects.broadcast_object(None, 0)
        channel = announce("broadcast_object", message, root=0)
        return channel.broadcast(bytearray(message), 0, 0) and None if pad else None

    def in_gather(rank: int) -> Any:
        if rank:
            return objects.gather_object(rank, [None] * 3 if rank == 1 else None, 1)
        channel = announce("gather_object", message, root=1)
        return channel.gather(bytearray(message), [], 1) or None if pad else None

    assert kinds(backend.run(in_broadcast)) == ["NoneType", "ObjectDecodeError", "ObjectDecodeError"]
    still_works(backend)
    assert kinds(backend.run(in_gather)) == ["NoneType", "ObjectDecodeError", "NoneType"]
    still_works(backend)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("size", [1 << 40, (1 << 63) - 1, 0, 5, -7])
def test_an_impossible_size_is_refused_before_anything_is_allocated(size: int) -> None:
    backend = threads(3)

    def on_rank(rank: int) -> Any:
        if rank == 0:
            return announce("broadcast_object", b"", size, root=0) and None
        return objects.broadcast_object(None, 0)

    outcomes = backend.run(on_rank)
    assert kinds(outcomes) == ["NoneType", "ObjectDecodeError", "ObjectDecodeError"]
    assert "rank 0 sends" in str(outcomes[1])
    assert str(size) in str(outcomes[1])
    still_works(backend)


@pytest.mark.parametrize("announced", [30, 1 << 21])
@pytest.mark.parametrize("lie", [1 << 40, -1])
def test_a_scattered_object_of_another_size_than_announced(announced: int, lie: int) -> None:
    backend = threads(2)

    def on_rank(rank: int) -> Any:
        if rank:
            return objects.scatter_object_list([None], None, 0)
        channel = announce("scatter_object_list", b"", announced, root=0)
        size = 8 if announced > 1 << 20 else 8 + announced
        return channel._scatter_part([struct.pack("=q", lie).ljust(size, b"\0")] * 2, size, 0) and None

    outcomes = backend.run(on_rank)
    assert kinds(outcomes) == ["NoneType", "ObjectDecodeError"]
    assert f"sends {lie} bytes after announcing {announced}" in str(outcomes[1])


@pytest.mark.parametrize("W", [2, 3])
def test_scattering_large_objects(W: int) -> None:
    def on_rank(rank: int) -> Any:
        received = [None]
        objects.scatter_object_list(received, [b"x" * r * 600_000 for r in range(W)] if rank == 1 else None, 1)
        return len(received[0])  # type: ignore[arg-type]

    backend = threads(W)
    assert backend.run(on_rank) == [rank * 600_000 for rank in range(W)]
    assert "all_to_all_single" in backend.calls


def test_lists_that_are_none() -> None:
    backend = threads(2)
    message = encode_object("no list")

    def broadcast(rank: int) -> Any:
        if rank == 0:
            return announce("broadcast_object_list", message, root=0, detail=1) and None
        return objects.broadcast_object_list([None], 0)

    def send(rank: int) -> Any:
        if rank == 0:
            channel = Channel("send_object_list", active_backend(), None)
            peer = objects.point_to_point._Peer(channel, 1, False)
            peer.send_numbers(record_of("send_object_list", -1, 1, [message], False), 0)
            peer.recv_numbers(1, 1)
            return peer.send(torch.frombuffer(message, dtype=torch.uint8), 2)
        return objects.recv_object_list([None], 0)

    assert kinds(backend.run(broadcast)) == ["NoneType", "ObjectDecodeError"]
    assert kinds(backend.run(send)) == ["NoneType", "ObjectDecodeError"]
    still_works(backend)


# --- ranks that call different things


def test_different_calls_are_named() -> None:
    backend = threads(3)

    def on_rank(rank: int) -> Any:
        if rank == 2:
            return objects.broadcast_object(1, 1)
        return objects.allgather_object(1)

    outcomes = backend.run(on_rank)
    assert kinds(outcomes) == ["CollectiveMismatchError"] * 3
    for outcome in outcomes:
        assert "ranks 0, 1 called all_gather_object, rank 2 called broadcast_object (root 1);" in str(outcome)
    still_works(backend)


@pytest.mark.parametrize(
    ("call", "first", "second"),
    [
        (lambda rank: objects.broadcast_object(1, rank), "broadcast_object (root 0)", "broadcast_object (root 1)"),
        (
            lambda rank: objects.broadcast_object_list([1] * (rank + 1), 0),
            "broadcast_object_list (root 0, length 1)",
            "broadcast_object_list (root 0, length 2)",
        ),
        (
            lambda rank: objects.reduce_object(1, 0, "sum" if rank else "max"),
            "reduce_object (root 0, op 'max')",
            "reduce_object (root 0, op 'sum')",
        ),
        (
            lambda rank: objects.reduce_object(1, 0, max if rank else "avg"),
            "reduce_object (root 0, op 'avg')",
            "reduce_object (root 0, a function as op)",
        ),
    ],
    ids=["root", "length", "op", "function"],
)
def test_different_arguments_are_named(call: Any, first: str, second: str) -> None:
    backend = threads(2)
    outcomes = backend.run(call)
    assert kinds(outcomes) == ["CollectiveMismatchError"] * 2
    for outcome in outcomes:
        assert f"rank 0 called {first}, rank 1 called {second}; every rank must call the same" in str(outcome)
    still_works(backend)


def test_many_different_calls_are_not_all_named() -> None:
    outcomes = threads(6).run(lambda rank: objects.broadcast_object_list([1] * (rank + 1), 0))
    assert "rank 3 called broadcast_object_list (root 0, length 4), 2 more calls differ; " in str(outcomes[5])


def test_a_rank_of_another_release() -> None:
    backend = threads(2)

    def on_rank(rank: int) -> Any:
        if rank == 0:
            Channel("x", active_backend(), None).exchange([99, 0, 0, 0, 0, 0], b"")
            return None
        return objects.allgather_object(1)

    assert "rank 0 called something else (root 0)" in str(backend.run(on_rank)[1])


# --- wrong arguments, seen before anything is sent


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        (lambda: objects.all_gather_object(None, 1), ArgumentTypeError, "object_list: got None of type NoneType"),
        (lambda: objects.all_gather_object([], 1), ArgumentError, "got a list of 0; expected 1 entries"),
        (lambda: objects.all_gather_object([None], 1, "group"), ArgumentTypeError, "group: got 'group'"),
        (lambda: objects.gather_object(1), ArgumentTypeError, "object_gather_list: got None"),
        (lambda: objects.gather_object(1, [None] * 2), ArgumentError, "got a list of 2"),
        (lambda: objects.gather_object(1, [None], 5), ArgumentError, "rank 5, which is not in the group"),
        (lambda: objects.gather_object(1, [None], 0, None, 0), ArgumentError, "got both dst=0 and group_dst=0"),
        (lambda: objects.broadcast_object_list((1,)), ArgumentTypeError, "expected a list"),
        (lambda: objects.broadcast_object_list([1], device="cuda"), ArgumentError, "device: got cuda"),
        (lambda: objects.broadcast_object_list([1], device="nowhere"), ArgumentTypeError, "device: got 'nowhere'"),
        (lambda: objects.broadcast_object(1, None), ArgumentError, "src: missing"),
        (lambda: objects.broadcast_object(1, 0, allow_pickle=1), ArgumentTypeError, "allow_pickle: got 1"),
        (lambda: objects.scatter_object_list([], [1]), ArgumentError, "got an empty list"),
        (lambda: objects.scatter_object_list(None, [1]), ArgumentTypeError, "scatter_object_output_list: got None"),
        (lambda: objects.scatter_object_list([None]), ArgumentTypeError, "scatter_object_input_list: got None"),
        (lambda: objects.scatter_object_list([None], [1, 2]), ArgumentError, "got a list of 2"),
        (lambda: objects.reduce_object(1, 0, "add"), ArgumentError, "reduce_object: op: got 'add'"),
        (lambda: objects.reduce_object(1, 0, 3), ArgumentTypeError, "op: got 3"),
        (lambda: objects.send_object_list([1], 0), ArgumentError, "got this rank itself"),
        (lambda: objects.send_object_list([1]), ArgumentError, "dst: missing"),
        (lambda: objects.recv_object_list([1], 0), ArgumentError, "got this rank itself"),
    ],
)
def test_wrong_arguments(call: Any, error: type[Exception], reason: str) -> None:
    backend = threads(1)
    (outcome,) = backend.run(lambda rank: call())
    assert type(outcome) is error
    assert reason in str(outcome)
    assert backend.calls == []


@pytest.mark.parametrize(
    ("call", "wrong", "reason"),
    [
        (lambda rank: objects.gather_object(1, None, 0), 0, "object_gather_list: got None"),
        (lambda rank: objects.gather_object(1, None if rank else [None], 0), 0, "got a list of 1; expected 3"),
        (
            lambda rank: objects.gather_object(1, [None] * 3 if rank < 2 else None, 0),
            1,
            "got a list on a rank that is not dst",
        ),
        (lambda rank: objects.scatter_object_list([None], None, 0), 0, "scatter_object_input_list: got None"),
        (lambda rank: objects.scatter_object_list([None], [1, 2], 0), 0, "got a list of 2; expected 3"),
        (
            lambda rank: objects.scatter_object_list([None] if rank != 2 else [], [1, 2, 3], 0),
            2,
            "scatter_object_output_list: got an empty list",
        ),
        (lambda rank: objects.all_gather_object([None] * (3 - (rank == 1)), 1), 1, "got a list of 2; expected 3"),
        (lambda rank: objects.broadcast_object_list([1] if rank else (1,), 0), 0, "object_list: got (1,)"),
        (lambda rank: objects.broadcast_object_list((1,) if rank == 2 else [1], 0), 2, "object_list: got (1,)"),
    ],
)
def test_a_wrong_list_on_one_rank_is_an_error_on_all(call: Any, wrong: int, reason: str) -> None:
    backend = threads(3)
    outcomes = backend.run(call)
    assert isinstance(outcomes[wrong], ArgumentError)
    assert reason in str(outcomes[wrong])
    for rank in {0, 1, 2} - {wrong}:
        assert isinstance(outcomes[rank], ObjectExchangeError), outcomes[rank]
        assert f": rank {wrong} called with a wrong argument; see the error there" in str(outcomes[rank])
    still_works(backend)


@pytest.mark.parametrize("src", [0, None])
def test_a_wrong_list_on_either_side_of_a_message(src: int | None) -> None:
    backend = threads(2, GLOO)

    def exchange(sent: Any, received: Any) -> list[Any]:
        return backend.run(
            lambda rank: objects.recv_object_list(received, src) if rank else objects.send_object_list(sent, 1)
        )

    outcomes = exchange(("x",), [None])
    assert kinds(outcomes) == ["ArgumentTypeError", "ObjectExchangeError"]
    assert "send_object_list: object_list: got ('x',)" in str(outcomes[0])
    assert "rank 0 called with a wrong argument; see the error there" in str(outcomes[1])
    outcomes = exchange(["x"], (None,))
    assert kinds(outcomes) == ["ObjectExchangeError", "ArgumentTypeError"]
    assert "rank 1 does not accept the objects; see the error" in str(outcomes[0])
    assert "recv_object_list: object_list: got (None,)" in str(outcomes[1])
    assert kinds(exchange(None, None)) == ["ArgumentTypeError"] * 2
    assert exchange(["x"], [None]) == [None, 0]
    still_works(backend)


def test_a_receiver_without_memory_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = threads(2)

    def exchange() -> list[Any]:
        return backend.run(
            lambda rank: objects.recv_object_list([None], 0) if rank else objects.send_object_list(["x"], 1)
        )

    def no_memory(size_bytes: int, device: torch.device) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(objects.point_to_point, "Inbox", no_memory)
        outcomes = exchange()
    assert kinds(outcomes) == ["ObjectExchangeError", "ObjectDecodeError"]
    assert "rank 0 sends 35 bytes, for which this rank has no memory (MemoryError)" in str(outcomes[1])
    assert exchange() == [None, 0]
    still_works(backend)


def test_arguments_that_only_several_ranks_can_get_wrong() -> None:
    outcomes = threads(2, BYTES_ONLY).run(lambda rank: objects.recv_object_list([None]))
    assert "cannot receive from any source" in str(outcomes[0])


def test_one_rank_alone_is_as_strict_as_many() -> None:
    for call in (
        lambda: objects.allgather_object(object()),
        lambda: objects.broadcast_object(object(), 0),
        lambda: objects.reduce_object("x", 0),
    ):
        (outcome,) = threads(1).run(lambda rank, call=call: call())
        assert isinstance(outcome, ArgumentTypeError)
    assert ObjectDecodeError.__mro__[1] is CommError
    assert issubclass(CollectiveMismatchError, RuntimeError)
