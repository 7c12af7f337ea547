"""What a wrong call gets: every line of the contract's section, for every function to which it applies.

All ranks make the same mistake unless a test says otherwise: each gets the error, and the group works afterwards.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as c10d

import comm_orchestrator as dist
from comm_orchestrator.facade import deepspeed_names
from comm_utils.errors import ArgumentTypeError
from comm_utils.testing import RankPool, run_ranks_outcomes

Pools: TypeAlias = Callable[[int], RankPool]
Arguments: TypeAlias = dict[str, Any]


def ones(n: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(n, dtype=dtype)


def peer(rank: int) -> int:
    """The other one of two ranks, and any other of more."""
    return 1 if rank == 0 else 0


#: Right arguments of every function with tensors: (rank, world size) -> keywords. The tests below spoil one at a time.
RIGHT: dict[str, Callable[[int, int], Arguments]] = {
    "all_reduce": lambda r, W: {"tensor": ones()},
    "inference_all_reduce": lambda r, W: {"tensor": ones()},
    "reduce": lambda r, W: {"tensor": ones(), "dst": 0},
    "broadcast": lambda r, W: {"tensor": ones(), "src": 0},
    "all_gather": lambda r, W: {"tensor_list": [ones() for _ in range(W)], "tensor": ones()},
    "all_gather_into_tensor": lambda r, W: {"output_tensor": ones(4 * W), "input_tensor": ones()},
    "gather": lambda r, W: {"tensor": ones(), "gather_list": [ones() for _ in range(W)] if r == 0 else None, "dst": 0},
    "scatter": lambda r, W: {
        "tensor": ones(),
        "scatter_list": [ones() for _ in range(W)] if r == 0 else None,
        "src": 0,
    },
    "reduce_scatter": lambda r, W: {"output": ones(), "input_list": [ones() for _ in range(W)]},
    "reduce_scatter_tensor": lambda r, W: {"output": ones(), "input": ones(4 * W)},
    "all_to_all": lambda r, W: {
        "output_tensor_list": [ones() for _ in range(W)],
        "input_tensor_list": [ones() for _ in range(W)],
    },
    "all_to_all_single": lambda r, W: {"output": ones(4 * W), "input": ones(4 * W)},
    "all_reduce_coalesced": lambda r, W: {"tensors": [ones(), ones()]},
    "all_gather_coalesced": lambda r, W: {
        "output_tensors": [ones(4 * W), ones(4 * W)],
        "input_tensors": [ones(), ones()],
    },
    "reduce_scatter_coalesced": lambda r, W: {"tensors": [ones(4 * W), ones(4 * W)]},
    "send": lambda r, W: {"tensor": ones(), "dst": peer(r)},
    "recv": lambda r, W: {"tensor": ones(), "src": peer(r)},
    "isend": lambda r, W: {"tensor": ones(), "dst": peer(r)},
    "irecv": lambda r, W: {"tensor": ones(), "src": peer(r)},
}
REDUCING = [name for name in RIGHT if "reduce" in name]
POINT_TO_POINT = ["send", "recv", "isend", "irecv"]
COLLECTIVES = [name for name in RIGHT if name not in POINT_TO_POINT]

#: Functions without tensors that need an initialised environment.
PLAIN: dict[str, Callable[[int, int], Arguments]] = {
    "barrier": lambda r, W: {},
    "monitored_barrier": lambda r, W: {},
    "all_gather_object": lambda r, W: {"object_list": [None] * W, "obj": r},
    "allgather_object": lambda r, W: {"obj": r},
    "broadcast_object_list": lambda r, W: {"object_list": [r], "src": 0},
    "broadcast_object": lambda r, W: {"obj": r, "src": 0},
    "gather_object": lambda r, W: {"obj": r, "object_gather_list": [None] * W if r == 0 else None, "dst": 0},
    "scatter_object_list": lambda r, W: {
        "scatter_object_output_list": [None],
        "scatter_object_input_list": list(range(W)) if r == 0 else None,
        "src": 0,
    },
    "reduce_object": lambda r, W: {"obj": r, "dst": 0},
    "send_object_list": lambda r, W: {"object_list": [r], "dst": peer(r)},
    "recv_object_list": lambda r, W: {"object_list": [None], "src": peer(r)},
}


def function(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(dist, name)
    return found


def call(name: str, arguments: Arguments) -> Any:
    result = function(name)(**arguments)
    return result.wait() if isinstance(result, dist.Work) else result


def check_group_works(group: Any = None) -> None:
    """An all_reduce with a checked result, over the fast path and over one that is built from other operations."""
    W = dist.get_world_size(group)
    for dtype in (torch.float32, torch.int16):
        tensor = torch.full((3,), dist.get_rank(group) + 1, dtype=dtype)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [W * (W + 1) / 2] * 3


def caught(what: Callable[[], Any]) -> Exception:
    """What the call raises; it is one of ours and a built-in."""
    try:
        what()
    except Exception as error:
        raised = error
    else:
        raise AssertionError("a wrong call was accepted")
    assert isinstance(raised, dist.CommError), f"{type(raised).__qualname__}: {raised}"
    assert isinstance(raised, (ValueError, RuntimeError, TimeoutError))
    return raised


def expect(name: str, arguments: Arguments, error: type[Exception], texts: Sequence[str]) -> None:
    """The call raises exactly ``error``, with a message that begins with the call's name and holds ``texts``."""
    raised = caught(lambda: call(name, arguments))
    assert type(raised) is error, f"{type(raised).__qualname__}: {raised}"
    assert str(raised).startswith(f"{name}: ")
    for text in texts:
        assert text in str(raised)


# --- right calls work, or else the errors below would prove nothing


def run_right_call(name: str) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    if name in POINT_TO_POINT:
        name = ("send", "recv")[rank] if name in ("send", "recv") else ("isend", "irecv")[rank]
    if name in ("send_object_list", "recv_object_list"):
        name = ("send_object_list", "recv_object_list")[rank]
    call(name, {**RIGHT, **PLAIN}[name](rank, W))
    check_group_works()


@pytest.mark.parametrize("name", [*RIGHT, *PLAIN])
def test_right_call(pools: Pools, name: str) -> None:
    pools(2).run(run_right_call, name)


def test_every_function_is_covered() -> None:
    queries = {name for name in dist.__all__ if name.startswith(("get_", "is_"))}
    management = {
        "available_backends",
        "configure",
        "destroy_process_group",
        "empty_shared",  # in test_shared_memory.py
        "enable_symm_mem_for_group",
        # in test_comms_logger.py
        "export_log",
        "log_rows",
        "log_window",
        "start_profiling_comms",
        "start_profiling_op",
        "start_telemetry",
        "start_trace",
        "stop_profiling_comms",
        "stop_profiling_op",
        "stop_trace",
        "has_comm_data",
        "init_device_mesh",
        "init_distributed",
        "init_process_group",
        "initialize_mesh_device",
        "initialize_module",
        "log_summary",
        "new_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "register_object_type",
        "reset_log",
        "set_backend",
        "set_object_policy",
        "split_group",
        *deepspeed_names.__all__,
    }
    other_names = {"all_gather_single", "reduce_scatter_single"}
    functions = {name for name in dist.__all__ if inspect.isfunction(getattr(dist, name))}
    assert functions - queries - management - other_names == {*RIGHT, *PLAIN, "batch_isend_irecv"}


