"""Methods of process groups, in every form that ``torch.distributed.ProcessGroup`` takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as c10d

import comm_orchestrator as dist
from comm_utils.errors import ArgumentError, ArgumentTypeError, BackendUnavailableError
from comm_utils.testing import RankPool, run_ranks

Pools: TypeAlias = Callable[[int], RankPool]
SOON = timedelta(seconds=60)


def world() -> Any:
    return c10d.group.WORLD


def own(value: float | None = None) -> torch.Tensor:
    return torch.tensor([float(dist.get_rank()) if value is None else value])


def room(count: int = 2) -> list[torch.Tensor]:
    return [torch.zeros(1) for _ in range(count)]


def at_1(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """``tensors`` on rank 1, and none elsewhere."""
    return tensors if dist.get_rank() == 1 else []


def options(kind: Any, **fields: Any) -> Any:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def reduced(*args: Any, **named: Any) -> list[torch.Tensor]:
    tensor = own()
    world().allreduce(tensor, *args, **named).wait()
    return [tensor]


def reduced_list(*args: Any, **named: Any) -> list[torch.Tensor]:
    tensor = own()
    world().allreduce([tensor], *args, **named).wait()
    return [tensor]


def reduced_to(*args: Any, **named: Any) -> list[torch.Tensor]:
    tensor = own(dist.get_rank() + 1.0)
    world().reduce(tensor, *args, **named).wait()
    return at_1([tensor])


def sent_from(*args: Any, **named: Any) -> list[torch.Tensor]:
    tensor = own()
    world().broadcast(tensor, *args, **named).wait()
    return [tensor]


def gathered_by_all(*args: Any, **named: Any) -> list[torch.Tensor]:
    outputs = room()
    world().allgather(outputs, own(), *args, **named).wait()
    return outputs


def gathered(*args: Any, **named: Any) -> list[torch.Tensor]:
    outputs = at_1(room())
    world().gather(outputs, own(), *args, **named).wait()
    return outputs


def scattered(*args: Any, **named: Any) -> list[torch.Tensor]:
    output = torch.zeros(1)
    world().scatter(output, at_1([own(4.0), own(5.0)]), *args, **named).wait()
    return [output - dist.get_rank()]


def reduced_and_scattered(*args: Any, **named: Any) -> list[torch.Tensor]:
    output = torch.zeros(1)
    world().reduce_scatter(output, [own(1.0 + dist.get_rank()), own(1.0 + dist.get_rank())], *args, **named).wait()
    return [output]


def exchanged(*args: Any, **named: Any) -> list[torch.Tensor]:
    output = torch.zeros(2)
    world().alltoall_base(output, torch.arange(2.0) + 2 * dist.get_rank(), [], [], *args, **named).wait()
    return [output - dist.get_rank()]


MAX = c10d.ReduceOp.MAX
# Forms that releases of torch since 2.6 have.
FORMS: dict[str, tuple[Callable[[], list[torch.Tensor]], list[float]]] = {
    "allreduce(tensor)": (reduced, [1.0]),
    "allreduce(tensor, op)": (lambda: reduced(MAX), [1.0]),
    "allreduce(tensor, op=)": (lambda: reduced(op=MAX), [1.0]),
    "allreduce(tensor, op, timeout)": (lambda: reduced(MAX, SOON), [1.0]),
    "allreduce(tensors, op, timeout=)": (lambda: reduced_list(MAX, timeout=SOON), [1.0]),
    "allreduce(tensors, opts)": (lambda: reduced_list(options(c10d.AllreduceOptions, reduceOp=MAX)), [1.0]),
    "allreduce(tensors, opts=)": (lambda: reduced_list(opts=options(c10d.AllreduceOptions, reduceOp=MAX)), [1.0]),
    "reduce(tensor, root)": (lambda: reduced_to(1), [3.0]),
    "reduce(tensor, root=)": (lambda: reduced_to(root=1), [3.0]),
    "reduce(tensor, root, op)": (lambda: reduced_to(1, MAX), [2.0]),
    "reduce(tensor, root, op=, timeout=)": (lambda: reduced_to(1, op=MAX, timeout=SOON), [2.0]),
    "broadcast(tensor, root)": (lambda: sent_from(1), [1.0]),
    "broadcast(tensor, root=)": (lambda: sent_from(root=1), [1.0]),
    "broadcast(tensor, root, timeout)": (lambda: sent_from(1, SOON), [1.0]),
    "allgather(tensors, tensor)": (gathered_by_all, [0.0, 1.0]),
    "allgather(tensors, tensor, timeout)": (lambda: gathered_by_all(SOON), [0.0, 1.0]),
    "gather(tensors, tensor, root)": (lambda: gathered(1), [0.0, 1.0]),
    "gather(tensors, tensor, root=, timeout=)": (lambda: gathered(root=1, timeout=SOON), [0.0, 1.0]),
    "scatter(tensor, tensors, root)": (lambda: scattered(1), [4.0]),
    "scatter(tensor, tensors, root=)": (lambda: scattered(root=1), [4.0]),
    "reduce_scatter(tensor, tensors)": (reduced_and_scattered, [3.0]),
    "reduce_scatter(tensor, tensors, op)": (lambda: reduced_and_scattered(MAX), [2.0]),
    "reduce_scatter(tensor, tensors, op=, timeout=)": (lambda: reduced_and_scattered(op=MAX, timeout=SOON), [2.0]),
    "alltoall_base(output, input, [], [])": (exchanged, [0.0, 2.0]),
    "alltoall_base(output, input, [], [], timeout)": (lambda: exchanged(SOON), [0.0, 2.0]),
}


def run_forms() -> list[str]:
    wrong = []
    for form, (call, expected) in FORMS.items():
        tensors = call()
        found = torch.cat(tensors).tolist() if tensors else None
        rooted = form.startswith(("reduce(", "gather("))
        if found != (expected if dist.get_rank() == 1 or not rooted else None):
            wrong.append(f"{form}: {found}")
    world().barrier(timeout=SOON).wait()
    world().barrier(c10d.BarrierOptions()).wait()
    return wrong


def test_all_forms(pools: Pools) -> None:
    assert pools(2).run(run_forms) == [[], []]


def run_late(call: str, seconds: float) -> str | None:
    dist.init_distributed("ccl")
    if dist.get_rank() == 1:
        time.sleep(seconds)
    limit = timedelta(seconds=0.5)
    calls: dict[str, Callable[[], Any]] = {
        "barrier": lambda: world().barrier(timeout=limit),
        "allreduce": lambda: world().allreduce([own()], c10d.ReduceOp.SUM, limit),
        "broadcast": lambda: world().broadcast(own(), 1, timeout=limit),
    }
    try:
        calls[call]().wait()
    except dist.CommTimeoutError as error:
        return str(error)
    return None


@pytest.mark.parametrize("call", ["barrier", "allreduce", "broadcast"])
def test_the_timeout_of_a_method_holds_on_ccl(rank_environment: dict[str, Any], call: str) -> None:
    pytest.importorskip("comm_backend_ccl")
    first, _ = run_ranks(run_late, 2, call, 4.0, env=rank_environment)
    assert first is not None
    assert "0.5 s" in first


def run_refused() -> list[str]:
    dist.init_distributed("ccl")
    group = world()
    found = []
    for call in (
        lambda: group.allreduce(own(), MAX, SOON, 1),
        lambda: group.allreduce(own(), root=1),
        lambda: group.allreduce(),
        lambda: group.reduce(own(), "zero"),
        lambda: group.barrier(timeout=3),
        lambda: group.allreduce(own(), op="maxx"),
        lambda: group.split_group([0]),
    ):
        with pytest.raises((ArgumentError, ArgumentTypeError, BackendUnavailableError)) as caught:
            call()
        found.append(str(caught.value))
    return found


def test_other_forms_are_refused_on_ccl(rank_environment: dict[str, Any]) -> None:
    pytest.importorskip("comm_backend_ccl")
    for found in run_ranks(run_refused, 2, env=rank_environment):
        assert found[0].startswith("allreduce: got 1; expected options of c10d (opts=) or op= and timeout=")
        assert found[1].startswith("allreduce: got root=1; expected")
        assert found[2] == "allreduce: expected an argument tensors or tensor"
        assert found[3] == "reduce: root: got 'zero'; expected a rank of the group, an int"
        assert found[4] == "barrier: timeout: got 3; expected a timedelta or None"
        assert found[5].startswith("allreduce: op: got 'maxx'; expected one of")
        assert found[6].startswith("split_group: groups of the backend 'ccl' cannot do this themselves")
