"""Calls within graphs of ``torch.compile``: recorded, compared and refused as other calls, in the program's order."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import os
import signal
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch

import comm_orchestrator as dist
from comm_collectives.call_sites import calling_from
from comm_collectives.graph_operators import FORMS
from comm_utils.flight_recorder import RECORDER, open_ring
from comm_utils.operations.table import ROWS
from comm_utils.testing import RankPool, run_ranks, run_ranks_outcomes

Pools: TypeAlias = Callable[[int], RankPool]

BACKEND = os.environ.get("TESTS_BACKEND", "gloo")
QUIET: dict[str, Any] = {"CUDA_VISIBLE_DEVICES": ""}
INDUCTOR = pytest.mark.skipif(
    torch.__version__.startswith("2.6.") and importlib.util.find_spec("setuptools") is None,
    reason="inductor of torch 2.6 needs setuptools",
)


def own_tensor() -> torch.Tensor:
    return torch.arange(4.0) + 10 * dist.get_rank() + 1


def whole(function: Callable[..., Any], backend: Any = "eager", **options: Any) -> Any:
    """``function`` in one graph: ``fullgraph`` is what makes a break an error."""
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def test_every_collective_that_writes_tensors_has_an_operator() -> None:
    writing = {row.name for row in ROWS if any(one.is_written for one in row.tensors) and not row.pattern.is_message}
    assert set(FORMS) == writing
    for name, form in FORMS.items():
        parameters = [one for one in inspect.signature(getattr(dist, name)).parameters if one != "async_op"]
        assert [argument for argument, _ in form] == parameters


def independent(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Calls on tensors that have nothing to do with each other, two with equal inputs, and one that nobody reads."""
    last = tensor + 3
    unread = tensor * 5
    dist.all_reduce(unread)
    twins = tensor * 2, tensor * 2
    for one in twins:
        dist.all_reduce(one, "max")
    dist.broadcast(last, 1)
    gathered = tensor.new_empty(8)
    dist.all_gather_into_tensor(gathered, tensor.sin())
    part = tensor.new_empty(2)
    dist.reduce_scatter_tensor(part, tensor.cos(), "avg")
    dist.reduce(last[1:3], 0)
    unread = tensor * 7
    dist.all_reduce(unread, "min")
    return (*twins, gathered, part, last)


ORDER = ["all_reduce", "all_reduce", "all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"]
ORDER += ["reduce", "all_reduce"]


def calls_of(function: Callable[[], Any]) -> list[tuple[str, str, str]]:
    """Call, op and caller of what a function makes this rank record."""
    with contextlib.closing(open_ring(RECORDER.path)) as ring:
        ring.refresh()
        before = [ring.count(lane) for lane in (0, 1)]
        function()
        ring.refresh()
        made = [one for lane in (0, 1) for one in ring.calls(lane) if one.number > before[lane]]
    return [(one.call or one.operation, one.op, one.caller) for one in sorted(made, key=lambda one: one.begin_ns)]


def in_order(backend: str, compiler: str) -> tuple[list[str], list[str]]:
    dist.init_distributed(backend, verbose=False)
    compiled = whole(independent, compiler)
    tensor = own_tensor()
    for _ in range(2):
        for found, expected in zip(compiled(tensor), independent(tensor), strict=True):
            torch.testing.assert_close(found, expected)
    eager = [call for call, _, _ in calls_of(lambda: independent(tensor))]
    graph = [call for call, _, _ in calls_of(lambda: compiled(tensor))]
    dist.configure(enabled=True)
    compiled(tensor)
    logged = sorted({row.name for row in dist.log_rows()})
    assert logged == sorted(set(ORDER))
    dist.destroy_process_group()
    return eager, graph


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def test_calls_keep_the_order_of_the_program(compiler: str) -> None:
    found = run_ranks(in_order, 2, BACKEND, compiler, timeout_s=400, env=QUIET)
    for eager, graph in found:
        assert graph == eager
    if BACKEND == "gloo":  # ccl keeps no record of calls that were complete at once in the same way
        assert found[0][1] == ORDER


