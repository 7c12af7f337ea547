"""Faults of ``deepspeed.comm`` that a replacement must not have: one test each, which says the fault first."""

from __future__ import annotations

import inspect
import logging
import re
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from test_timeouts import ASYNC, CALLS, MONITORED, check_world, handles, mine, outcome

import comm_orchestrator as dist
from comm_utils.errors import ArgumentTypeError
from comm_utils.testing import RankPool, patience

Pools: TypeAlias = Callable[[int], RankPool]

#: Calls that give handles: by async_op, or always.
STARTED = [*ASYNC, "isend", "irecv", "batch_isend_irecv"]
LARGE = 4 * 1024 * 1024  # float32: 16 MiB, more than any buffer on the way takes


# --- messages that block


def run_large_isends() -> None:
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    sent, received = torch.full((LARGE,), rank + 1.0), torch.zeros(LARGE)
    start = time.monotonic()
    work = dist.isend(sent, peer)
    assert time.monotonic() - start < 5 * patience()
    assert isinstance(work, dist.Work)
    assert not work.is_completed()
    dist.barrier()  # both have sent, and neither has received
    assert dist.recv(received, peer) == peer
    assert work.wait()
    assert work.is_completed()
    assert received[0] == received[-1] == peer + 1.0
    assert received.sum() == LARGE * (peer + 1.0)


def test_isend_does_not_block(pools: Pools) -> None:
    """In DeepSpeed, isend calls send, so two ranks that send to each other never get to receive."""
    pools(2).run(run_large_isends, timeout_s=25)


def run_irecv_first() -> None:
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    received = torch.zeros(3)
    receiving = dist.irecv(received, peer)
    assert receiving is not None
    assert not receiving.is_completed()
    assert receiving.exception() is None
    with pytest.raises(dist.CommTimeoutError):
        receiving.wait(0.05)
    dist.barrier()
    sending = dist.isend(torch.full((3,), rank + 1.0), peer)
    assert sending is not None
    assert receiving.wait()
    assert sending.wait()
    assert receiving.is_completed()
    assert sending.is_completed()
    assert receiving.result() is received
    assert received.tolist() == [peer + 1.0] * 3


def test_irecv_does_not_block(pools: Pools) -> None:
    """In DeepSpeed, irecv calls recv, so two ranks that receive before they send never get to send."""
    pools(2).run(run_irecv_first, timeout_s=25)


# --- handles that do nothing, and async_op that is dropped


def on_ccl() -> bool:
    return dist.get_backend() == "ccl"


def run_handle(name: str) -> None:
    call, expected = CALLS[name]
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    form = {"async_op": True} if name in ASYNC else {}
    if rank == 1:
        dist.barrier()  # rank 0 has called, and has looked at its handle
    returned, output = call(group=group, **form)
    works = handles(returned)
    if rank == 0:
        assert works, f"{name} returned {returned!r} and no handle"
        time.sleep(0.05)
        # What is small is sent at once by oneCCL.
        assert not all(work.is_completed() for work in works) or (name in ("send", "isend") and on_ccl())
        assert all(work.exception() is None for work in works)
        dist.barrier()
    assert outcome(returned, output) == expected[rank]
    assert all(work.is_completed() for work in works)
    assert all(work.wait() and work.exception() is None for work in works)
    dist.destroy_process_group(group)
    check_world()


@pytest.mark.parametrize("name", STARTED)
def test_wait_waits(pools: Pools, name: str) -> None:
    """In DeepSpeed, wait() of some handles does nothing, and some functions drop async_op and give no handle."""
    pools(2).run(run_handle, name, timeout_s=25)


def test_every_function_with_async_op_is_tested() -> None:
    functions = {name for name in dist.__all__ if inspect.isroutine(getattr(dist, name))}
    found = {name for name in functions if "async_op" in inspect.signature(getattr(dist, name)).parameters}
    assert found - {"coalescing"} == set(ASYNC)  # which gives a handle anyway: test_coalescing
    assert {"reduce_scatter_coalesced", "inference_all_reduce", "barrier", "all_gather_coalesced"} <= set(ASYNC)


# --- device_ids and timeout that are dropped


def run_device_ids() -> None:
    assert dist.barrier(device_ids=[0]) is None
    work = dist.barrier(async_op=True, device_ids=[0])
    assert work is not None
    assert work.wait()
    for wrong in (0, "0", torch.ones(1), {0}, ["0"], [0.5], [True]):
        with pytest.raises(ArgumentTypeError, match=r"^barrier: device_ids: got .*; expected") as raised:
            dist.barrier(device_ids=wrong)  # type: ignore[arg-type]
        assert type(raised.value) is ArgumentTypeError
    check_world()