# --- not initialised


def run_uninitialised(names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        arguments = {**RIGHT, **PLAIN, **NEEDING_A_WORLD}[name](0, 1)
        try:
            function(name)(**arguments)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}" if isinstance(error, RuntimeError) else repr(error)
        else:
            found[name] = "returned"
    assert dist.is_initialized() is False
    assert dist.is_available() is True
    assert dist.available_backends()["gloo"].usable
    return found


NEEDING_A_WORLD: dict[str, Callable[[int, int], Arguments]] = {
    "get_rank": lambda r, W: {},
    "get_world_size": lambda r, W: {},
    "get_local_rank": lambda r, W: {},
    "get_world_group": lambda r, W: {},
    "get_backend": lambda r, W: {},
    "get_process_group_ranks": lambda r, W: {},
    "get_all_ranks_from_group": lambda r, W: {},
    "get_global_rank": lambda r, W: {"group": None, "group_rank": 0},
    "get_group_rank": lambda r, W: {"group": None, "global_rank": 0},
    "new_group": lambda r, W: {"ranks": [0]},
    "init_device_mesh": lambda r, W: {"device_type": "cpu", "mesh_shape": (1,)},
    "initialize_mesh_device": lambda r, W: {"mesh_shape": (1,), "mesh_dim_names": ("data",)},
    "set_backend": lambda r, W: {"name": "gloo"},
    "export_log": lambda r, W: {"path": "log.csv"},
    "log_summary": lambda r, W: {},
    "start_trace": lambda r, W: {"folder": "trace"},
    "stop_trace": lambda r, W: {},
    "destroy_process_group": lambda r, W: {},
    "batch_isend_irecv": lambda r, W: {"p2p_op_list": [dist.P2POp(dist.isend, ones(), 0)]},
}


def test_before_initialisation(bare_pools: Pools) -> None:
    names = [*RIGHT, *PLAIN, *NEEDING_A_WORLD]
    (found,) = bare_pools(1).run(run_uninitialised, names)
    text = "the distributed environment is not initialised; call comm_orchestrator.init_distributed() first"
    for name in names:
        assert found[name] == f"NotInitializedError: {name}: {text}"


# --- tensors that cannot be used


@dataclass(frozen=True)
class Place:
    """A tensor among the arguments of a call.

    Attributes:
        argument: its keyword, with a position where it is in a list.
        written: the call writes it.
        ranks: those on which the call looks at it.
    """

    call: str
    argument: str
    written: bool
    ranks: tuple[int, ...] = (0, 1)

    def __str__(self) -> str:
        return f"{self.call}-{self.argument}"

    def find(self, arguments: Arguments) -> torch.Tensor:
        name, _, position = self.argument.rstrip("]").partition("[")
        found: torch.Tensor = arguments[name][int(position)] if position else arguments[name]
        return found

    def spoil(self, arguments: Arguments, tensor: Any) -> Arguments:
        name, _, position = self.argument.rstrip("]").partition("[")
        if not position:
            return {**arguments, name: tensor}
        changed = list(arguments[name])
        changed[int(position)] = tensor
        return {**arguments, name: changed}


PLACES = [
    Place("all_reduce", "tensor", written=True),
    Place("inference_all_reduce", "tensor", written=True),
    Place("reduce", "tensor", written=True, ranks=(0,)),
    Place("reduce", "tensor", written=False, ranks=(1,)),
    Place("broadcast", "tensor", written=False, ranks=(0,)),
    Place("broadcast", "tensor", written=True, ranks=(1,)),
    Place("all_gather", "tensor_list[1]", written=True),
    Place("all_gather", "tensor", written=False),
    Place("all_gather_into_tensor", "output_tensor", written=True),
    Place("all_gather_into_tensor", "input_tensor", written=False),
    Place("gather", "tensor", written=False),
    Place("gather", "gather_list[1]", written=True, ranks=(0,)),
    Place("scatter", "tensor", written=True),
    Place("scatter", "scatter_list[1]", written=False, ranks=(0,)),
    Place("reduce_scatter", "output", written=True),
    Place("reduce_scatter", "input_list[1]", written=False),
    Place("reduce_scatter_tensor", "output", written=True),
    Place("reduce_scatter_tensor", "input", written=False),
    Place("all_to_all", "output_tensor_list[1]", written=True),
    Place("all_to_all", "input_tensor_list[1]", written=False),
    Place("all_to_all_single", "output", written=True),
    Place("all_to_all_single", "input", written=False),
    Place("all_reduce_coalesced", "tensors[1]", written=True),
    Place("all_gather_coalesced", "output_tensors[1]", written=True),
    Place("all_gather_coalesced", "input_tensors[1]", written=False),
    Place("reduce_scatter_coalesced", "tensors[1]", written=False),
    Place("send", "tensor", written=False),
    Place("recv", "tensor", written=True),
    Place("isend", "tensor", written=False),
    Place("irecv", "tensor", written=True),
]


@dataclass(frozen=True)
class BadTensor:
    make: Callable[[], Any]
    error: type[Exception]
    texts: tuple[str, ...]
    written_only: bool = False


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer releases of torch announce their end
        return torch.quantize_per_tensor(ones(), 0.1, 0, torch.quint8)


BAD_TENSORS = {
    "none": BadTensor(lambda: None, ArgumentTypeError, ("got None", "expected a")),
    "string": BadTensor(lambda: "weights", ArgumentTypeError, ("got 'weights' of type str", "expected a")),
    "number": BadTensor(lambda: 1.5, ArgumentTypeError, ("got 1.5 of type float", "expected a")),
    "numpy": BadTensor(lambda: ones().numpy(), ArgumentTypeError, ("of type ndarray", "expected a")),
    "meta": BadTensor(
        lambda: ones().to("meta"), dist.ArgumentError, ("got a tensor on meta", "of this group serves cpu", "move")
    ),
    "sparse": BadTensor(
        lambda: ones().to_sparse(), ArgumentTypeError, ("got a sparse tensor", "sparse_coo", "to_dense()")
    ),
    "nested": BadTensor(lambda: torch.nested.nested_tensor([ones()]), ArgumentTypeError, ("got a nested tensor",)),
    "quantized": BadTensor(quantized, ArgumentTypeError, ("got a quantized tensor", "quint8", "int_repr()")),
    "expanded": BadTensor(
        lambda: ones(1).expand(4), dist.ArgumentError, ("shape (4,)", "strides (0,)", "gaps or overlaps"), True
    ),
    "strided": BadTensor(
        lambda: ones(8)[::2], dist.ArgumentError, ("shape (4,)", "strides (2,)", "contiguous or dense"), True
    ),
    "overlapping": BadTensor(
        lambda: ones(3).as_strided((2, 2), (1, 1)), dist.ArgumentError, ("shape (2, 2)", "strides (1, 1)"), True
    ),
    "conjugated": BadTensor(
        lambda: ones(4, torch.complex64).conj(), dist.ArgumentError, ("lazily conjugated", "resolve_conj()"), True
    ),
    "negated": BadTensor(
        lambda: torch._neg_view(ones()), dist.ArgumentError, ("lazily negated", "resolve_neg()"), True
    ),
}


