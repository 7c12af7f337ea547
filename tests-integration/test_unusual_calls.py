"""Calls that look wrong and work.

Tensors of any strides that are only read, empty tensors, subclasses and tensors of autograd, unusual dtypes, inputs
within outputs, arguments of other types, calls within modes of torch, from other threads and while the process ends.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import comm_orchestrator as dist
from comm_utils.operations import Role
from comm_utils.testing import RankPool

# Test folders are no packages that could be installed.
_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)

from wrong_calls.kinds import recast, replaced  # noqa: E402
from wrong_calls.right import (  # noqa: E402
    MESSAGES,
    OBJECTS,
    REDUCING,
    TENSORS,
    Arguments,
    call,
    check_group_works,
    operation,
    places,
    right,
    root_argument,
)

Pools: TypeAlias = Callable[[int], RankPool]

ONLY_READ = [
    (name, where, ranks)
    for name in TENSORS
    if name not in MESSAGES
    for where, ranks, written in places(name)
    if not written
]


def run_strided_input(name: str, where: str, ranks: tuple[int, ...]) -> None:
    rank = dist.get_rank()
    for _ in range(3):  # the second and the third may take the fast path
        arguments = right(name, rank, 2)
        if rank in ranks:
            argument, _, position = where.rstrip("]").partition("[")
            whole = arguments[argument][int(position)] if position else arguments[argument]
            arguments.update(replaced(arguments, where, torch.ones(2 * whole.numel())[::2]))
        call(name, arguments)
    check_group_works()


@pytest.mark.parametrize(("name", "where", "ranks"), ONLY_READ)
def test_strided_tensor_that_is_only_read_is_accepted(
    pools: Pools, name: str, where: str, ranks: tuple[int, ...]
) -> None:
    pools(2).run(run_strided_input, name, where, ranks)


def emptied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value[:0].clone()
    if isinstance(value, dict):
        return {name: emptied(entry) for name, entry in value.items()}
    return [emptied(entry) for entry in value] if isinstance(value, list) else value


def one_of_two(name: str) -> str:
    """What this rank calls so that messages have both ends."""
    return {"send": "recv", "isend": "irecv"}.get(name, name) if dist.get_rank() == 1 else name


def run_zero_sized(name: str) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    name = one_of_two(name)
    for dtype in (torch.float32, torch.int16, torch.bool):
        arguments = recast(emptied(right(name, rank, W)), dtype)
        if name in REDUCING:
            arguments["op"] = "sum"
        call(name, arguments)
        if name not in ("inference_all_reduce", *MESSAGES):
            call(name, {**arguments, "async_op": True})
    check_group_works()


@pytest.mark.parametrize("name", [name for name in TENSORS if name not in ("recv", "irecv")])
def test_zero_sized_tensors(pools: Pools, name: str) -> None:
    pools(2).run(run_zero_sized, name)


def run_moving(name: str, dtype: torch.dtype) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    name = one_of_two(name)
    call(name, recast(right(name, rank, W), dtype))
    check_group_works()


UNUSUAL = [torch.float8_e4m3fn, torch.complex32, torch.complex64, torch.uint16, torch.uint64, torch.bool]
MOVING = [name for name in TENSORS if name not in REDUCING and name not in ("recv", "irecv")]


@pytest.mark.parametrize("dtype", UNUSUAL, ids=str)
@pytest.mark.parametrize("name", MOVING)
def test_movement_takes_every_dtype(pools: Pools, name: str, dtype: torch.dtype) -> None:
    pools(2).run(run_moving, name, dtype)


def run_complex(name: str, op: str) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    arguments = recast(right(name, rank, W), torch.complex64)
    for value in arguments.values():
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(complex(rank, 2))
    result = getattr(dist, name)(**arguments, op=op)
    outputs = {"reduce_scatter_coalesced": result, "all_reduce_coalesced": arguments.get("tensors")}.get(
        name, [arguments.get("output", arguments.get("tensor"))]
    )
    expected = {"sum": complex(W * (W - 1) / 2, 2 * W), "avg": complex((W - 1) / 2, 2)}[op]
    if name == "reduce" and rank != 0:
        expected = complex(rank, 2)
    assert outputs
    for output in outputs:
        assert output.tolist() == [expected] * 4
    check_group_works()


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("name", REDUCING)
def test_complex_sums_and_averages(pools: Pools, name: str, op: str) -> None:
    pools(2).run(run_complex, name, op)


BYTES = torch.tensor([0, 1, 2, 6, 255], dtype=torch.uint8)  # all but the first are true, also for torch
LOGICAL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys(("sum", "max", "bor"), torch.logical_or),
    **dict.fromkeys(("product", "min", "band"), torch.logical_and),
    "bxor": torch.logical_xor,
}


def run_bools_of_any_byte(op: str, repeats: int) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()

    def of_rank(one: int) -> torch.Tensor:
        """Bytes that meet all others of the other ranks."""
        places = torch.arange(len(BYTES) ** W).repeat(W * repeats)
        return BYTES[places // len(BYTES) ** one % len(BYTES)].view(torch.bool)

    expected = functools.reduce(LOGICAL[op], (of_rank(one).clone() != 0 for one in range(W)))
    for async_op in (False, True):
        reduced, coalesced, part = of_rank(rank), [of_rank(rank), of_rank(rank)], torch.empty(len(expected) // W) > 0
        rooted = of_rank(rank)
        works = [
            dist.reduce(rooted, W - 1, op, async_op=async_op),
            dist.all_reduce(reduced, op, async_op=async_op),
            dist.all_reduce_coalesced(coalesced, op, async_op=async_op),
            dist.reduce_scatter_tensor(part, of_rank(rank), op, async_op=async_op),
        ]
        for work in works:
            if work is not None:
                work.wait()
        for found in (reduced, *coalesced, *([rooted] if rank == W - 1 else [])):
            assert ((found != False) == expected).all()  # noqa: E712
        assert ((part != False) == expected.chunk(W)[rank]).all()  # noqa: E712


@pytest.mark.parametrize("repeats", [1, 2000])
@pytest.mark.parametrize("op", LOGICAL)
def test_bools_whose_bytes_are_not_one(pools: Pools, op: str, repeats: int) -> None:
    pools(2 if repeats > 1 else 3).run(run_bools_of_any_byte, op, repeats)


# --- reduce only reads the tensor of other ranks than dst


def run_reduce_of_any_strides(dtype: torch.dtype, async_op: bool) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    values = torch.arange(1, 13).view(3, 4).to(dtype) if dtype is not torch.bool else torch.ones(3, 4, dtype=dtype)
    wide = torch.zeros(3, 8, dtype=dtype)
    wide[:, ::2] = values
    layouts = [values.clone(), wide[:, ::2], values.t().contiguous().t(), values[:1].expand(3, 4)]
    for dst in range(W):
        mine = layouts[(rank - dst) % W]  # contiguous on dst
        if rank == dst:
            mine = (values.clone(), values.t().contiguous().t())[dst % 2]  # or dense, in another order than others
        before, memory = mine.clone(), wide.clone()
        work = dist.reduce(mine, dst, "sum", async_op=async_op)
        if work is not None:
            work.wait()
        if rank == dst:
            expected = sum(layouts[1:W], start=values)
            assert torch.equal(mine, expected), (dst, mine, expected)
        else:
            assert torch.equal(mine, before)
        assert torch.equal(wide, memory)
    check_group_works()


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.complex64], ids=str)
def test_reduce_reads_tensors_of_any_strides(pools: Pools, dtype: torch.dtype, async_op: bool) -> None:
    pools(4).run(run_reduce_of_any_strides, dtype, async_op)


# --- kinds of tensors


class Plain(torch.Tensor):
    """A subclass that adds nothing."""


class Unseen(torch.Tensor):
    """A subclass that torch's functions do not ask."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Dispatched(torch.Tensor):
    """A subclass that sees every operation on it."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(function, types, args, kwargs or {})


def made_in_inference_mode(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


def viewed_without_grad(tensor: torch.Tensor) -> torch.Tensor:
    leaf = tensor.requires_grad_()
    with torch.no_grad():
        return leaf[:]


def within_a_dual_level(tensor: torch.Tensor) -> torch.Tensor:
    return forward_ad.make_dual(tensor, torch.ones_like(tensor))


def not_writeable(tensor: torch.Tensor) -> torch.Tensor:
    array = tensor.numpy()
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


#: Kinds of tensors, made of a plain one, that every call serves like that.
SERVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "parameter": torch.nn.Parameter,
    "buffer": torch.nn.Buffer if hasattr(torch.nn, "Buffer") else torch.nn.Parameter,
    "subclass": lambda tensor: tensor.as_subclass(Plain),
    "unseen subclass": lambda tensor: torch.Tensor._make_subclass(Unseen, tensor),
    "dispatched subclass": lambda tensor: torch.Tensor._make_subclass(Dispatched, tensor),
    "leaf": lambda tensor: tensor.requires_grad_(),
    "result": lambda tensor: tensor.requires_grad_() * 1,
    "view of a result": lambda tensor: (tensor.requires_grad_() * 1).view(tensor.shape),
    "view without grad": viewed_without_grad,
    "row of a leaf": lambda tensor: torch.ones(2, tensor.numel(), requires_grad=True)[0],
    "inference": made_in_inference_mode,
    "dual": within_a_dual_level,
    "not writeable": not_writeable,
    "shared": lambda tensor: tensor.share_memory_(),
    "behind others": lambda tensor: torch.ones(3 + tensor.numel())[3:],
    "within others": lambda tensor: torch.ones(3, tensor.numel())[1],
    "of three dimensions": lambda tensor: tensor.view(1, -1, 1),
}
#: Those that can only be read.
READ: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda tensor: torch.ones(1).expand(tensor.numel()),
    "negated": lambda tensor: torch._neg_view(-tensor),
    "overlapping": lambda tensor: torch.ones(tensor.numel()).as_strided((tensor.numel() // 2, 2), (1, 1)),
    "imaginary": lambda tensor: torch.complex(tensor, -tensor).conj().imag,
}


def values_of(value: Any) -> Any:
    """The elements of tensors, in lists as they are given."""
    if isinstance(value, torch.Tensor):
        return value.detach().flatten().tolist()
    return [values_of(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def outcome_of(name: str, arguments: Arguments) -> list[Any]:
    """What the call returns, and leaves in every tensor and list that it writes."""
    returned = call(name, arguments)
    written = [one.name for one in operation(name).arguments if one.role in (Role.TENSOR, Role.OBJECT)]
    return [values_of(returned), *[values_of(arguments[argument]) for argument in written]]


def right_side(name: str) -> str:
    """What this rank calls so that messages, of objects too, have both ends."""
    return name.replace("send", "recv") if dist.get_rank() == 1 and "send" in name else name


def run_kinds(name: str) -> list[str]:
    rank, problems = dist.get_rank(), []
    side = right_side(name)
    expected = outcome_of(side, right(side, rank, 2))
    group = dist.new_group([0, 1])
    kinds = {**SERVED, **READ} if name not in SHAPED else {k: v for k, v in SERVED.items() if "dimensions" not in k}
    for state in ("first", "second", "third"):
        for where, ranks, written in places(name):
            for label, make in kinds.items():
                if label in READ and (written or side != name):
                    make = torch.clone  # what the other rank sends or reads is special
                arguments = {**right(side, rank, 2), "group": group}
                argument, _, position = where.rstrip("]").partition("[")
                with forward_ad.dual_level():
                    if rank in ranks:
                        plain = arguments[argument][int(position)] if position else arguments[argument]
                        arguments.update(replaced(arguments, where, make(plain)))
                    found = outcome_of(side, arguments)
                if found != expected:
                    problems.append(f"{label} as {where}, {state} call: {found}, not {expected}")
    check_group_works(group)
    dist.destroy_process_group(group)
    return problems


#: Its tensors agree in their trailing dimensions.
SHAPED = ("all_to_all_single",)
TWO_SIDED = [name for name in TENSORS if name not in ("recv", "irecv")]


@pytest.mark.parametrize("name", TWO_SIDED)
def test_kinds_of_tensors_that_work_like_plain_ones(pools: Pools, name: str) -> None:
    assert pools(2).run(run_kinds, name) == [[], []]


# --- dtypes that torch itself hardly serves

RARE = [
    getattr(torch, name)
    for name in (
        *(f"{kind}{bits}" for bits in range(1, 8) for kind in ("uint", "int")),
        *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
        *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    )
    if hasattr(torch, name)
]


def of_bytes(value: Any, dtype: torch.dtype | None) -> Any:
    """The same arguments with tensors of bytes that differ between ranks, seen as ``dtype``, or as bytes."""
    if isinstance(value, torch.Tensor):
        first = 10 * dist.get_rank()
        memory = torch.arange(first, first + value.numel() * 2, dtype=torch.uint8)  # enough for two bytes each
        return memory.view(torch.int16) if dtype is None else memory[: value.numel() * dtype.itemsize].view(dtype)
    if isinstance(value, dict):
        return {name: of_bytes(entry, dtype) for name, entry in value.items()}
    return [of_bytes(entry, dtype) for entry in value] if isinstance(value, list) else value


def bytes_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.view(torch.uint8).tolist()
    return [bytes_of(entry) for entry in value] if isinstance(value, list) else value


def run_rare_dtypes(name: str) -> list[str]:
    problems, side = [], right_side(name)
    of_right = right(side, dist.get_rank(), 2)
    for dtype in RARE:
        plain = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
        for _ in range(2):
            arguments, expected = of_bytes(of_right, dtype), of_bytes(of_right, plain)
            found, reference = call(side, arguments), call(side, expected)
            if bytes_of([found, *arguments.values()]) != bytes_of([reference, *expected.values()]):
                problems.append(f"{dtype}: {bytes_of([found, *arguments.values()])}")
    check_group_works()
    return problems


@pytest.mark.parametrize("name", [name for name in TWO_SIDED if name not in REDUCING])
def test_rare_dtypes_are_moved_as_bytes(pools: Pools, name: str) -> None:
    assert pools(2).run(run_rare_dtypes, name) == [[], []]


# --- inputs within outputs

WITHIN: dict[str, Callable[[torch.Tensor, int], tuple[str, list[Any]]]] = {
    "all_gather_into_tensor": lambda memory, at: ("all_gather_into_tensor", [memory[:8], memory[at : at + 4]]),
    "all_gather": lambda memory, at: ("all_gather", [[memory[:4], memory[4:8]], memory[at : at + 4]]),
    "reduce_scatter_tensor": lambda memory, at: ("reduce_scatter_tensor", [memory[at : at + 4], memory[:8]]),
    "reduce_scatter": lambda memory, at: ("reduce_scatter", [memory[at : at + 4], [memory[:4], memory[4:8]]]),
    "all_to_all_single": lambda memory, at: ("all_to_all_single", [memory[at : at + 8], memory[4:12]]),
    "all_to_all_single of sizes": lambda memory, at: (
        "all_to_all_single",
        [memory[at : at + 8], memory[4:12], [4, 4], [4, 4]],
    ),
    "all_to_all": lambda memory, at: ("all_to_all", [[memory[at : at + 4], memory[13:]], [memory[:4], memory[4:8]]]),
    "gather": lambda memory, at: ("gather", [memory[at : at + 4], on_root([memory[:4], memory[4:8]]), 0]),
    "scatter": lambda memory, at: ("scatter", [memory[at : at + 4], on_root([memory[:4], memory[4:8]]), 0]),
    "all_gather_coalesced": lambda memory, at: ("all_gather_coalesced", [[memory[:8]], [memory[at : at + 4]]]),
    "all_reduce_coalesced": lambda memory, at: ("all_reduce_coalesced", [[memory[:8], memory[at : at + 8]]]),
}


def on_root(value: Any) -> Any:
    return value if dist.get_rank() == 0 else None


def apart(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return [apart(entry) for entry in value] if isinstance(value, list) else value


def run_within(label: str) -> list[str]:
    """The result is that of the same call on tensors that lie apart, wherever the input begins."""
    problems = []
    for _ in range(2):
        for at in range(9):
            memory = torch.arange(17.0) + 100 * dist.get_rank()
            name, arguments = WITHIN[label](memory, at)
            copies = apart(arguments)
            for asynchronous in (False, True):
                given = arguments if not asynchronous else WITHIN[label](memory.copy_(apart_memory()), at)[1]
                reference = copies if not asynchronous else apart(given)
                for one in (reference, given):
                    work = getattr(dist, name)(*one, async_op=asynchronous)
                    if work is not None:
                        work.wait()
                written = 1 if name == "gather" else 0
                if values_of(given[written]) != values_of(reference[written]):
                    problems.append(f"at {at}: {values_of(given[written])}, not {values_of(reference[written])}")
    check_group_works()
    return problems


def apart_memory() -> torch.Tensor:
    return torch.arange(17.0) + 100 * dist.get_rank()


@pytest.mark.parametrize("label", WITHIN)
def test_inputs_within_outputs(pools: Pools, label: str) -> None:
    assert pools(2).run(run_within, label) == [[], []]


# --- arguments of other types


class Own(int):
    """A rank, as some launchers' libraries give it."""


