"""Every wrong call raises one typed error that names the argument, and the group works afterwards.

The rows are in ``wrong_calls``: ``kinds`` has the wrong values of each role of an argument, ``special`` the calls that
are wrong in their own way. Each row is tried as the first call of its kind on a group and after right ones, where a
fast path might skip checks; by keyword and by position. All ranks make the same mistake unless a row says otherwise.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from wrong_calls.errors import caught, error_of, expect
from wrong_calls.kinds import TYPE, VALUE, Row, generated, replaced
from wrong_calls.right import (
    OBJECTS,
    TENSORS,
    Arguments,
    call_both_sides,
    check_group_works,
    ones,
    operation,
    peer,
    right,
)
from wrong_calls.special import SPECIAL

import comm_orchestrator as dist
from comm_orchestrator.facade import deepspeed_names
from comm_utils.testing import RankPool

Pools: TypeAlias = Callable[[int], RankPool]

EVERY_CALL = [*TENSORS, *OBJECTS]
ROWS: dict[str, Row] = {**SPECIAL, **generated()}


#: Kinds of rows that every call has; they are tried together.
OF_ANY_CALL = ("group", "timeout", "mode", "async")


def _by_call() -> dict[str, list[str]]:
    found = defaultdict(list)
    for label, row in ROWS.items():
        kind = "special" if label in SPECIAL else label.removeprefix(f"{row.call}-").partition("-")[0]
        found[f"{row.call}-{'any' if kind in OF_ANY_CALL else kind}"].append(label)
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
        "coalescing",  # test_coalescing
        "configure",
        "destroy_process_group",
        "empty_shared",  # in test_shared_memory.py
        "set_compression",  # test_compression
        "set_hierarchical",  # test_hierarchical
        "set_deterministic_reductions",  # test_deterministic_reductions
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
        # in test_training_from_a_configuration.py
        "register_communication_hooks",
        "register_data_parallel_hooks",
        "register_model_parallel_hooks",
        "register_sharded_hooks",
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
        arguments.update(row.changes(rank, 2))
        found: list[str] = []

        def run(tensor: Any) -> None:
            given = {**arguments, **replaced(arguments, row.where, tensor)} if row.where else arguments
            found.append(error_of(row.call, given, row.error, row.texts, by_position))

        row.around(run) if row.around else run(None)
        return found[0]
    if "object" in row.call:  # all ranks get an error before any raises
        call, told = row.call, (f"rank {row.ranks[0]} called with a wrong argument", "see the error there")
        if operation(call).pattern.is_message:
            call = {"send": "recv", "recv": "send"}[call[:4]] + call[4:]
            arguments = {**right(call, rank, 2), "group": group}
            told = (f"rank {row.ranks[0]} ", "see the error ")
        return error_of(call, arguments, dist.ObjectExchangeError, told, by_position)
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
    "generator": (lambda: (one for one in [message()]), TYPE, ("p2p_op_list: got <generator", "expected a list")),
    "dict": (lambda: {0: message()}, TYPE, ("p2p_op_list: got {0: ", "expected a list")),
    "works": (lambda: [object()], TYPE, ("p2p_op_list: got <object object", "expected a list of P2POp")),
    "peer-text": (lambda: [message(peer="0")], TYPE, ("peer: got '0' of type str", "an integer")),
    "peer-bool": (lambda: [message(peer=True)], TYPE, ("peer: got True of type bool", "an integer")),
    "peer-tensor": (lambda: [message(peer=torch.tensor(0.0))], TYPE, ("peer: got tensor(0.)", "an integer")),
    "tag-text": (lambda: [message(tag="0")], TYPE, ("tag: got '0' of type str", "an integer")),
    "tag-huge": (lambda: [message(tag=2**31)], VALUE, ("tag: got 2147483648", "0 to 2147483647")),
    "short-storage": (
        lambda: [message(), message(tensor=shrunk())],
        VALUE,
        ("p2p_op_list[1].tensor: got a storage of 4 bytes", "needs 16"),
    ),
    "one-memory": (
        lambda: exchange_of(one := ones(), one),
        VALUE,
        ("p2p_op_list[1].tensor: got memory that p2p_op_list[0] uses as well", "separate memory"),
    ),
    "memory-that-overlaps": (
        lambda: exchange_of((one := ones(6))[:4], one[2:]),
        VALUE,
        ("p2p_op_list[1].tensor: got memory that p2p_op_list[0] uses as well",),
    ),
    "arriving-twice": (
        lambda: [message(op=dist.irecv, tensor=(one := ones())), message(op=dist.irecv, tensor=one)],
        VALUE,
        ("p2p_op_list[1].tensor: got memory that p2p_op_list[0] uses as well",),
    ),
}


def shrunk() -> torch.Tensor:
    tensor = ones()
    tensor.untyped_storage().resize_(4)
    return tensor


def exchange_of(sent: torch.Tensor, received: torch.Tensor) -> list[dist.P2POp]:
    return [message(op=dist.isend, tensor=sent), message(op=dist.irecv, tensor=received)]


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


# --- queries, groups and handles


#: The argument of each with the lists of ranks.
SUBGROUPS = {"new_subgroups_by_enumeration": "ranks_per_subgroup_list", "split_group": "split_ranks"}


def waited(call: str, timeout: Any) -> None:
    """Wait wrongly for an operation, which ends nevertheless."""
    work = getattr(dist, call)(**right(call, dist.get_rank(), 2), async_op=True)
    try:
        work.wait(timeout)
    finally:
        work.wait()


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
    # shapes and dtypes of shared tensors
    **{
        f"empty_shared-{label}": (lambda shape=shape: dist.empty_shared(shape), TYPE, ("shape: got", text))
        for label, shape, text in (
            ("none", None, "expected an integer, or a list of them"),
            ("float", 1.5, "expected an integer, or a list of them"),
            ("nan", float("nan"), "expected an integer, or a list of them"),
            ("string", "ab", "expected an integer, or a list of them"),
            ("bytes", b"ab", "expected an integer, or a list of them"),
            ("dict", {2: 3}, "expected an integer, or a list of them"),
            ("set", {2}, "expected an integer, or a list of them"),
            ("bool", True, "expected an integer"),
            ("lists", [[1], [2]], "expected an integer"),
            ("tensor-of-floats", torch.ones(2), "expected an integer"),
            ("tensor-on-meta", torch.ones(2, dtype=torch.int64, device="meta"), "expected an integer"),
        )
    },
    "empty_shared-negative": (lambda: dist.empty_shared([2, -1]), VALUE, ("shape: got (2, -1)", "0 and above")),
    "empty_shared-huge": (lambda: dist.empty_shared(2**70), VALUE, ("shape: got", "EiB")),
    "empty_shared-dtype-text": (lambda: dist.empty_shared(1, "float32"), TYPE, ("dtype: got 'float32'",)),
    "empty_shared-dtype-class": (lambda: dist.empty_shared(1, int), TYPE, ("dtype: got <class 'int'>",)),
    "empty_shared-dtype-quantized": (lambda: dist.empty_shared(1, torch.quint8), VALUE, ("dtype: got torch.quint8",)),
    "empty_shared-group": (lambda: dist.empty_shared(1, group="world"), TYPE, ("group: got 'world'",)),
    # groups
    "new_group-in-no-dimension": (lambda: dist.new_group(torch.tensor(0)), TYPE, ("ranks: got tensor(0)", "a list")),
    "new_group-array-in-no-dimension": (lambda: dist.new_group(np.array(0)), TYPE, ("ranks: got array(0)", "a list")),
    "new_group-nested": (lambda: dist.new_group([[0, 1]]), TYPE, ("ranks: got a list of 2", "an integer")),
    "new_group-bools": (lambda: dist.new_group([False, True]), TYPE, ("ranks: got False of type bool", "an integer")),
    "new_group-none-in-list": (lambda: dist.new_group([None]), TYPE, ("ranks: got None", "an integer")),
    "new_group-huge": (lambda: dist.new_group([2**70]), VALUE, (f"ranks: got [{2**70}]", "0 to 1")),
    "new_group-group": (
        lambda: dist.new_group(dist.get_world_group()),
        TYPE,
        ("ranks: got <", "a list of global ranks"),
    ),
    "new_group-nan-timeout": (lambda: dist.new_group(timeout=float("nan")), VALUE, ("timeout: got nan", "finite")),
    "new_group-bool-timeout": (lambda: dist.new_group(timeout=True), TYPE, ("timeout: got True", "seconds")),
    "new_group-description": (lambda: dist.new_group(group_desc=5), TYPE, ("group_desc: got 5", "a string")),
    "new_group-device-text": (lambda: dist.new_group(device_id="cpu"), TYPE, ("device_id: got 'cpu'", "torch.device")),
    "new_group-device-index": (lambda: dist.new_group(device_id=0), TYPE, ("device_id: got 0", "torch.device")),
    "new_group-device-cpu": (
        lambda: dist.new_group(device_id=torch.device("cpu")),
        VALUE,
        ("device_id: got cpu", "an accelerator with an index"),
    ),
    "new_group-device-meta": (
        lambda: dist.new_group(device_id=torch.device("meta")),
        VALUE,
        ("device_id: got meta", "an accelerator with an index"),
    ),
    "new_group-device-that-is-not-here": (
        lambda: dist.new_group(device_id=torch.device("cuda:0")),
        VALUE,
        ("device_id: got cuda:0", "does not see"),
    ),
    **{
        f"new_group-backend-{label}": (
            lambda backend=backend: dist.new_group(backend=backend),
            dist.BackendUnavailableError,
            ("new_group: backend", text),
        )
        for label, backend, text in (
            ("empty", "", "''"),
            ("undefined", "undefined", "'undefined' is not known"),
            ("twice", "cpu:gloo,cpu:gloo", "one library for each device"),
            ("without-library", "cpu:", "one library for each device"),
            ("without-device", "cpu:gloo,nccl", "one library for each device"),
            ("line-end", "gloo\n", "did you mean 'gloo'?"),
        )
    },
    **{
        f"new_subgroups-{label}": (lambda size=size: dist.new_subgroups(size), error, ("group_size: got", text))
        for label, size, error, text in (
            ("zero", 0, VALUE, "a divisor of 2"),
            ("negative", -1, VALUE, "a divisor of 2"),
            ("three", 3, VALUE, "a divisor of 2"),
            ("string", "2", TYPE, "an integer"),
            ("float", 1.0, TYPE, "an integer"),
            ("bool", True, TYPE, "an integer"),
            ("meta", torch.tensor(1, device="meta"), TYPE, "an integer"),
        )
    },
    **{
        f"{call}-{label}": (
            lambda call=call, value=value: getattr(dist, call)(**{SUBGROUPS[call]: value}),
            error,
            (f"{call}: {SUBGROUPS[call]}: got", text),
        )
        for call in ("new_subgroups_by_enumeration", "split_group")
        for label, value, error, text in (
            ("number", 5, TYPE, "a list of lists"),
            ("flat", [0, 1], TYPE, "a list of lists"),
            ("string", "01", TYPE, "a list of lists"),
            ("strings", ["0", "1"], TYPE, "a list of lists"),
            ("dict", {0: [1]}, TYPE, "a list of lists"),
            ("tensor", torch.tensor([[0], [1]]), TYPE, "a list of lists"),
            ("empty", [], VALUE, "an empty list"),
            ("empty-group", [[0], []], VALUE, "no empty list"),
            ("twice", [[0, 1], [0]], VALUE, "names a rank twice"),
            ("outside", [[0, 7]], VALUE, "ranks from 0 to 1"),
            ("floats", [[0.5]], TYPE, "an integer"),
            ("bools", [[True]], TYPE, "an integer"),
        )
    },
    "split_group-missing": (lambda: dist.split_group(None, None), VALUE, ("split_ranks: missing",)),
    "split_group-parent": (lambda: dist.split_group("world", [[0]]), TYPE, ("parent_pg: got 'world'",)),
    "split_group-timeout": (lambda: dist.split_group(None, [[0]], timeout="1"), TYPE, ("timeout: got '1'",)),
    # ranks
    "get_global_rank-float": (lambda: dist.get_global_rank(None, 1.5), TYPE, ("group_rank: got 1.5", "an integer")),
    "get_global_rank-bool": (lambda: dist.get_global_rank(None, True), TYPE, ("group_rank: got True", "an integer")),
    "get_global_rank-none": (lambda: dist.get_global_rank(None, None), TYPE, ("group_rank: got None", "an integer")),
    "get_global_rank-endless": (lambda: dist.get_global_rank(None, 10**5000), VALUE, ("group_rank: got <int>",)),
    "get_group_rank-string": (lambda: dist.get_group_rank(None, "0"), TYPE, ("global_rank: got '0'", "an integer")),
    "get_group_rank-float": (lambda: dist.get_group_rank(None, 0.0), TYPE, ("global_rank: got 0.0", "an integer")),
    "get_group_rank-bool": (lambda: dist.get_group_rank(None, False), TYPE, ("global_rank: got False", "an integer")),
    "get_group_rank-negative": (lambda: dist.get_group_rank(None, -1), VALUE, ("global_rank: got -1",)),
    "get_group_rank-endless": (lambda: dist.get_group_rank(None, 10**5000), VALUE, ("global_rank: got <int>",)),
    # meshes
    **{
        f"init_device_mesh-{label}": (
            lambda shape=shape: dist.init_device_mesh("cpu", shape),
            TYPE,
            ("mesh_shape: got", "a tuple of positive integers"),
        )
        for label, shape in (
            ("number", 2),
            ("floats", (2.0,)),
            ("bool", (True, 2)),
            ("negative", (-2,)),
            ("tensor", torch.tensor([2])),
            ("string", "2"),
        )
    },
    "init_device_mesh-empty": (
        lambda: dist.init_device_mesh("cpu", ()),
        VALUE,
        ("mesh_shape: got ()", "a product of 2"),
    ),
    "init_device_mesh-huge": (lambda: dist.init_device_mesh("cpu", (2**40, 2**40)), VALUE, ("mesh_shape: got",)),
    "init_device_mesh-device": (lambda: dist.init_device_mesh("meta", (2,)), VALUE, ("device_type: got 'meta'",)),
    "init_device_mesh-device-number": (lambda: dist.init_device_mesh(5, (2,)), VALUE, ("device_type: got 5",)),
    **{
        f"init_device_mesh-names-{label}": (
            lambda names=names: dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=names),
            error,
            ("mesh_dim_names: got", text),
        )
        for label, names, error, text in (
            ("text", "ab", TYPE, "a tuple of 2 strings"),
            ("numbers", (1, 2), TYPE, "a tuple of 2 strings"),
            ("few", ("a",), VALUE, "2 different strings"),
            ("many", ("a", "b", "c"), VALUE, "2 different strings"),
            ("twice", ("a", "a"), VALUE, "2 different strings"),
        )
    },
    # names and labels
    "all_reduce-typing-error": (
        lambda: dist.all_reduce(tenser=ones()),
        TYPE,
        ("tenser: got", "did you mean 'tensor'?"),
    ),
    "all_reduce-nothing": (lambda: dist.all_reduce(), TYPE, ("missing", "'tensor'")),
    "all_reduce-label": (lambda: dist.all_reduce(ones(), log_name=5), TYPE, ("log_name: got 5", "a string")),
    "all_reduce-prof": (lambda: dist.all_reduce(ones(), prof=np.ones(2)), TYPE, ("prof: got array", "True or False")),
    "all_reduce-group-as-op": (lambda: dist.all_reduce(ones(), dist.get_world_group()), TYPE, ("op: got <",)),
    "all_reduce-many": (
        lambda: dist.all_reduce(ones(), "sum", None, False, 1, "name", "debug", 4),
        TYPE,
        ("takes 4 positional arguments but 8 were given",),
    ),
    "all_gather_into_tensor-twice": (
        lambda: dist.all_gather_into_tensor(ones(8), ones(), output=ones(8)),
        TYPE,
        ("output: got it and another name of 'output_tensor'",),
    ),
    "all_gather-nothing": (lambda: dist.all_gather(), TYPE, ("tensor: got None", "expected a tensor")),
    "all_gather-two-tensors": (lambda: dist.all_gather(ones(), ones()), TYPE, ("tensor_list: got", "a list of 2")),
    "all_gather-list-alone": (lambda: dist.all_gather([ones(), ones()]), TYPE, ("tensor: got None",)),
    "all_gather-group-text": (lambda: dist.all_gather(ones(), "world"), TYPE, ("group: got 'world'",)),
    "all_gather-group-list": (lambda: dist.all_gather(ones(), [0, 1]), TYPE, ("group: got a list of 2",)),
    "P2POp-nothing": (lambda: dist.P2POp(), TYPE, ("P2POp: missing a required argument: 'op'", "P2POp(op, tensor")),
    "P2POp-typing-error": (
        lambda: dist.P2POp(dist.isend, ones(), per=0),
        TYPE,
        ("P2POp: per: got an argument of this name", "did you mean 'peer'?"),
    ),
    "configure-number": (lambda: dist.configure(prof_ops=5), TYPE, ("prof_ops: got 5", "a list of operations")),
    "configure-switch": (lambda: dist.configure(enabled="perhaps"), TYPE, ("enabled: got 'perhaps'",)),
    "start_profiling_op-number": (lambda: dist.start_profiling_op(5), TYPE, ("op_name_list: got 5", "a list")),
    "set_object_policy-text": (lambda: dist.set_object_policy("no"), TYPE, ("allow_pickle: got 'no'", "True or False")),
    # handles
    **{
        f"wait-{call}-{label}": (
            lambda call=call, timeout=timeout: waited(call, timeout),
            error,
            ("wait: timeout: got",),
        )
        for call in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter_coalesced", "barrier")
        for label, timeout, error in (
            ("string", "1", TYPE),
            ("bool", True, TYPE),
            ("list", [1], TYPE),
            ("complex", 1j, TYPE),
            ("tensor", torch.tensor(1.0), TYPE),
            ("nan", float("nan"), VALUE),
        )
    },
}


def run_queries(labels: list[str]) -> list[str]:
    problems = []
    for label in labels:
        make, error, texts = QUERIES[label]
        try:
            raised = caught(make)
        except AssertionError as problem:
            problems.append(f"{label}: {problem}")
            continue
        missing = [text for text in texts if text not in str(raised)]
        if type(raised) is not error or missing:
            problems.append(f"{label}: {type(raised).__qualname__}: {raised}; expected {error.__qualname__}, {missing}")
    check_group_works()
    group = dist.new_group([0, 1])  # the counters that name groups have not drifted apart
    check_group_works(group)
    dist.destroy_process_group(group)
    return problems


def _by_function() -> dict[str, list[str]]:
    found = defaultdict(list)
    for label in QUERIES:
        found[label.partition("-")[0]].append(label)
    return dict(found)


QUERIES_OF = _by_function()


@pytest.mark.parametrize("function", QUERIES_OF)
def test_wrong_query(pools: Pools, function: str) -> None:
    for rank, problems in enumerate(pools(2).run(run_queries, QUERIES_OF[function])):
        assert not problems, f"on rank {rank}:\n" + "\n".join(problems)


def run_long_waits() -> None:
    """However long a wait may be, it ends with the operation; one that may take no time may be repeated."""
    for timeout in (float("inf"), 1e300, 10**400, timedelta.max):
        tensor = ones()
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        assert work.wait(timeout) is True
        assert tensor.tolist() == [2.0] * 4
    for timeout in (0, -1, -(10**400), timedelta(-1)):
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        with suppress(TimeoutError):
            work.wait(timeout)
        assert work.wait() is True
    check_group_works()


def test_timeouts_of_wait_without_bounds(pools: Pools) -> None:
    pools(2).run(run_long_waits)
