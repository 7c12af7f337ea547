"""Every wrong call raises one typed error that names the argument, and the group works afterwards.

The rows are in ``wrong_calls``: ``kinds`` has the wrong values of each role of an argument, ``special`` the calls that
are wrong in their own way. Each row is tried as the first call of its kind on a group and after right ones, where a
fast path might skip checks; by keyword and by position. All ranks make the same mistake unless a row says otherwise.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

import comm_orchestrator as dist
from comm_orchestrator.facade import deepspeed_names
from comm_utils.testing import RankPool

# Test folders are no packages that could be installed.
_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)

from wrong_calls.errors import caught, error_of, expect  # noqa: E402
from wrong_calls.kinds import TYPE, VALUE, Row, generated  # noqa: E402
from wrong_calls.right import (  # noqa: E402
    OBJECTS,
    TENSORS,
    Arguments,
    call_both_sides,
    check_group_works,
    ones,
    peer,
    right,
)
from wrong_calls.special import SPECIAL  # noqa: E402

Pools: TypeAlias = Callable[[int], RankPool]

EVERY_CALL = [*TENSORS, *OBJECTS]
ROWS: dict[str, Row] = {**SPECIAL, **generated()}


def _by_call() -> dict[str, list[str]]:
    found = defaultdict(list)
    for label, row in ROWS.items():
        kind = "special" if label in SPECIAL else label.removeprefix(f"{row.call}-").partition("-")[0]
        found[f"{row.call}-{kind}"].append(label)
    return dict(found)


#: Rows that are tried on one group, one after the other.
ROWS_OF = _by_call()


# --- right calls work, or else the errors below would prove nothing


def run_right_call(name: str) -> None:
    for _ in range(3):
        call_both_sides(name)
    check_group_works()


@pytest.mark.parametrize("name", EVERY_CALL)
def test_right_call(pools: Pools, name: str) -> None:
    pools(2).run(run_right_call, name)


def test_every_function_is_covered() -> None:
    queries = {name for name in dist.__all__ if name.startswith(("get_", "is_"))}
    management = {
        "available_backends",
        "configure",
        "destroy_process_group",
        "empty_shared",  # in test_shared_memory.py
        "shared_memory_stats",
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
    assert functions - queries - management - other_names == {*EVERY_CALL, "batch_isend_irecv"}


# --- the table


def problem_of(row: Row, group: Any, by_position: bool) -> str:
    """Return how the wrong call fell short of its row; an empty text where it did not."""
    rank = dist.get_rank()
    arguments = right(row.call, rank, 2)
    if group is not None:
        arguments["group"] = group
    if rank in row.ranks:
        return error_of(row.call, {**arguments, **row.changes(rank, 2)}, row.error, row.texts, by_position)
    if "object" in row.call:  # all ranks get an error before any raises
        told = (f"rank {row.ranks[0]} called with a wrong argument", "see the error there")
        return error_of(row.call, arguments, dist.ObjectExchangeError, told, by_position)
    return ""


def run_rows(labels: list[str]) -> list[str]:
    """Try each row on a new group, again after right calls there, and on the world, which has seen many."""
    group = dist.new_group([0, 1])
    found = []
    for state, where, before in (("first call", group, 0), ("fast path", group, 2), ("world", None, 2)):
        for _ in range(before):
            call_both_sides(ROWS[labels[0]].call, where)
        for label in labels:
            for style in ("keyword", "position"):
                problem = problem_of(ROWS[label], where, style == "position")
                if problem:
                    found.append(f"{label}, {state}, by {style}: {problem}")
            if before:  # an all_reduce would make the next call another one than the first
                check_group_works(where)
    dist.destroy_process_group(group)
    check_group_works()
    return found


@pytest.mark.parametrize("rows", ROWS_OF)
def test_wrong_call(pools: Pools, rows: str) -> None:
    for rank, problems in enumerate(pools(2).run(run_rows, ROWS_OF[rows])):
        assert not problems, f"on rank {rank}:\n" + "\n".join(problems)


# --- not initialised


def run_uninitialised(names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        arguments = NEEDING_A_WORLD[name](0, 1) if name in NEEDING_A_WORLD else right(name, 0, 1)
        try:
            getattr(dist, name)(**arguments)
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
    names = [*EVERY_CALL, *NEEDING_A_WORLD]
    (found,) = bare_pools(1).run(run_uninitialised, names)
    text = "the distributed environment is not initialised; call comm_orchestrator.init_distributed() first"
    for name in names:
        assert found[name] == f"NotInitializedError: {name}: {text}"


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
        assert type(raised) is TYPE
        assert str(raised).startswith("P2POp: op: got ")
        assert "expected isend or irecv" in str(raised)
    works = dist.batch_isend_irecv([message()])
    for work in works:
        work.wait()
    check_group_works()


def test_wrong_operation_in_a_batch(pools: Pools) -> None:
    pools(2).run(run_wrong_p2p_op)


# --- queries


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