class Ranks(IntEnum):
    FIRST = 0


class Ops(str, Enum):
    SUM = "sum"


OTHER_ROOTS = [np.int64(0), np.uint8(0), Own(0), Ranks.FIRST, torch.tensor(0), torch.tensor([0]), np.array(0)]
OTHER_OPS = ["SUM", "Sum", np.str_("sum"), Ops.SUM, torch.distributed.ReduceOp.SUM]
OTHER_OPS.append(torch.distributed.ReduceOp(torch.distributed.ReduceOp.SUM))
OTHER_FLAGS = [None, 0, 1, np.True_, np.False_]
OTHER_TIMEOUTS = [np.float64(20), timedelta(seconds=20), 20, 5 * 365 * 86400.0]


def run_other_types(name: str) -> list[str]:
    rank, problems = dist.get_rank(), []
    row, side = operation(name), right_side(name)
    changes: list[Arguments] = [{"timeout": timeout} for timeout in OTHER_TIMEOUTS]
    if row.argument(Role.ASYNC_OP) is not None:
        changes += [{"async_op": flag} for flag in OTHER_FLAGS]
    if name in REDUCING:
        changes += [{"op": op} for op in OTHER_OPS]
    if row.argument(Role.ROOT) is not None and not row.pattern.is_message and "send" not in name:
        changes += [{root_argument(row): root} for root in OTHER_ROOTS]
    for change in changes:
        arguments = right(side, rank, 2)
        plain = {"op": "sum"} if "op" in change else {}
        expected = outcome_of(side, {**right(side, rank, 2), **plain})
        for _ in range(2):
            arguments = {**right(side, rank, 2), **change}
            found = outcome_of(side, arguments)
            if found[1:] != expected[1:] or (found[0] != expected[0] and "async_op" not in change):
                problems.append(f"{change}: {found}, not {expected}")
    check_group_works()
    return problems