def summed_in(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    total = tensor * 2
    dist.all_reduce(total, group=group)
    return total


def of_groups() -> None:
    together, alone = dist.new_group([0, 1]), dist.new_group([dist.get_rank()])
    compiled = whole(summed_in)
    tensor = own_tensor()
    for group in (together, alone, None, together, alone):
        assert torch.equal(compiled(tensor, group), summed_in(tensor, group))
    dist.destroy_process_group(together)
    with pytest.raises(dist.NotInitializedError, match="all_reduce: this process group no longer exists"):
        compiled(tensor, together)
    dist.destroy_process_group(alone)


def test_a_graph_knows_its_group(pools: Pools) -> None:
    pools(2).run(of_groups, timeout_s=120)


def views(tensor: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
    dist.all_reduce(tensor[2:4])
    base = tensor * 2
    dist.broadcast(base[:2], 1)
    output = torch.empty_like(base)
    dist.all_to_all_single(output, base, sizes, sizes)
    return base, output


def varied() -> None:
    for compiler in ("eager", "aot_eager"):
        for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
            compiled = whole(views, compiler, dynamic=True)
            with mode():
                for size in (4, 6, 8):
                    expected, given = torch.arange(size) + 1.0, torch.arange(size) + 1.0
                    wanted = views(expected, [size // 2] * 2)
                    found = compiled(given, [size // 2] * 2)
                    assert torch.equal(given, expected)
                    for one, other in zip(found, wanted, strict=True):
                        assert torch.equal(one, other)
    parameter = torch.nn.Parameter(own_tensor())

    def summed() -> torch.Tensor:
        with torch.no_grad():
            dist.all_reduce(parameter)
        return parameter * 2

    result = whole(summed, "aot_eager")()
    assert result.tolist() == [24.0, 28.0, 32.0, 36.0]
    result.sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [2.0] * 4


def test_views_inputs_shapes_and_modes(pools: Pools) -> None:
    pools(2).run(varied, timeout_s=240)


def broken_on_one(backend: str) -> list[float]:
    dist.init_distributed(backend, verbose=False)
    tensor = own_tensor()

    @torch.compile(backend="eager")
    def total(tensor: torch.Tensor) -> torch.Tensor:
        doubled = tensor * 2
        if dist.get_rank() == 1:
            print(end="")
            torch._dynamo.graph_break()
        dist.all_reduce(doubled)
        return doubled

    for _ in range(20):
        result = total(tensor)
    dist.barrier()
    dist.destroy_process_group()
    return result.tolist()  # type: ignore[no-any-return]


def test_one_rank_may_leave_its_graph() -> None:
    found = run_ranks(broken_on_one, 2, BACKEND, timeout_s=200, env=QUIET)
    assert found == [[24.0, 28.0, 32.0, 36.0]] * 2


def different(backend: str) -> str:
    dist.init_distributed(backend, verbose=False, config={"checks": {"mismatch": "strict"}})
    op = "sum" if dist.get_rank() else "max"  # torch 2.6 does not trace get_rank()

    def call(tensor: torch.Tensor) -> torch.Tensor:
        total = tensor * 2
        dist.all_reduce(total, op)
        return total

    try:
        whole(call)(own_tensor())
    except dist.CollectiveMismatchError as error:
        return str(error)
    finally:
        with contextlib.suppress(dist.CommError):
            dist.destroy_process_group()
    return "no error"


def test_calls_that_differ_in_graphs_are_a_mismatch() -> None:
    for said in run_ranks(different, 2, BACKEND, timeout_s=200, env=QUIET):
        assert "all_reduce" in said
        assert "op max" in said
        assert "op sum" in said


def left_alone(backend: str) -> tuple[str, str]:
    dist.init_distributed(backend, verbose=False)
    compiled = whole(summed_in)
    compiled(own_tensor(), None)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        compiled(own_tensor(), None)
    except dist.CommError as error:
        return type(error).__name__, str(error)
    finally:
        with contextlib.suppress(dist.CommError):
            dist.destroy_process_group()
    return "", "no error"


def test_a_rank_that_died_is_named_in_a_graph() -> None:
    error, text = run_ranks_outcomes(left_alone, 2, BACKEND, timeout_s=200, env=QUIET)[0].value
    assert error == "PeerLostError"
    assert "rank 1 (pid " in text


def worlds(backend: str) -> tuple[bool, int]:
    graphs = 0

    def counting(module: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return module

    def total(tensor: torch.Tensor) -> torch.Tensor:
        doubled = tensor * 2
        dist.all_reduce(doubled)
        return doubled

    compiled = whole(total, counting)
    with pytest.raises(dist.NotInitializedError):
        compiled(torch.ones(2))
    is_held = False
    for _ in range(2):
        dist.init_distributed(backend, verbose=False)
        assert compiled(torch.ones(2)).tolist() == [4.0, 4.0]
        world = weakref.ref(dist.get_world_group())
        dist.destroy_process_group()
        gc.collect()
        is_held |= world() is not None
        with pytest.raises(dist.NotInitializedError):
            compiled(torch.ones(2))
    return is_held, graphs


def test_a_graph_serves_one_world_after_another() -> None:
    assert run_ranks(worlds, 2, BACKEND, timeout_s=200, env=QUIET) == [(False, 1)] * 2


def complex_sums() -> None:
    torch._dynamo.reset()
    tensor = own_tensor().to(torch.complex64) * 1j
    assert torch.equal(torch.compile(summed_in)(tensor, None), summed_in(tensor, None))


@pytest.mark.slow
@INDUCTOR
def test_inductor_compiles_around_calls_on_complex_tensors(pools: Pools) -> None:
    pools(2).run(complex_sums, timeout_s=200)


class Summing(torch.nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return summed_in(tensor, self.group)


def exported() -> None:
    tensor, group = own_tensor(), dist.new_group([0, 1])
    with torch.no_grad():
        program = torch.export.export(Summing(None), (tensor,), strict=True)
        assert torch.equal(program.module()(tensor), summed_in(tensor, None))
        imaginary = tensor.to(torch.complex64) * 1j
        program = torch.export.export(Summing(None), (imaginary,), strict=True)
        assert torch.equal(program.module()(imaginary), summed_in(imaginary, None))
        with pytest.raises(Exception, match=r"eager_all_reduce|torch\.export only on the default group"):
            torch.export.export(Summing(group), (tensor,), strict=True)
        with pytest.raises(dist.ArgumentError, match=r"^all_reduce: got called under torch\.export.*strict=True"):
            torch.export.export(Summing(None), (tensor,), strict=False)
    dist.destroy_process_group(group)


@pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"), reason="torch 2.6 exports no program with a tensor of a module"
)
def test_an_exported_program_communicates_in_the_default_group_alone(pools: Pools) -> None:
    pools(2).run(exported, timeout_s=120)


def in_a_block() -> None:
    compiled = whole(summed_in)
    compiled(own_tensor(), None)
    refused = pytest.raises(dist.ArgumentError, match=r"got called in a graph of torch\.compile within coalescing")
    with refused, dist.coalescing():
        compiled(own_tensor(), None)


def test_a_graph_within_coalescing_is_refused(pools: Pools) -> None:
    pools(2).run(in_a_block, timeout_s=120)


def call_of_a_helper(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def called() -> list[str]:
    def step(tensor: torch.Tensor) -> torch.Tensor:
        total = tensor * 2
        call_of_a_helper(total)
        return total

    compiled = whole(step, "aot_eager")
    compiled(own_tensor())
    return [caller for _, _, caller in calls_of(lambda: compiled(own_tensor()))]


@pytest.mark.gloo("which records the caller of every call")
def test_the_caller_is_the_line_of_the_program(pools: Pools) -> None:
    line = inspect.getsourcelines(call_of_a_helper)[1] + 1
    for callers in pools(2).run(called, timeout_s=120):
        assert [os.path.basename(one) for one in callers] == [f"{os.path.basename(__file__)}:{line} call_of_a_helper"]


def test_a_line_calls() -> None:
    def where(one: int) -> tuple[int, str, int, str]:
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        caller = frame.f_back
        return one, caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name

    assert calling_from("/a b/program.py:71 <lambda>")(where, {"one": 5}) == (5, "/a b/program.py", 71, "<lambda>")
    for wrong in ("", "program.py:x step", "program.py:-1 step"):
        assert calling_from(wrong)(where, {"one": 5})[0] == 5