def run_bad_tensor(place: int, bad: str) -> None:
    where, what = PLACES[place], BAD_TENSORS[bad]
    rank = dist.get_rank()
    if rank in where.ranks:
        arguments = where.spoil(RIGHT[where.call](rank, 2), what.make())
        expect(where.call, arguments, what.error, (f"{where.argument}: got", *what.texts))
    check_group_works()


@pytest.mark.parametrize(
    ("place", "bad"),
    [
        pytest.param(position, bad, id=f"{place}-{bad}{'' if place.ranks == (0, 1) else place.ranks}")
        for position, place in enumerate(PLACES)
        for bad, tensor in BAD_TENSORS.items()
        if place.written or not tensor.written_only
    ],
)
def test_tensor_that_cannot_be_used(pools: Pools, place: int, bad: str) -> None:
    pools(2).run(run_bad_tensor, place, bad)


def run_strided_input(place: int) -> None:
    where = PLACES[place]
    rank = dist.get_rank()
    arguments = RIGHT[where.call](rank, 2)
    if rank in where.ranks:
        whole = where.find(arguments)
        arguments = where.spoil(arguments, torch.ones(2 * whole.numel())[::2])
    call(where.call, arguments)
    check_group_works()


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(position, id=str(place))
        for position, place in enumerate(PLACES)
        if not place.written and place.call not in POINT_TO_POINT
    ],
)
def test_strided_tensor_that_is_only_read_is_accepted(pools: Pools, place: int) -> None:
    pools(2).run(run_strided_input, place)


# --- everything else that one rank's own arguments show


@dataclass(frozen=True)
class Row:
    """A call whose right arguments are changed so that it is wrong.

    Attributes:
        changes: (rank, world size) -> arguments that replace right ones.
        ranks: those on which it is wrong; the others do not call, but for objects, where they are told.
    """

    call: str
    changes: Callable[[int, int], Arguments]
    error: type[Exception]
    texts: tuple[str, ...]
    ranks: tuple[int, ...] = (0, 1)


