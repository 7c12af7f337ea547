"""What a wrong call gets: every line of the contract's section, for every function to which it applies.

All ranks make the same mistake unless a test says otherwise: each gets the error, and the group works afterwards.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as c10d

import comm_orchestrator as dist
from comm_utils.errors import ArgumentTypeError
from comm_utils.testing import RankPool, run_ranks, run_ranks_outcomes

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
    "scatter": lambda r, W: {"tensor": ones(), "scatter_list": [ones() for _ in range(W)] if r == 0 else None, "src": 0},
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


def expect(name: str, arguments: Arguments, error: type[Exception], texts: Sequence[str]) -> None:
    """The call raises exactly ``error``, one of ours and a built-in, with a message that begins with the call's name."""
    try:
        call(name, arguments)
    except Exception as raised:
        caught = raised
    else:
        raise AssertionError(f"{name} accepted a wrong argument")
    assert type(caught) is error, f"{type(caught).__qualname__}: {caught}"
    assert isinstance(caught, dist.CommError)
    assert isinstance(caught, (ValueError, RuntimeError, TimeoutError))
    message = str(caught)
    assert message.startswith(f"{name}: "), message
    for text in texts:
        assert text in message, f"no {text!r} in: {message}"


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
        "init_device_mesh",
        "init_distributed",
        "initialize_mesh_device",
        "initialize_module",
        "log_summary",
        "new_group",
        "register_object_type",
        "reset_log",
        "set_backend",
        "set_object_policy",
    }
    functions = {name for name in dist.__all__ if name[0].islower()}
    assert functions - queries - management == {*RIGHT, *PLAIN, "batch_isend_irecv"}


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
    "log_summary": lambda r, W: {},
    "destroy_process_group": lambda r, W: {},
    "configure": lambda r, W: {"enabled": True},
    "batch_isend_irecv": lambda r, W: {"p2p_op_list": [dist.P2POp(dist.isend, ones(), 0)]},
}


def test_before_initialisation(bare_pools: Pools) -> None:
    names = [*RIGHT, *PLAIN, *NEEDING_A_WORLD]
    (found,) = bare_pools(1).run(run_uninitialised, names)
    expected = (
        "NotInitializedError: the distributed environment is not initialised; call comm_orchestrator.init_distributed() "
        "first"
    )
    assert found == dict.fromkeys(names, expected)


# --- tensors that cannot be used


@dataclass(frozen=True)
class Place:
    """A tensor among the arguments of a call.

    Attributes:
        argument: its keyword, with a position where it is in a list.
        shown: how messages name it.
        written: the call writes it.
        ranks: those on which the call looks at it.
    """

    call: str
    argument: str
    written: bool
    ranks: tuple[int, ...] = (0, 1)
    shown: str = ""

    def __str__(self) -> str:
        return f"{self.call}-{self.argument}"

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
    Place("reduce", "tensor", written=True),
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
        lambda: ones().to("meta"), dist.ArgumentError, ("got a tensor on meta", "backend 'gloo'", "serves cpu", "move")
    ),
    "sparse": BadTensor(
        lambda: ones().to_sparse(), ArgumentTypeError, ("got a sparse tensor", "sparse_coo", "to_dense()")
    ),
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
        expect(where.call, arguments, what.error, (f"{where.shown or where.argument}: got", *what.texts))
    check_group_works()


# The one-tensor form begins with a tensor or None: these calls are right, or are spoiled otherwise.
_OTHER_FORM: set[tuple[str, str]] = set()


@pytest.mark.parametrize(
    ("place", "bad"),
    [
        pytest.param(position, bad, id=f"{place}-{bad}{'' if place.ranks == (0, 1) else place.ranks}")
        for position, place in enumerate(PLACES)
        for bad, tensor in BAD_TENSORS.items()
        if (place.written or not tensor.written_only) and (str(place), bad) not in _OTHER_FORM
    ],
)
def test_tensor_that_cannot_be_used(pools: Pools, place: int, bad: str) -> None:
    pools(2).run(run_bad_tensor, place, bad)
