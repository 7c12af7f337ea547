"""One signature per operation: contract, backends, collectives, torch and DeepSpeed cannot drift apart.

What the contract ``comm_utils.backend.Backend`` says is compared with both backends and with what users call; that
with ``torch.distributed`` and ``deepspeed.comm``. tools/compatibility.py has the table of intended differences.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import comm_collectives
import comm_orchestrator as dist
from comm_backend_ccl import CclBackend
from comm_backend_torch import TorchBackend
from comm_collectives import object_codec, objects
from comm_orchestrator import facade
from comm_utils import operations
from comm_utils.backend import Backend
from comm_utils.operations import Role
from comm_utils.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import compatibility

CONTRACT = {name: value for name, value in vars(Backend).items() if inspect.isfunction(value) and name[0] != "_"}
FACADE = {name: value for name in facade.__all__ if inspect.isfunction(value := getattr(facade, name))}
#: What the collectives ask a backend, no operation of users.
INTERNAL = {
    "capabilities",
    "check_group",
    "create_group",
    "device_types",
    "during",
    "fast_path",
    "get_store",
    "get_timeout",
    "mark_broken",
}
#: What users can say and backends need not know: these have isend and irecv, and during() for timeouts.
ADDED = {"send": ["async_op", "timeout*"], "recv": ["async_op", "timeout*"], "barrier": ["timeout"]}
#: Functions of users that are about groups and ranks alone.
WITHOUT_TIMEOUT = {"destroy_process_group", "empty_shared", "is_initialized"}

RELEASE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
CANONICAL = (2, 13)
canonical_torch = pytest.mark.skipif(RELEASE != CANONICAL, reason="signatures are those of torch 2.13")


def parameters(function: Callable[..., Any]) -> list[str]:
    """Names in order, keyword-only ones with a star."""
    return [one.name for one in compatibility.parameters(function) if one.name != "self"]


def added(name: str) -> list[str]:
    if name in ADDED:
        return ADDED[name]
    if name.startswith("get_") or name in WITHOUT_TIMEOUT:
        return []
    compresses = any(row.name == name and row.argument(Role.COMPRESSION) for row in operations.rows())
    return ["timeout*", "compression*"] if compresses else ["timeout*"]


def test_users_call_what_the_contract_says() -> None:
    assert set(CONTRACT) - set(FACADE) == INTERNAL
    for name in CONTRACT.keys() - INTERNAL:
        assert parameters(FACADE[name]) == parameters(CONTRACT[name]) + added(name), name


@pytest.mark.parametrize("backend", [CclBackend, TorchBackend])
@pytest.mark.parametrize("name", CONTRACT)
def test_backends_have_the_parameters_of_the_contract(backend: type, name: str) -> None:
    assert parameters(getattr(backend, name)) == parameters(CONTRACT[name])


@canonical_torch
def test_every_difference_to_torch_and_deepspeed_has_its_reason() -> None:
    assert compatibility.unexplained() == []


@canonical_torch
def test_the_page_is_what_the_code_says() -> None:
    assert compatibility.PAGE.read_text() == compatibility.page(), "run python tools/compatibility.py --write"


@canonical_torch
def test_a_drift_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broadcast(tensor: object, group: object = None, src: int = 0, async_op: bool = False) -> None: ...

    def barrier(group: object, async_op: bool = True, *, device_ids: object = None, timeout: object = None) -> None: ...

    monkeypatch.setattr(dist, "broadcast", broadcast)
    monkeypatch.setattr(dist, "barrier", barrier)
    found = compatibility.difference(compatibility.TORCH, "broadcast")
    assert found.split("; ") == [
        "src is at another position",
        "src is 0 by default, not None",
        "group is at another position",
        "no parameter group_src",
    ]
    found = compatibility.difference(compatibility.TORCH, "barrier")
    assert "group is required; async_op is True by default, not False; device_ids is at another position" in found
    problems = compatibility.unexplained()
    assert [text for text in problems if text.startswith("torch.distributed.broadcast: src is at another position")]


@canonical_torch
def test_another_difference_than_the_intended_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broadcast(tensor: object, src: int, group: object = None, async_op: bool = True) -> None: ...

    monkeypatch.setattr(dist, "broadcast", broadcast)
    (found,) = [text for text in compatibility.unexplained() if text.startswith("deepspeed.comm.broadcast: ")]
    assert "async_op is True by default, not False" in found


@canonical_torch
def test_a_reason_without_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compatibility.DIFFERENCES, (compatibility.TORCH, "all_reduce"), ("none", "none"))
    monkeypatch.setitem(compatibility.NOT_PROVIDED, (compatibility.DEEPSPEED, "send"), "none")
    monkeypatch.setitem(compatibility.BETTER, "no_such_function", "none")
    assert compatibility.unexplained() == [
        "DIFFERENCES: torch.distributed.all_reduce does not differ",
        "NOT_PROVIDED: deepspeed.comm.send is here, or nowhere",
        "there is no no_such_function",
    ]


# What the facade adds to the collectives' own function.
_WRAPPED = {"destroy_process_group": "the slot of the active backend is emptied as well"}


@pytest.mark.parametrize("name", FACADE)
def test_facade_hands_out_the_collectives_own_functions(name: str) -> None:
    own = getattr(comm_collectives, name, None) or getattr(objects, name, None)
    if own is None:
        home = FACADE[name].__module__
        same = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
        is_alias = name in same and FACADE[name] is FACADE[same[name]]
        assert home.startswith("comm_orchestrator.facade.") or is_alias or getattr(object_codec, name) is FACADE[name]
    else:
        assert (FACADE[name] is own) == (name not in _WRAPPED)
        assert parameters(FACADE[name]) == parameters(own)


def test_everything_of_the_facade_is_reachable() -> None:
    for name in facade.__all__:
        assert name in dist.__all__
        assert getattr(dist, name) is getattr(facade, name)
    inside = {"BackendWrapper", "bare_backend", "instrument", "instrumented", "labelled"}
    assert set(comm_collectives.__all__) - inside <= set(dist.__all__)
    assert set(objects.__all__) <= set(dist.__all__)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather_into_tensor", "barrier", "broadcast_object", "recv"])
def test_functions_of_the_facade_are_what_an_editor_shows(name: str) -> None:
    function = FACADE[name]
    assert function.__name__ == name
    assert function.__doc__
    assert inspect.getsource(function).count(f"def {name}(") == 1
    source = inspect.getsourcefile(inspect.unwrap(function))
    assert Path(source or "").is_relative_to(Path(__file__).parents[1] / "packages")
    assert getattr(importlib.import_module(function.__module__), name) is function
    assert "return" in function.__annotations__
    assert pickle.loads(pickle.dumps(function)) is function


#: Functions without arguments that have nothing to raise.
NEVER_RAISE = {
    "available_backends",
    "get_comm_operation_count",
    "get_logged_comm_ops",
    "has_comm_data",
    "in_aml",
    "in_aws_sm",
    "in_dlts",
    "is_available",
    "is_initialized",
    "log_rows",
    "reset_log",
    "shared_memory_stats",
    "start_profiling_comms",
    "stop_profiling_comms",
}


def sections(function: Callable[..., Any]) -> dict[str, str]:
    """The parts of what ``help()`` shows, by their titles; "" is the one before them."""
    text, *rest = re.split(r"^(Args|Returns|Raises):$", inspect.getdoc(function) or "", flags=re.M)
    return {"": text, **dict(zip(rest[::2], rest[1::2], strict=True))}


@pytest.mark.parametrize("name", FACADE)
def test_help_describes_every_argument_result_and_error(name: str) -> None:
    parts = sections(FACADE[name])
    described = re.findall(r"^    ([\w*][\w, *]*): \S", parts.get("Args", ""), re.M)
    names = [one for entry in described for one in entry.replace("*", "").split(", ")]
    assert sorted(names) == sorted(inspect.signature(FACADE[name]).parameters), "each argument, and each once"
    if inspect.signature(FACADE[name]).return_annotation not in ("None", None):
        assert "Returns" in parts or re.search(r"\breturn", parts[""], re.I)
    assert ("Raises" in parts or "raises" in parts[""]) != (name in NEVER_RAISE - {"is_available", "is_initialized"})
    for classes in re.findall(r"^    ([A-Z]\w+(?:, [A-Z]\w+)*)(?::|$)", parts.get("Raises", ""), re.M):
        assert all(hasattr(dist, one) for one in classes.split(", ")), classes


def call_without_a_world() -> None:
    for name in sorted(NEVER_RAISE):
        FACADE[name]()


def test_what_never_raises_does_not_raise_without_a_world(rank_environment: dict[str, Any]) -> None:
    run_ranks(call_without_a_world, 1, env=rank_environment)