def test_device_ids_of_a_barrier_are_looked_at(pools: Pools) -> None:
    """In DeepSpeed, barrier has device_ids and does not pass them on."""
    pools(2).run(run_device_ids)


def alone(call: Callable[[], Any], limit_s: float) -> str:
    """The timeout in which ``call`` of rank 0 ends, while the other ranks only wait."""
    dist.monitored_barrier(timeout=20)
    text = ""
    if dist.get_rank() == 0:
        start = time.monotonic()
        with pytest.raises(dist.CommTimeoutError) as raised:
            call()
        assert limit_s * 0.9 < time.monotonic() - start < limit_s + 10 * patience()
        text = str(raised.value)
    dist.monitored_barrier(timeout=20)
    return text


def run_init_timeout(limit_s: float) -> list[str]:
    dist.init_distributed("gloo", verbose=False, timeout=limit_s, config={"timeouts": {"init_s": 60}})
    found = []
    try:
        group = dist.new_group([0, 1])
        found.append(alone(lambda: dist.all_reduce(mine(), group=group), limit_s))
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        found.append(alone(lambda: dist.all_reduce(mine(), group=mesh.get_group("data")), limit_s))
        mesh = dist.initialize_mesh_device((2, 2), ("data", "sequence"))
        found.append(alone(lambda: dist.barrier(mesh.get_group("sequence")), limit_s))
        subgroup, _ = dist.new_subgroups(2)
        found.append(alone(lambda: dist.broadcast(mine(), 1, subgroup), limit_s))
        other = dist.new_group([0, 3])
        found.append(alone(lambda: dist.monitored_barrier(other), limit_s))
    finally:
        dist.destroy_process_group()
    return found


def test_timeout_of_the_start_reaches_every_group(bare_pools: Pools) -> None:
    """In DeepSpeed, the timeout of init_distributed reaches neither new_group, nor meshes, nor monitored_barrier."""
    limit_s = 1.0  # the ranks connect in this time, too
    found, *_ = bare_pools(4).run(run_init_timeout, limit_s, timeout_s=45)
    ranks = {"all_reduce": "[0, 1]", "all_reduce ": "[0, 2]", "barrier": "[0, 1]", "broadcast": "[0, 1]"}
    for text, (name, members) in zip(found, ranks.items(), strict=False):
        start = rf"{name.strip()} on the group of ranks {re.escape(members)}( \(mesh_\w+\))? timed out after 1 s, "
        assert re.match(start + "as seen by rank 0", text)
    assert found[-1].startswith("monitored_barrier: rank 3 did not arrive within 1 s: rank 3 (pid ")
    assert len(found) == len(ranks) + 1


def run_monitored_timeout() -> str:
    group = dist.new_group([0, 1])
    text = alone(lambda: dist.monitored_barrier(group, timeout=0.2), 0.2)
    dist.destroy_process_group(group)
    return text


def test_timeout_of_monitored_barrier_is_used(pools: Pools) -> None:
    """In DeepSpeed, monitored_barrier of the CCL backend drops its timeout."""
    text, _ = pools(2).run(run_monitored_timeout, timeout_s=25)
    assert text.startswith("monitored_barrier: rank 1 did not arrive within 0.2 s: rank 1 (pid ")


# --- coalesced calls


