"""One signature per operation: contract, collectives, torch backend and ``torch.distributed`` cannot drift apart.

What the contract ``comm_utils.backend.Backend`` says is compared with all others; of functions that it does not know,
the one that users call is compared with torch's. Compared are names of parameters, their order, and which of them are
keyword-only. Every intended difference stands in ``DIFFERENCES`` with its reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed

import comm_collectives
import comm_orchestrator as dist
from comm_backend_torch import TorchBackend
from comm_collectives import object_codec, objects
from comm_orchestrator import facade
from comm_utils.backend import Backend

CONTRACT = {name: value for name, value in vars(Backend).items() if inspect.isfunction(value) and name[0] != "_"}
FACADE = {name: value for name in facade.__all__ if inspect.isroutine(value := getattr(facade, name))}
SIDES: dict[str, Any] = {"facade": facade, "torch backend": TorchBackend, "torch.distributed": torch.distributed}

RELEASE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
# Whose signatures ours are. An older torch may lack functions and the last parameters of others.
CANONICAL = (2, 13)
#: Parameters that torch has got since.
NEWER = {"weights_only": "2.15; ours decide about unpickling with allow_pickle"}


@dataclass(frozen=True)
class Difference:
    """How a side differs from what it is compared with.

    Attributes:
        absent: it has no such function.
        without, added: parameters that it lacks, and that it has at the end.
        renamed: {name that it is compared with: its own}.
    """

    reason: str
    absent: bool = False
    without: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    renamed: dict[str, str] = field(default_factory=dict)


def _absent(side: str, reason: str, *names: str) -> dict[tuple[str, str], Difference]:
    return {(side, name): Difference(reason, absent=True) for name in names}


#: (side, function) -> how it differs, and why.
DIFFERENCES: dict[tuple[str, str], Difference] = {
    ("facade", "send"): Difference(
        "the article and DeepSpeed pass async_op to send; backends have isend for it", added=("async_op",)
    ),
    ("facade", "recv"): Difference(
        "the article and DeepSpeed pass async_op to recv; backends have irecv for it", added=("async_op",)
    ),
    **_absent(
        "facade",
        "what the collectives ask a backend, no operation of users",
        "capabilities",
        "check_group",
        "create_group",
        "device_types",
        "get_store",
        "get_timeout",
        "during",
        "prepare",
    ),
    **_absent(
        "torch.distributed",
        "what the collectives ask a backend, no operation of torch",
        "capabilities",
        "check_group",
        "create_group",
        "device_types",
        "get_store",
        "get_timeout",
        "during",
        "prepare",
    ),
    **_absent(
        "torch.distributed",
        "a function of deepspeed.comm",
        "get_all_ranks_from_group",
        "get_local_rank",
        "get_world_group",
        "inference_all_reduce",
        "init_distributed",
        "initialize_mesh_device",
        "log_summary",
        "configure",
        "reduce_scatter_coalesced",
        "set_backend",
    ),
    **_absent(
        "torch.distributed",
        "a function of ours",
        "allgather_object",
        "available_backends",
        "broadcast_object",
        "initialize_module",
        "reduce_object",
        "register_object_type",
        "reset_log",
        "set_object_policy",
    ),
    **{
        ("torch.distributed", name): Difference(
            "torch unpickles whatever it receives; ours only where it is allowed", without=("allow_pickle",)
        )
        for name in (
            "all_gather_object",
            "broadcast_object_list",
            "gather_object",
            "recv_object_list",
            "scatter_object_list",
            "send_object_list",
        )
    },
    ("torch.distributed", "all_gather_coalesced"): Difference(
        "deprecated in torch; the names are DeepSpeed's, and torch's are accepted as keywords",
        renamed={"output_tensors": "output_tensor_lists", "input_tensors": "input_tensor_list"},
    ),
}


def parameters(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """Names in order, keyword-only ones with a star, and whether ``**options`` passes on others."""
    found = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    named = [p for p in found if p.kind is not p.VAR_KEYWORD]
    return [p.name + ("*" if p.kind is p.KEYWORD_ONLY else "") for p in named], len(named) < len(found)


def cases() -> list[tuple[str, str]]:
    of_contract = [(side, name) for name in CONTRACT for side in SIDES]
    return of_contract + [("torch.distributed", name) for name in FACADE if name not in CONTRACT]


def problem(side: str, name: str, difference: Difference | None) -> str | None:
    """What is not as ``difference`` says; None where all is."""
    base, passes_on = parameters(CONTRACT.get(name) or FACADE[name])
    function = getattr(SIDES[side], name, None)
    old_torch = side == "torch.distributed" and RELEASE < CANONICAL
    if function is None:
        return None if (difference is not None and difference.absent) or old_torch else "it is absent"
    if difference is not None and difference.absent:
        return "it is there"
    found = [one for one in parameters(function)[0] if one.rstrip("*") not in NEWER]
    if difference is not None:
        base = [difference.renamed.get(one, one) for one in base if one.rstrip("*") not in difference.without]
        base += difference.added
    same = found[: len(base)] == base if passes_on else found == base
    if same or (old_torch and found == base[: len(found)]):
        return None
    return f"its parameters are {', '.join(found)}; expected {', '.join(base)}"


@pytest.mark.parametrize(("side", "name"), cases())
def test_signature(side: str, name: str) -> None:
    difference = DIFFERENCES.get((side, name))
    reason = f" ({difference.reason})" if difference else ""
    found = problem(side, name, difference)
    assert found is None, f"{name} of {side}: {found}{reason}"


@pytest.mark.parametrize(("side", "name"), DIFFERENCES)
def test_difference_is_not_stale(side: str, name: str) -> None:
    assert (side, name) in cases()
    difference = DIFFERENCES[side, name]
    assert difference.reason
    if side == "torch.distributed" and RELEASE < CANONICAL and not difference.absent:
        pytest.skip("this torch may lack what ours differ from")
    assert problem(side, name, None) or not hasattr(SIDES[side], name), "there is no difference any more"


def test_a_drift_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broadcast(self: object, tensor: object, group: object = None, src: int = 0, async_op: bool = False) -> None: ...

    def reduce(self: object, tensor: object, dst: int) -> None: ...

    assert problem("torch backend", "broadcast", None) is None
    monkeypatch.setattr(TorchBackend, "broadcast", broadcast)
    monkeypatch.setattr(TorchBackend, "reduce", reduce)
    found = problem("torch backend", "broadcast", None)
    assert found == (
        "its parameters are tensor, group, src, async_op; expected tensor, src, group, async_op, group_src"
    )
    assert problem("torch backend", "reduce", None) is not None
    assert problem("torch backend", "barrier", Difference("none", absent=True)) == "it is there"
    assert problem("facade", "get_store", None) == "it is absent"


def test_newer_parameters_are_newer() -> None:
    if RELEASE != CANONICAL:
        pytest.skip("compares with the release whose signatures ours are")
    for name in FACADE:
        function = getattr(torch.distributed, name, None)
        if function is not None:
            assert not {one.rstrip("*") for one in parameters(function)[0]} & NEWER.keys()


# What the facade adds to the collectives' own function.
_WRAPPED = {"destroy_process_group": "the slot of the active backend is emptied as well"}


@pytest.mark.parametrize("name", FACADE)
def test_facade_hands_out_the_collectives_own_functions(name: str) -> None:
    own = getattr(comm_collectives, name, None) or getattr(objects, name, None)
    if own is None:
        home = inspect.getmodule(inspect.unwrap(FACADE[name]))
        assert home is facade or getattr(object_codec, name) is FACADE[name]
    else:
        assert (inspect.unwrap(FACADE[name]) is own) == (name not in _WRAPPED)
        assert parameters(FACADE[name]) == parameters(own)


def test_everything_of_the_facade_is_reachable() -> None:
    for name in facade.__all__:
        assert name in dist.__all__
        assert getattr(dist, name) is getattr(facade, name)
    assert {name for name in comm_collectives.__all__ if name not in ("bare_backend", "instrument")} <= set(
        dist.__all__
    )
    assert set(objects.__all__) <= set(dist.__all__)