def tensors(count: int, n: int = 4, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [ones(n, dtype) for _ in range(count)]


def recast(value: Any, dtype: torch.dtype) -> Any:
    """Arguments with every tensor in another dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype)
    if isinstance(value, dict):
        return {name: recast(entry, dtype) for name, entry in value.items()}
    return [recast(entry, dtype) for entry in value] if isinstance(value, list) else value


VALUE, TYPE = dist.ArgumentError, ArgumentTypeError
NOT_DIVISIBLE = ("does not divide by the world size of 2",)

SIZES_AND_LISTS = {
    # sizes that do not divide by the world size
    "reduce_scatter-odd-input": Row(
        "reduce_scatter",
        lambda r, W: {"input_list": ones(9)},
        VALUE,
        ("input: got 9 elements (shape (9,))", *NOT_DIVISIBLE, "list of 2 tensors"),
    ),
    "reduce_scatter_tensor-odd-input": Row(
        "reduce_scatter_tensor", lambda r, W: {"input": ones(9)}, VALUE, ("input: got 9 elements", *NOT_DIVISIBLE)
    ),
    "all_to_all_single-odd-input": Row(
        "all_to_all_single",
        lambda r, W: {"input": ones(9)},
        VALUE,
        ("input: got 9 rows", *NOT_DIVISIBLE, "input_split_sizes"),
    ),
    "all_to_all_single-odd-output": Row(
        "all_to_all_single",
        lambda r, W: {"output": ones(9)},
        VALUE,
        ("output: got 9 rows", *NOT_DIVISIBLE, "output_split_sizes"),
    ),
    # output of the wrong size
    "all_gather-small-list": Row(
        "all_gather",
        lambda r, W: {"tensor_list": tensors(W, 3)},
        VALUE,
        ("tensor_list[", "got 3 elements (shape (3,))", "expected 4"),
    ),
    "all_gather_into_tensor-small-output": Row(
        "all_gather_into_tensor",
        lambda r, W: {"output_tensor": ones(7)},
        VALUE,
        ("output_tensor: got 7 elements (shape (7,))", "expected 8", "4 elements of input_tensor from each of 2 ranks"),
    ),
    "gather-small-list": Row(
        "gather",
        lambda r, W: {"gather_list": [ones(), ones(3)]},
        VALUE,
        ("gather_list[1]: got 3 elements", "expected 4"),
        (0,),
    ),
    "scatter-large-list": Row(
        "scatter",
        lambda r, W: {"scatter_list": [ones(), ones(5)]},
        VALUE,
        ("scatter_list[1]: got 5 elements", "expected 4"),
        (0,),
    ),
    "reduce_scatter-large-output": Row(
        "reduce_scatter", lambda r, W: {"output": ones(5)}, VALUE, ("input_list[", "got 4 elements", "expected 5")
    ),
    "reduce_scatter-one-tensor-large-output": Row(
        "reduce_scatter",
        lambda r, W: {"output": ones(5), "input_list": ones(8)},
        VALUE,
        ("output: got 5 elements", "expected 4", "world size of 2"),
    ),
    "reduce_scatter_tensor-small-output": Row(
        "reduce_scatter_tensor", lambda r, W: {"output": ones(2)}, VALUE, ("output: got 2 elements", "expected 4")
    ),
    "all_to_all-own-part": Row(
        "all_to_all",
        lambda r, W: {"output_tensor_list": tensors(W, 3)},
        VALUE,
        ("output_tensor_list[", "got 3 elements", "expected 4", "this rank"),
    ),
    "all_to_all_single-trailing-dimensions": Row(
        "all_to_all_single",
        lambda r, W: {"output": torch.ones(4, 2), "input": torch.ones(4, 3)},
        VALUE,
        ("output: got shape (4, 2)", "expected (rows, 3)", "(4, 3)"),
    ),
    "all_gather_coalesced-small-output": Row(
        "all_gather_coalesced",
        lambda r, W: {"output_tensors": [ones(8), ones(7)]},
        VALUE,
        ("output_tensors[1]: got 7 elements", "expected 8"),
    ),
    "all_gather_coalesced-small-part": Row(
        "all_gather_coalesced",
        lambda r, W: {"output_tensors": [ones(8), [ones(), ones(3)]]},
        VALUE,
        ("output_tensors[1][1]: got 3 elements", "expected 4"),
    ),
    "all_gather_coalesced-same-output-twice": Row(
        "all_gather_coalesced",
        lambda r, W: {"output_tensors": [ones(8)] * 2},
        VALUE,
        ("output_tensors: got tensors that share memory", "one memory for each output"),
    ),
    # output of the wrong dtype
    "all_gather-dtype": Row(
        "all_gather",
        lambda r, W: {"tensor_list": tensors(W, 4, torch.int32)},
        VALUE,
        ("tensor_list[0]: got dtype torch.int32", "expected torch.float32"),
    ),
    "all_gather_into_tensor-dtype": Row(
        "all_gather_into_tensor",
        lambda r, W: {"output_tensor": ones(8, torch.float64)},
        VALUE,
        ("output_tensor: got dtype torch.float64", "expected torch.float32"),
    ),
    "gather-dtype": Row(
        "gather",
        lambda r, W: {"gather_list": tensors(W, 4, torch.float16)},
        VALUE,
        ("gather_list[0]: got dtype torch.float16", "expected torch.float32"),
        (0,),
    ),
    "scatter-dtype": Row(
        "scatter",
        lambda r, W: {"scatter_list": tensors(W, 4, torch.float16)},
        VALUE,
        ("scatter_list[0]: got dtype torch.float16", "expected torch.float32"),
        (0,),
    ),
    "reduce_scatter-dtype": Row(
        "reduce_scatter",
        lambda r, W: {"input_list": [ones(), ones(4, torch.int64)]},
        VALUE,
        ("input_list[1]: got dtype torch.int64", "expected torch.float32"),
    ),
    "reduce_scatter-one-tensor-dtype": Row(
        "reduce_scatter",
        lambda r, W: {"input_list": ones(8, torch.int64)},
        VALUE,
        ("got dtype torch.float32", "expected torch.int64"),
    ),
    "reduce_scatter_tensor-dtype": Row(
        "reduce_scatter_tensor",
        lambda r, W: {"output": ones(4, torch.int64)},
        VALUE,
        ("output: got dtype torch.int64", "expected torch.float32"),
    ),
    "all_to_all-output-dtype": Row(
        "all_to_all",
        lambda r, W: {"output_tensor_list": tensors(W, 4, torch.int8)},
        VALUE,
        ("output_tensor_list[0]: got dtype torch.int8", "expected torch.float32"),
    ),
    "all_to_all-input-dtype": Row(
        "all_to_all",
        lambda r, W: {"input_tensor_list": [ones(), ones(4, torch.int8)]},
        VALUE,
        ("input_tensor_list[1]: got dtype torch.int8", "expected torch.float32"),
    ),
    "all_to_all_single-dtype": Row(
        "all_to_all_single",
        lambda r, W: {"output": ones(8, torch.bool)},
        VALUE,
        ("output: got dtype torch.bool", "expected torch.float32"),
    ),
    "all_gather_coalesced-dtype": Row(
        "all_gather_coalesced",
        lambda r, W: {"output_tensors": [ones(8), ones(8, torch.int64)]},
        VALUE,
        ("output_tensors[1]: got dtype torch.int64", "expected torch.float32"),
    ),
    # lists of the wrong length, or no lists
    "all_gather-short-list": Row(
        "all_gather",
        lambda r, W: {"tensor_list": tensors(1)},
        VALUE,
        ("tensor_list: got a list of 1", "expected 2 tensors", "one for each rank"),
    ),
    "all_gather-two-tensors": Row(
        "all_gather", lambda r, W: {"tensor_list": ones(8)}, TYPE, ("tensor_list: got", "expected a list of 2 tensors")
    ),
    "gather-long-list": Row(
        "gather",
        lambda r, W: {"gather_list": tensors(3)},
        VALUE,
        ("gather_list: got a list of 3", "expected 2 tensors"),
        (0,),
    ),
    "gather-no-list": Row(
        "gather",
        lambda r, W: {"gather_list": None},
        TYPE,
        ("gather_list: got None", "expected a list of 2 tensors"),
        (0,),
    ),
    "gather-list-elsewhere": Row(
        "gather", lambda r, W: {"gather_list": tensors(W)}, VALUE, ("gather_list: got a list", "not dst"), (1,)
    ),
    "gather-tensor-elsewhere": Row(
        "gather", lambda r, W: {"gather_list": ones(8)}, TYPE, ("gather_list: got a tensor", "expected a list"), (1,)
    ),
    "scatter-short-list": Row(
        "scatter",
        lambda r, W: {"scatter_list": tensors(1)},
        VALUE,
        ("scatter_list: got a list of 1", "expected 2 tensors"),
        (0,),
    ),
    "scatter-no-list": Row(
        "scatter",
        lambda r, W: {"scatter_list": None},
        TYPE,
        ("scatter_list: got None", "expected a list of 2 tensors"),
        (0,),
    ),
    "scatter-list-elsewhere": Row(
        "scatter", lambda r, W: {"scatter_list": tensors(W)}, VALUE, ("scatter_list: got a list", "not src"), (1,)
    ),
    "scatter-tensor-elsewhere": Row(
        "scatter", lambda r, W: {"scatter_list": ones(8)}, TYPE, ("scatter_list: got a tensor", "expected a list"), (1,)
    ),
    "reduce_scatter-long-list": Row(
        "reduce_scatter",
        lambda r, W: {"input_list": tensors(3)},
        VALUE,
        ("input_list: got a list of 3", "expected 2 tensors"),
    ),
    "reduce_scatter-no-list": Row(
        "reduce_scatter", lambda r, W: {"input_list": None}, TYPE, ("input_list: got None", "expected a list of 2")
    ),
    "all_to_all-short-input": Row(
        "all_to_all",
        lambda r, W: {"input_tensor_list": tensors(1)},
        VALUE,
        ("input_tensor_list: got a list of 1", "expected 2 tensors"),
    ),
    "all_to_all-long-output": Row(
        "all_to_all",
        lambda r, W: {"output_tensor_list": tensors(3)},
        VALUE,
        ("output_tensor_list: got a list of 3", "expected 2 tensors"),
    ),
    "all_to_all-no-list": Row(
        "all_to_all", lambda r, W: {"input_tensor_list": ones(8)}, TYPE, ("input_tensor_list: got", "expected a list")
    ),
    "all_reduce_coalesced-no-list": Row(
        "all_reduce_coalesced", lambda r, W: {"tensors": ones()}, TYPE, ("tensors: got Tensor", "expected a list")
    ),
    "all_gather_coalesced-no-list": Row(
        "all_gather_coalesced", lambda r, W: {"input_tensors": ones()}, TYPE, ("input_tensors: got Tensor", "a list")
    ),
    "all_gather_coalesced-output-no-list": Row(
        "all_gather_coalesced", lambda r, W: {"output_tensors": None}, TYPE, ("output_tensors: got NoneType", "a list")
    ),
    "all_gather_coalesced-short-output": Row(
        "all_gather_coalesced",
        lambda r, W: {"output_tensors": tensors(1, 8)},
        VALUE,
        ("output_tensors: got a list of 1", "expected 2"),
    ),
    "all_gather_coalesced-short-part": Row(
        "all_gather_coalesced",
        lambda r, W: {"output_tensors": [ones(8), tensors(1)]},
        VALUE,
        ("output_tensors[1]: got a list of 1", "expected 2 tensors"),
    ),
    "reduce_scatter_coalesced-no-list": Row(
        "reduce_scatter_coalesced", lambda r, W: {"tensors": "all"}, TYPE, ("tensors: got str", "expected a list")
    ),
    # split sizes
    "all_to_all_single-few-splits": Row(
        "all_to_all_single",
        lambda r, W: {"input_split_sizes": [8]},
        VALUE,
        ("input_split_sizes: got 1 sizes", "expected 2"),
    ),
    "all_to_all_single-splits-that-do-not-add-up": Row(
        "all_to_all_single",
        lambda r, W: {"output_split_sizes": [4, 3]},
        VALUE,
        ("output_split_sizes: got [4, 3]", "adds up to 7", "add up to 8"),
    ),
    "all_to_all_single-negative-split": Row(
        "all_to_all_single",
        lambda r, W: {"input_split_sizes": [-1, 9]},
        VALUE,
        ("input_split_sizes: got [-1, 9]", "0 or more"),
    ),
    "all_to_all_single-split-of-no-integer": Row(
        "all_to_all_single",
        lambda r, W: {"input_split_sizes": [4.0, 4.0]},
        TYPE,
        ("input_split_sizes: got 4.0 of type float", "expected an integer"),
    ),
    "all_to_all_single-splits-of-no-list": Row(
        "all_to_all_single",
        lambda r, W: {"output_split_sizes": 4},
        TYPE,
        ("output_split_sizes: got 4 of type int", "expected a list of 2 integers"),
    ),
    "all_to_all_single-own-part": Row(
        "all_to_all_single",
        lambda r, W: {"output_split_sizes": [3, 5], "input_split_sizes": [5, 3]},
        VALUE,
        ("output_split_sizes: got", "this rank", "expected the same number in both"),
    ),
    # lists of objects
    "all_gather_object-short-list": Row(
        "all_gather_object",
        lambda r, W: {"object_list": [None]},
        VALUE,
        ("object_list: got a list of 1", "expected 2 entries"),
    ),
    "all_gather_object-no-list": Row(
        "all_gather_object", lambda r, W: {"object_list": None}, TYPE, ("object_list: got None", "expected a list of 2")
    ),
    "broadcast_object_list-no-list": Row(
        "broadcast_object_list", lambda r, W: {"object_list": (1,)}, TYPE, ("object_list: got", "expected a list")
    ),
    "gather_object-short-list": Row(
        "gather_object",
        lambda r, W: {"object_gather_list": []},
        VALUE,
        ("object_gather_list: got a list of 0", "expected 2 entries"),
        (0,),
    ),
    "gather_object-list-elsewhere": Row(
        "gather_object",
        lambda r, W: {"object_gather_list": [None, None]},
        VALUE,
        ("object_gather_list: got a list", "not dst"),
        (1,),
    ),
    "scatter_object_list-empty-output": Row(
        "scatter_object_list",
        lambda r, W: {"scatter_object_output_list": []},
        VALUE,
        ("scatter_object_output_list: got an empty list", "expected one entry"),
    ),
    "scatter_object_list-long-input": Row(
        "scatter_object_list",
        lambda r, W: {"scatter_object_input_list": [1, 2, 3]},
        VALUE,
        ("scatter_object_input_list: got a list of 3", "expected 2 entries"),
        (0,),
    ),
    "send_object_list-no-list": Row(
        "send_object_list", lambda r, W: {"object_list": None}, TYPE, ("object_list: got", "expected a list")
    ),
    "recv_object_list-no-list": Row(
        "recv_object_list", lambda r, W: {"object_list": "two"}, TYPE, ("object_list: got", "expected a list")
    ),
}

_OPS = "'sum', 'product', 'min', 'max', 'band', 'bor', 'bxor', 'avg'"
UNKNOWN_OPS: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "mean": ("mean", VALUE, ("op: got 'mean'", _OPS)),
    "typing-error": ("prodct", VALUE, ("op: got 'prodct'", "did you mean 'product'?")),
    "empty": ("", VALUE, ("op: got ''", _OPS)),
    "none": (None, TYPE, ("op: got None of type NoneType", _OPS)),
    "number": (2.5, TYPE, ("op: got 2.5 of type float", _OPS)),
    "list": (["sum"], TYPE, ("op: got ['sum'] of type list", _OPS)),
    "unused": (dist.ReduceOp.UNUSED, VALUE, ("op: got <ReduceOp.UNUSED", _OPS)),
    "premul-sum": (c10d.ReduceOp.PREMUL_SUM, VALUE, ("op: got <RedOpType.PREMUL_SUM", _OPS)),
}
# op, dtype -> what the message says
REFUSED_REDUCTIONS = {
    ("band", torch.float32): ("op 'band' is not defined for torch.float32", "integer or bool"),
    ("bor", torch.float16): ("op 'bor' is not defined for torch.float16", "integer or bool"),
    ("bxor", torch.bfloat16): ("op 'bxor' is not defined for torch.bfloat16", "integer or bool"),
    ("avg", torch.int64): ("op 'avg' is not defined for torch.int64", "'sum'", "float"),
    ("avg", torch.uint8): ("op 'avg' is not defined for torch.uint8", "'sum'", "float"),
    ("avg", torch.bool): ("op 'avg' is not defined for torch.bool", "'sum'", "float"),
    ("min", torch.complex64): ("op 'min' is not defined for torch.complex64", "'sum' and 'avg'"),
    ("max", torch.complex128): ("op 'max' is not defined for torch.complex128", "'sum' and 'avg'"),
    ("product", torch.complex64): ("op 'product' is not defined for torch.complex64", "'sum' and 'avg'"),
    ("band", torch.complex64): ("op 'band' is not defined for torch.complex64", "'sum' and 'avg'"),
    ("sum", torch.float8_e4m3fn): ("torch.float8_e4m3fn tensors can be moved but not reduced", "bfloat16"),
    ("avg", torch.float8_e5m2): ("torch.float8_e5m2 tensors can be moved but not reduced", "bfloat16"),
    ("max", torch.float8_e4m3fnuz): ("torch.float8_e4m3fnuz tensors can be moved but not reduced", "bfloat16"),
}


def _operations() -> dict[str, Row]:
    rows = {}
    for name in REDUCING:
        for label, (op, error, texts) in UNKNOWN_OPS.items():
            rows[f"{name}-op-{label}"] = Row(name, lambda r, W, op=op: {"op": op}, error, texts)
        for (op, dtype), texts in REFUSED_REDUCTIONS.items():
            rows[f"{name}-{op}-{dtype}"] = Row(
                name,
                lambda r, W, name=name, op=op, dtype=dtype: {**recast(RIGHT[name](r, W), dtype), "op": op},
                VALUE,
                texts,
            )
    return rows


ROOTS = {
    "broadcast": "src",
    "reduce": "dst",
    "gather": "dst",
    "scatter": "src",
    "send": "dst",
    "isend": "dst",
    "recv": "src",
    "irecv": "src",
    "broadcast_object_list": "src",
    "broadcast_object": "src",
    "gather_object": "dst",
    "scatter_object_list": "src",
    "reduce_object": "dst",
    "send_object_list": "dst",
    "recv_object_list": "src",
}
WITHOUT_GROUP_RANK = {"broadcast_object", "reduce_object"}
NEEDING_A_ROOT = {"broadcast", "reduce", "send", "isend", "send_object_list"}


def _ranks() -> dict[str, Row]:
    rows = {}
    for name, key in ROOTS.items():
        for label, value, error, texts in (
            ("outside", 2, VALUE, ("got rank 2", "not in the group", "[0, 1]")),
            ("negative", -1, VALUE, ("got rank -1", "not in the group", "[0, 1]")),
            ("string", "0", TYPE, ("got '0' of type str", "expected an integer")),
            ("float", 1.0, TYPE, ("got 1.0 of type float", "expected an integer")),
            ("bool", True, TYPE, ("got True of type bool", "expected an integer")),
        ):
            changes = lambda r, W, key=key, value=value: {key: value}  # noqa: E731
            rows[f"{name}-{key}-{label}"] = Row(name, changes, error, (f"{key}: {texts[0]}", *texts[1:]))
        if name in NEEDING_A_ROOT:
            rows[f"{name}-{key}-missing"] = Row(
                name, lambda r, W, key=key: {key: None}, VALUE, (f"{key}: missing", "expected the global rank")
            )
        if name in WITHOUT_GROUP_RANK:
            continue
        local = f"group_{key}"
        rows[f"{name}-both"] = Row(
            name, lambda r, W, local=local: {local: 1}, VALUE, (f"both {key}=", f"{local}=1", "expected one of them")
        )
        for value, text in ((2, "got 2"), (-1, "got -1")):
            rows[f"{name}-{local}-{value}"] = Row(
                name,
                lambda r, W, key=key, local=local, value=value: {key: None, local: value},
                VALUE,
                (f"{local}: {text}", "expected 0 to 1 in a group of 2"),
            )
        if name.startswith(("send", "recv", "isend", "irecv")):
            rows[f"{name}-to-itself"] = Row(
                name, lambda r, W, key=key: {key: r}, VALUE, (f"{key}: got this rank itself", "another member")
            )
            rows[f"{name}-to-itself-in-the-group"] = Row(
                name,
                lambda r, W, key=key, local=local: {key: None, local: r},
                VALUE,
                (f"{key}: got this rank itself", "another member"),
            )
    for name in POINT_TO_POINT:
        for label, tag in (("negative", -1), ("string", "first"), ("float", 1.5), ("none", None), ("bool", True)):
            rows[f"{name}-tag-{label}"] = Row(
                name,
                lambda r, W, tag=tag: {"tag": tag},
                VALUE if tag == -1 else TYPE,
                (f"tag: got {tag!r}", "expected an integer of 0 or more"),
            )
        rows[f"{name}-tag-huge"] = Row(
            name, lambda r, W: {"tag": 2**70}, VALUE, (f"tag: got {2**70}", "expected an integer of 0 to 2147483647")
        )
    return rows


def _groups() -> dict[str, Row]:
    rows = {}
    for name in (*RIGHT, *PLAIN):
        for label, group, text in (
            ("string", "world", "got 'world' of type str"),
            ("ranks", [0, 1], "got a list of 2"),
            ("number", 0, "got 0 of type int"),
        ):
            rows[f"{name}-group-{label}"] = Row(
                name,
                lambda r, W, group=group: {"group": group},
                TYPE,
                (f"group: {text}", "expected a process group from new_group()", "None for the world group"),
            )
    return rows


ROWS = {**SIZES_AND_LISTS, **_operations(), **_ranks(), **_groups()}


def run_row(label: str) -> None:
    row, rank = ROWS[label], dist.get_rank()
    if rank in row.ranks:
        right = {**RIGHT, **PLAIN}[row.call](rank, 2)
        expect(row.call, {**right, **row.changes(rank, 2)}, row.error, row.texts)
    elif "object" in row.call:  # all ranks are told before any raises
        right = {**RIGHT, **PLAIN}[row.call](rank, 2)
        told = (f"rank {row.ranks[0]} called with a wrong argument", "as the error there says")
        expect(row.call, right, dist.ObjectExchangeError, told)
    check_group_works()


@pytest.mark.parametrize("label", ROWS)
def test_wrong_argument(pools: Pools, label: str) -> None:
    pools(2).run(run_row, label)


# --- batches of messages


def message(**changes: Any) -> dist.P2POp:
    rank = dist.get_rank()
    return dist.P2POp(**{"op": (dist.isend, dist.irecv)[rank], "tensor": ones(), "peer": peer(rank), **changes})


BATCHES: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "none": (lambda: None, TYPE, ("p2p_op_list: got None", "expected a list of at least one P2POp")),
    "empty": (lambda: [], TYPE, ("p2p_op_list: got []", "at least one P2POp")),
    "one": (lambda: message(), TYPE, ("p2p_op_list: got", "expected a list")),
    "tensors": (lambda: [ones()], TYPE, ("p2p_op_list: got tensor", "expected a list of P2POp")),
    "no tensor": (lambda: [message(), message(tensor=None)], TYPE, ("p2p_op_list[1].tensor: got None",)),
    "meta": (
        lambda: [message(), message(tensor=ones().to("meta"))],
        VALUE,
        ("p2p_op_list[1].tensor: got a tensor on meta", "serves cpu"),
    ),
    "sparse": (lambda: [message(tensor=ones().to_sparse())], TYPE, ("p2p_op_list[0].tensor: got a sparse tensor",)),
    "outside": (lambda: [message(peer=2)], VALUE, ("peer: got rank 2", "not in the group", "[0, 1]")),
    "missing": (lambda: [message(peer=None)], VALUE, ("peer: missing",)),
    "both": (lambda: [message(group_peer=1)], VALUE, ("both peer=", "group_peer=1")),
    "itself": (lambda: [message(peer=dist.get_rank())], VALUE, ("p2p_op_list[0].peer: got this rank itself",)),
    "tag": (lambda: [message(tag=-1)], VALUE, ("tag: got -1", "0 or more")),
    "group": (lambda: [message(group="world")], TYPE, ("group: got 'world' of type str",)),
    "groups": (lambda: [message(), message(group="world")], VALUE, ("p2p_op_list[1].group: got another",)),
}


def run_batch(label: str) -> None:
    make, error, texts = BATCHES[label]
    expect("batch_isend_irecv", {"p2p_op_list": make()}, error, texts)
    if dist.get_rank() == 1:  # where it is written
        strided = [message(tensor=ones(8)[::2])]
        expect("batch_isend_irecv", {"p2p_op_list": strided}, VALUE, ("p2p_op_list[0].tensor: got", "gaps or overlaps"))
    check_group_works()


@pytest.mark.parametrize("label", BATCHES)
def test_wrong_batch(pools: Pools, label: str) -> None:
    pools(2).run(run_batch, label)


def run_wrong_p2p_op() -> None:
    for op in ("isend", None, dist.send, torch.add):
        raised = caught(lambda op=op: dist.P2POp(op, ones(), 0))
        assert type(raised) is ArgumentTypeError
        assert str(raised).startswith("P2POp: op: got ")
        assert "expected isend or irecv" in str(raised)
    works = dist.batch_isend_irecv([message()])
    for work in works:
        work.wait()
    check_group_works()


def test_wrong_operation_in_a_batch(pools: Pools) -> None:
    pools(2).run(run_wrong_p2p_op)


# --- groups: ranks that are not in them, and those that are gone


def run_subgroup() -> None:
    rank = dist.get_rank()
    group = dist.new_group([1, 2])
    if rank > 0:
        for name, key in ROOTS.items():
            right = {**RIGHT, **PLAIN}[name](rank, 2)
            for outside in (0, 3):
                texts = (f"{key}: got rank {outside}", "not in the group", "its global ranks are [1, 2]")
                expect(name, {**right, key: outside, "group": group}, VALUE, texts)
            if name in ("gather", "scatter", "gather_object", "scatter_object_list"):  # rank 0 is no default there
                expect(name, {**right, key: None, "group": group}, VALUE, (f"{key}: missing",))
        check_group_works(group)
        dist.destroy_process_group(group)
    check_group_works()


def test_rank_outside_a_group(pools: Pools) -> None:
    pools(3).run(run_subgroup)


class Collect(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def run_non_member() -> None:
    from comm_collectives import arguments

    arguments._warned.clear()
    rank, log = dist.get_rank(), Collect()
    logging.getLogger("comm").addHandler(log)
    group = dist.new_group([0, 2])
    if rank == 1:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
        for name in (*RIGHT, *PLAIN):
            tensor = ones()
            arguments_ = {**RIGHT, **PLAIN}[name](0, 2)
            arguments_.update({key: tensor for key in ("tensor", "output") if key in arguments_}, group=group)
            for _ in range(2):
                assert function(name)(**arguments_) == (-1 if name in ("recv", "recv_object_list") else None), name
            assert torch.equal(tensor, ones())
            (record,) = log.records
            assert record.levelno == logging.WARNING
            text = f"{name}: this rank is not a member of the group; the call does nothing"
            assert record.getMessage() == text
            log.records.clear()
        for name in ("all_reduce", "all_gather_into_tensor", "broadcast"):  # with a handle there is nothing to wait for
            assert function(name)(**RIGHT[name](0, 2), group=group, async_op=True) is None
        assert dist.batch_isend_irecv([dist.P2POp(dist.isend, ones(), 0, group)]) == []
        assert (dist.get_rank(group), dist.get_world_size(group)) == (-1, -1)
        dist.destroy_process_group(group)
    else:
        check_group_works(group)
        assert log.records == []
        dist.destroy_process_group(group)
    logging.getLogger("comm").removeHandler(log)
    check_group_works()


def test_calls_of_a_rank_outside_the_group_do_nothing(pools: Pools) -> None:
    pools(3).run(run_non_member)


def run_destroyed_group() -> None:
    group = dist.new_group([0, 1])
    check_group_works(group)
    dist.destroy_process_group(group)
    for name in (*RIGHT, *PLAIN):
        right = {**RIGHT, **PLAIN}[name](dist.get_rank(), 2)
        expect(name, {**right, "group": group}, dist.NotInitializedError, ("no longer exists; make a new one",))
    check_group_works()


def test_group_that_was_destroyed(pools: Pools) -> None:
    pools(2).run(run_destroyed_group)


QUERIES: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    **{
        f"{name}-{label}": (
            lambda name=name, group=group: getattr(dist, name)(group=group),
            TYPE,
            (f"{name}: group: got", "expected a process group from new_group()"),
        )
        for name in ("get_rank", "get_world_size", "get_backend", "get_process_group_ranks", "destroy_process_group")
        for label, group in (("string", "world"), ("list", [0, 1]), ("number", 0))
    },
    "get_global_rank": (lambda: dist.get_global_rank(None, 2), VALUE, ("group_rank: got 2", "expected 0 to 1")),
    "get_global_rank-string": (lambda: dist.get_global_rank(None, "0"), TYPE, ("group_rank: got '0'", "an integer")),
    "get_group_rank": (lambda: dist.get_group_rank(None, 2), VALUE, ("global_rank: got 2", "one of [0, 1]")),
    "new_group-string": (lambda: dist.new_group("01"), TYPE, ("new_group: ranks: got '01'", "a list of global ranks")),
    "new_group-number": (lambda: dist.new_group(0), TYPE, ("new_group: ranks: got 0", "a list of global ranks")),
    "new_group-empty": (lambda: dist.new_group([]), VALUE, ("new_group: ranks: got an empty list", "at least one")),
    "new_group-twice": (lambda: dist.new_group([0, 1, 1]), VALUE, ("new_group: ranks: got [0, 1, 1]", "twice")),
    "new_group-outside": (lambda: dist.new_group([0, 2]), VALUE, ("new_group: ranks: got [0, 2]", "0 to 1", "[2]")),
    "new_group-negative": (lambda: dist.new_group([-1]), VALUE, ("new_group: ranks: got [-1]", "0 to 1")),
    "new_group-floats": (lambda: dist.new_group([0.0]), TYPE, ("new_group: ranks: got 0.0", "an integer")),
    "new_group-timeout": (lambda: dist.new_group(timeout="1"), TYPE, ("new_group: timeout: got '1'", "seconds")),
    "new_group-endless-timeout": (
        lambda: dist.new_group(timeout=timedelta.max),
        VALUE,
        ("new_group: timeout: got", "expected at most 36525 days"),
    ),
    "new_group-negative-timeout": (
        lambda: dist.new_group(timeout=-1),
        VALUE,
        ("new_group: timeout: got -1", "more than 0"),
    ),
    "new_group-unknown-backend": (
        lambda: dist.new_group(backend="gl00"),
        dist.BackendUnavailableError,
        ("new_group: backend 'gl00'", "did you mean 'gloo'?"),
    ),
    "new_group-backend-number": (lambda: dist.new_group(backend=5), TYPE, ("new_group: backend: got 5", "a string")),
    "get_rank-mesh": (
        lambda: dist.get_rank(dist.init_device_mesh("cpu", (2,))),
        TYPE,
        ("get_rank: group: got DeviceMesh", "pass mesh.get_group()"),
    ),
    "all_gather-swapped": (
        lambda: dist.all_gather(ones(), [ones(), ones()]),
        TYPE,
        ("all_gather: tensor_list: got a tensor, and after it a list of 2", "all_gather(tensor_list, tensor)"),
    ),
    "reduce_object-op": (lambda: dist.reduce_object(1, 0, "summ"), VALUE, ("reduce_object: op: got 'summ'",)),
    "new_group-unavailable-backend": (
        lambda: dist.new_group(backend="mpi"),
        dist.BackendUnavailableError,
        ("new_group: backend 'mpi' cannot be used", "MPI"),
    ),
    "monitored_barrier-timeout": (
        lambda: dist.monitored_barrier(timeout="1"),
        TYPE,
        ("monitored_barrier: timeout: got '1'", "seconds"),
    ),
    "init_device_mesh": (
        lambda: dist.init_device_mesh("cpu", (3, 1)),
        VALUE,
        ("init_device_mesh: mesh_shape: got (3, 1)", "3 ranks", "2, the world size"),
    ),
    "set_backend": (lambda: dist.set_backend("nccl"), VALUE, ("name: got 'nccl'", "' is active")),
    "set_backend-number": (lambda: dist.set_backend(1), TYPE, ("set_backend: name: got 1", "a string")),
    "configure": (
        lambda: dist.configure(prof_ops="all_reduce"),
        TYPE,
        ("configure: prof_ops: got 'all_reduce'", "['all_reduce']"),
    ),
}


def run_query(label: str) -> None:
    make, error, texts = QUERIES[label]
    raised = caught(make)
    assert type(raised) is error, f"{type(raised).__qualname__}: {raised}"
    for text in texts:
        assert text in str(raised)
    check_group_works()
    group = dist.new_group([0, 1])  # the counters that name groups have not drifted apart
    check_group_works(group)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("label", QUERIES)
def test_wrong_query(pools: Pools, label: str) -> None:
    pools(2).run(run_query, label)


# --- what looks wrong and works


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
        arguments = recast(emptied(RIGHT[name](rank, W)), dtype)
        if name in REDUCING:
            arguments["op"] = "sum"
        call(name, arguments)
        if name not in ("inference_all_reduce", *POINT_TO_POINT):
            call(name, {**arguments, "async_op": True})
    check_group_works()


@pytest.mark.parametrize("name", [name for name in RIGHT if name not in ("recv", "irecv")])
def test_zero_sized_tensors(pools: Pools, name: str) -> None:
    pools(2).run(run_zero_sized, name)


def run_moving(name: str, dtype: torch.dtype) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    name = one_of_two(name)
    call(name, recast(RIGHT[name](rank, W), dtype))
    check_group_works()


UNUSUAL = [torch.float8_e4m3fn, torch.complex32, torch.complex64, torch.uint16, torch.uint64, torch.bool]
MOVING = [name for name in RIGHT if name not in REDUCING and name not in ("recv", "irecv")]


@pytest.mark.parametrize("dtype", UNUSUAL, ids=str)
@pytest.mark.parametrize("name", MOVING)
def test_movement_takes_every_dtype(pools: Pools, name: str, dtype: torch.dtype) -> None:
    pools(2).run(run_moving, name, dtype)


def run_complex(name: str, op: str) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    arguments = recast(RIGHT[name](rank, W), torch.complex64)
    for value in arguments.values():
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(complex(rank, 2))
    result = function(name)(**arguments, op=op)
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


# --- a rank that is alone with its mistake


def place_of(name: str) -> Place:
    return next(place for place in PLACES if place.call == name and 0 in place.ranks)


#: Changes that make rank 1 wait for rank 0.
WAITING: dict[str, Arguments] = {
    **{name: {} for name in COLLECTIVES if name not in ("reduce", "gather")},
    "reduce": {"dst": 1},
    "gather": {"dst": 1},
    "recv": {},
    "irecv": {},
}
_GROUP_TIMEOUT_S = 0.6


def run_alone(name: str) -> None:
    rank = dist.get_rank()
    dist.barrier()
    group = dist.new_group([0, 1], timeout=_GROUP_TIMEOUT_S)
    arguments = {**RIGHT[name](rank, 2), **WAITING[name], "group": group}
    if name == "gather":
        arguments["gather_list"] = tensors(2) if rank == 1 else None
    start = time.monotonic()
    if rank == 0:
        expect(name, place_of(name).spoil(arguments, ones().to("meta")), VALUE, ("got a tensor on meta",))
        assert time.monotonic() - start < _GROUP_TIMEOUT_S
    else:
        raised = caught(lambda: call(name, arguments))
        took = time.monotonic() - start
        assert isinstance(raised, (dist.CommTimeoutError, dist.PeerLostError))
        assert str(raised).startswith(f"{name} on the group of ranks [0, 1] ")
        assert ", as seen by rank 1: " in str(raised)
        assert "cannot be used any more: its members go on with destroy_process_group(group)" in str(raised)
        for theirs in (".cc:", "GLHF"):
            assert theirs not in str(raised)
            assert theirs == "GLHF" or theirs in str(raised.__cause__) or dist.get_backend() != "gloo"
        assert _GROUP_TIMEOUT_S * 0.9 < took < _GROUP_TIMEOUT_S + 10
        for other in (*RIGHT, *PLAIN):
            right = {**RIGHT, **PLAIN}[other](rank, 2)
            expect(other, {**right, "group": group}, dist.BrokenGroupError, ("group of ranks [0, 1] failed earlier",))
    check_group_works()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("name", WAITING)
def test_peers_of_a_rank_with_a_mistake_time_out(pools: Pools, name: str) -> None:
    pools(2).run(run_alone, name)


def run_lost_peer() -> str:
    dist.init_distributed(dist_backend="gloo", verbose=False, timeout=5)
    check_group_works()
    if dist.get_rank() == 1:
        os._exit(0)
    found = ""
    try:
        for _ in range(3):  # what a dead rank has sent before is still received
            dist.all_reduce(torch.ones(1000))
    except (dist.PeerLostError, dist.CommTimeoutError) as error:
        found = f"{type(error).__name__}: {error}"
    for name in (*RIGHT, *PLAIN):
        right = {**RIGHT, **PLAIN}[name](0, 2)
        expect(name, right, dist.BrokenGroupError, ("group of ranks [0, 1] failed earlier", "init_distributed() again"))
    assert dist.is_initialized()
    sys.stdout.flush()
    return found


def test_peer_that_dies(rank_environment: dict[str, Any]) -> None:
    survivor, dead = run_ranks_outcomes(run_lost_peer, 2, env=rank_environment, timeout_s=60)
    assert dead.status == "died"
    assert survivor.ok, survivor.report()
    assert survivor.value.startswith(("PeerLostError: all_reduce on", "CommTimeoutError: all_reduce on"))
    assert survivor.duration_s < 20