def run_reduce_scatter_coalesced(op: str, async_op: bool) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    sizes = [5, 4, 1, 0, 8]
    inputs = [torch.arange(1.0, n + 1) * (rank + 1) / 3 for n in sizes]
    inputs.append(torch.arange(6.0).view(2, 3).t())  # read as torch reads it, row by row
    before = [(tensor.clone(), tensor.data_ptr(), tensor._version) for tensor in inputs]
    found = dist.reduce_scatter_coalesced(inputs, op=op, async_op=async_op)
    if async_op:
        assert isinstance(found, dist.Work)
        assert found.wait()
        found = found.result()
    for tensor, (values, place, version) in zip(inputs, before, strict=True):
        assert torch.equal(tensor.view(torch.int32), values.view(torch.int32))
        assert (tensor.data_ptr(), tensor._version) == (place, version)
    share = sum(range(1, W + 1)) / 3 / (W if op == "avg" else 1)
    expected = [torch.arange(1.0, n + 1) * share for n in sizes]
    expected.append(torch.arange(6.0).view(2, 3).t().reshape(-1) * (1 if op == "avg" else W))
    for piece, whole in zip(found, expected, strict=True):
        part = -(-whole.numel() // W)
        torch.testing.assert_close(piece, whole[rank * part : (rank + 1) * part])


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("op", ["avg", "sum"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_reduce_scatter_coalesced_only_reads_its_inputs(pools: Pools, world_size: int, op: str, async_op: bool) -> None:
    """In DeepSpeed, reduce_scatter_coalesced divides the tensors of its caller by the world size, in place."""
    pools(world_size).run(run_reduce_scatter_coalesced, op, async_op)


def run_all_gather_coalesced(async_op: bool) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    inputs = [torch.full((3,), rank + 1.0), torch.full((2, 2), rank, dtype=torch.int16), torch.tensor(bool(rank))]
    before = [tensor.clone() for tensor in inputs]
    flat = [torch.zeros(W * tensor.numel(), dtype=tensor.dtype) for tensor in inputs]
    lists = [[torch.zeros_like(tensor) for _ in range(W)] for tensor in inputs]
    by_rank = [list(row) for row in zip(*lists, strict=True)]
    for outputs in (flat, by_rank):
        work = dist.all_gather_coalesced(outputs, inputs, async_op=async_op)
        assert (work is None) != async_op
        if work is not None:
            assert work.wait()
            assert work.is_completed()
            assert work.result() == outputs
    assert all(torch.equal(tensor, values) for tensor, values in zip(inputs, before, strict=True))
    for output, parts, make in zip(
        flat,
        lists,
        (
            lambda r: torch.full((3,), r + 1.0),
            lambda r: torch.full((2, 2), r, dtype=torch.int16),
            lambda r: torch.tensor(bool(r)),
        ),
        strict=True,
    ):
        expected = [make(r) for r in range(W)]
        assert torch.equal(output, torch.cat([part.view(-1) for part in expected]))
        assert all(torch.equal(part, one) for part, one in zip(parts, expected, strict=True))


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_gather_coalesced_on_gloo(pools: Pools, world_size: int, async_op: bool) -> None:
    """In DeepSpeed, all_gather_coalesced goes through torch's coalescing, which gloo does not have."""
    pools(world_size).run(run_all_gather_coalesced, async_op)


# --- before initialisation


#: What works without a world: it is about the process, its log, or what there is to choose from.
WITHOUT_A_WORLD: dict[str, Callable[[], Any]] = {
    "available_backends": lambda: dist.available_backends()["gloo"].usable is True,
    "configure": lambda: dist.configure(verbose=False) is None,
    "get_comm_operation_count": lambda: dist.get_comm_operation_count() == 0,
    "get_local_rank_from_launcher": lambda: dist.get_local_rank_from_launcher() == 0,
    "get_logged_comm_ops": lambda: dist.get_logged_comm_ops() == [],
    "get_world_rank_from_launcher": lambda: dist.get_world_rank_from_launcher() == 0,
    "get_world_size_from_launcher": lambda: dist.get_world_size_from_launcher() == 1,
    "log_rows": lambda: dist.log_rows() == [],
    "shared_memory_stats": lambda: "used_bytes" in dist.shared_memory_stats(),
    "log_window": lambda: dist.log_window().rows() == [],
    "has_comm_data": lambda: dist.has_comm_data() is False,
    "in_aml": lambda: dist.in_aml() is False,
    "in_aws_sm": lambda: dist.in_aws_sm() is False,
    "in_dlts": lambda: dist.in_dlts() is False,
    "is_available": lambda: dist.is_available() is True,
    "is_initialized": lambda: dist.is_initialized() is False,
    "register_object_type": lambda: callable(dist.register_object_type),
    "reset_log": lambda: dist.reset_log() is None,
    "start_profiling_comms": lambda: dist.start_profiling_comms() is None,
    "start_profiling_op": lambda: dist.start_profiling_op(["all_reduce"]) is None,
    "start_telemetry": lambda: dist.start_telemetry()() is None,
    "stop_profiling_comms": lambda: dist.stop_profiling_comms() is None,
    "stop_profiling_op": lambda: dist.stop_profiling_op(["all_reduce"]) is None,
    "set_object_policy": lambda: dist.set_object_policy(False, 1 << 30) is None,
    "register_communication_hooks": lambda: dist.register_communication_hooks({}) is None,
}
#: What makes a world, or looks for one; tested elsewhere.
MAKING_A_WORLD = {
    "init_distributed",
    "init_process_group",
    "initialize_module",
    "mpi_discovery",
    "patch_aml_env_for_torch_nccl_backend",
    "patch_aws_sm_env_for_torch_nccl_backend",
}
#: Arguments by the names of parameters; all others get a tensor. What they are must not matter yet.
ARGUMENTS: dict[str, Any] = {"group": None, "ranks": [0], "group_size": 1, "group_name": "0"}
#: The function that they are another name of.
SAME = {
    "all_gather_single": "all_gather_into_tensor",
    "allgather_fn": "all_gather_into_tensor",
    "reduce_scatter_fn": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
NEEDING_A_WORLD = sorted(
    {name for name in dist.__all__ if inspect.isroutine(getattr(dist, name))} - {*WITHOUT_A_WORLD, *MAKING_A_WORLD}
)


def run_before_initialisation(names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        parameters = inspect.signature(getattr(dist, name)).parameters.values()
        given = {p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
        arguments = {one: ARGUMENTS.get(one, torch.ones(1)) for one in given}
        if name == "batch_isend_irecv":
            arguments = {"p2p_op_list": [dist.P2POp(dist.isend, torch.ones(1), 0)]}
        forms = [{}, {"async_op": True}] if name in ASYNC else [{}]
        for form in forms:
            label = " ".join([name, *form])
            try:
                getattr(dist, name)(**arguments, **form)
            except Exception as error:
                found[label] = f"{type(error).__name__}: {error}"
            else:
                found[label] = "returned"
    for works in WITHOUT_A_WORLD.values():
        assert works()
    assert not dist.is_initialized()
    return found


def test_calls_before_initialisation(bare_pools: Pools) -> None:
    """In DeepSpeed, a call before init_distributed is an AttributeError about None, or a bare assertion."""
    (found,) = bare_pools(1).run(run_before_initialisation, NEEDING_A_WORLD)
    text = "the distributed environment is not initialised; call comm_orchestrator.init_distributed() first"
    expected = {name: SAME.get(name, name) for name in NEEDING_A_WORLD}
    expected |= {f"{name} async_op": {"send": "isend", "recv": "irecv"}.get(name, expected[name]) for name in ASYNC}
    assert found == {label: f"NotInitializedError: {name}: {text}" for label, name in expected.items()}


# --- a rank outside of the group


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        assert record.levelname == "WARNING"
        self.lines.append(record.getMessage())


#: What a call gives a rank that is not in its group, where that is not None.
NOTHING: dict[str, Any] = {"batch_isend_irecv": [], "recv": -1, "recv_object_list": -1}


def run_outside(names: list[str]) -> dict[str, int]:
    from comm_collectives import arguments

    arguments._warned.clear()
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        check = torch.ones(1)
        dist.all_reduce(check, group=group)
        assert check.item() == 2
        dist.barrier()
        dist.destroy_process_group(group)
        return {}
    assert group is dist.NON_GROUP_MEMBER
    log = Log()
    logging.getLogger("comm").addHandler(log)
    try:
        for name in names:
            for _ in range(2):
                tensor = torch.full((2,), 7.0)
                parameters = inspect.signature(getattr(dist, name)).parameters.values()
                given = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
                found = call_outside(name, given, tensor, group)
                assert found == NOTHING.get(name), f"{name} returned {found!r}"
                assert tensor.tolist() == [7, 7]
    finally:
        logging.getLogger("comm").removeHandler(log)
    dist.barrier()
    warned = {SAME.get(name, name) for name in names}
    return {name: sum(line.startswith(f"{name}: ") and "not a member" in line for line in log.lines) for name in warned}


def call_outside(name: str, given: list[str], tensor: torch.Tensor, group: Any) -> Any:
    if name == "batch_isend_irecv":
        return dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 0, group)])
    return getattr(dist, name)(**{one: tensor for one in given if one != "group"}, group=group)


def test_rank_outside_the_group(pools: Pools) -> None:
    """In DeepSpeed, a collective on a group that this rank is not in fails deep within torch."""
    *_, found = pools(3).run(run_outside, sorted(CALLS))
    assert MONITORED in found
    # A batch of messages is made of calls that say so themselves.
    assert found == dict.fromkeys(found, 1)