EVERY = [name for name in (*TENSORS, *OBJECTS) if "recv" not in name]


@pytest.mark.parametrize("name", EVERY)
def test_arguments_of_other_types(pools: Pools, name: str) -> None:
    assert pools(2).run(run_other_types, name) == [[], []]


def run_split_sizes() -> None:
    rank = dist.get_rank()
    for sizes in ((4, 4), torch.tensor([4, 4]), torch.tensor([[4], [4]]), torch.Size([4, 4]), range(4, 3, -1)):
        for _ in range(2):
            rows = sizes if len(sizes) == 2 else None
            output = torch.zeros(8)
            dist.all_to_all_single(output, torch.arange(8.0) + 10 * rank, rows, rows)
            assert output.tolist() == [*range(4 * rank, 4 * rank + 4), *range(10 + 4 * rank, 14 + 4 * rank)]
    for sizes in ([], (), torch.tensor([], dtype=torch.int64)):
        output = torch.zeros(8)
        dist.all_to_all_single(output, torch.arange(8.0), sizes, sizes)
        assert output.tolist() == [*range(4 * rank, 4 * rank + 4)] * 2


def test_split_sizes_of_other_types(pools: Pools) -> None:
    pools(2).run(run_split_sizes)


# --- modes of torch, and places


class LookingOn(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class LookingOnFunctions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def warnings_as_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def detecting_anomalies() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            yield


def within(make: Callable[[], Any]) -> Callable[[Callable[[], None]], None]:
    def around(run: Callable[[], None]) -> None:
        with make():
            run()

    return around


def in_a_thread(run: Callable[[], None]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def in_a_hook(run: Callable[[], None]) -> None:
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda gradient: run())
    (leaf * 2).sum().backward()


def in_a_backward(run: Callable[[], None]) -> None:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor * 1

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
            run()
            return gradients[0]

    Function.apply(torch.ones(2, requires_grad=True)).sum().backward()


def in_a_finalizer(run: Callable[[], None]) -> None:
    class Last:
        def __del__(self) -> None:
            run()

    one: Any = Last()
    one.itself = one  # so that the garbage collector calls it
    del one
    gc.collect()


AROUND: dict[str, Callable[[Callable[[], None]], None]] = {
    "no_grad": within(torch.no_grad),
    "inference_mode": within(torch.inference_mode),
    "autocast": within(lambda: torch.autocast("cpu")),
    "deterministic": within(deterministic),
    "default device": within(lambda: torch.device("meta")),
    "default dtype": within(lambda: default_dtype(torch.float64)),
    "half by default": within(lambda: default_dtype(torch.float16)),
    "warnings as errors": within(warnings_as_errors),
    "dispatch mode": within(LookingOn),
    "function mode": within(LookingOnFunctions),
    "no torch function": within(torch._C.DisableTorchFunction),
    "anomaly detection": within(detecting_anomalies),
    "dual level": within(forward_ad.dual_level),
    "hooks of saved tensors": within(
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one)
    ),
    "thread": in_a_thread,
    "backward hook": in_a_hook,
    "backward function": in_a_backward,
    "finalizer": in_a_finalizer,
}


def run_around(label: str) -> list[str]:
    rank, problems = dist.get_rank(), []
    group = dist.new_group([0, 1])
    for name, dtype in [*((name, torch.float32) for name in EVERY), *((name, torch.float16) for name in REDUCING)]:
        side = right_side(name)
        expected = outcome_of(side, recast(right(side, rank, 2), dtype))
        for state in ("first", "second"):
            arguments = {**recast(right(side, rank, 2), dtype), "group": group}
            found: list[Any] = []

            def run(side: str = side, arguments: Arguments = arguments, found: list[Any] = found) -> None:
                try:
                    found.append(outcome_of(side, arguments))
                except Exception as error:
                    found.append(f"{type(error).__qualname__}: {error}")

            AROUND[label](run)
            if found[-1:] != [expected]:
                problems.append(f"{side} of {dtype}, {state} call: {found}, not {expected}")
    check_group_works(group)
    dist.destroy_process_group(group)
    return problems


@pytest.mark.parametrize("label", AROUND)
def test_right_calls_within(pools: Pools, label: str) -> None:
    assert pools(2).run(run_around, label) == [[], []]
