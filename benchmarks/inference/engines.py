"""How each variant splits the model over the ranks, and where the time of its communication is taken."""

from __future__ import annotations

import functools
import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d

__all__ = ["ENGINES", "Calls", "Engine"]


@dataclass
class Calls:
    """Of each reduction that the model has made, the time inside of it and its end by the host's clock, in ns."""

    inside_ns: list[int] = field(default_factory=list)
    ends_ns: list[int] = field(default_factory=list)

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, every call of which is one more reduction."""
        inside_ns, ends_ns, now_ns = self.inside_ns, self.ends_ns, time.perf_counter_ns

        def call(*args: Any, **kwargs: Any) -> Any:
            start = now_ns()
            found = function(*args, **kwargs)
            end = now_ns()
            inside_ns.append(end - start)
            ends_ns.append(end)
            return found

        return call

    def timed_further(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, every call of which belongs to the last reduction: it waits for it."""
        inside_ns, ends_ns, now_ns = self.inside_ns, self.ends_ns, time.perf_counter_ns

        def call(*args: Any, **kwargs: Any) -> Any:
            start = now_ns()
            found = function(*args, **kwargs)
            end = now_ns()
            inside_ns[-1] += end - start
            ends_ns[-1] = end
            return found

        return call


@dataclass
class Engine:
    """``model``: called like the one of transformers; ``close``: ends its groups."""

    model: Any
    facts: dict[str, str]
    close: Callable[[], object]
    calls: Calls = field(default_factory=Calls)


def alone(build: Callable[[], Any], ranks: int, dtype: torch.dtype) -> Engine:
    return Engine(build(), {"transformers": version("transformers")}, lambda: None)


def compiler(build: Callable[[], Any], ranks: int, dtype: torch.dtype) -> Engine:
    from deepspeed.ops.op_builder import ShareMemCommBuilder

    builder = ShareMemCommBuilder()
    # What compiled there and was ended would be waited for without end.
    (Path(os.environ["TORCH_EXTENSIONS_DIR"]) / builder.name / "lock").unlink(missing_ok=True)
    builder.load(verbose=False)
    return Engine(None, {}, lambda: None)


def auto_tp(communication: str, build: Callable[[], Any], ranks: int, dtype: torch.dtype) -> Engine:
    """DeepSpeed's automatic tensor parallelism; its layers call ``inference_all_reduce`` of ``deepspeed.comm``."""
    close: Callable[[], object] = c10d.destroy_process_group
    if communication == "ours":
        import comm_orchestrator
        from comm_orchestrator.deepspeed import replace_comm

        replace_comm()
        comm_orchestrator.init_distributed("ccl", verbose=False)
        close = comm_orchestrator.destroy_process_group
    import deepspeed

    if communication == "gloo":
        # What DeepSpeed itself does where its operator cannot be compiled.
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    if communication != "ours":
        deepspeed.init_distributed("gloo", verbose=False)
    engine = deepspeed.init_inference(
        build(), tensor_parallel={"tp_size": ranks}, dtype=dtype, replace_with_kernel_inject=False
    )
    has_operator = hasattr(torch.ops, "deepspeed") and hasattr(torch.ops.deepspeed, "inference_all_reduce_")
    if has_operator != (communication == "operator"):
        raise SystemExit(f"got DeepSpeed's operator: {has_operator}, expected it with {communication!r}: no")
    found = Engine(engine.module, {"deepspeed": version("deepspeed")}, close)
    comm = importlib.import_module("deepspeed.comm")
    comm.inference_all_reduce = found.calls.timed(comm.inference_all_reduce)  # type: ignore[attr-defined]
    return found


def parallelize(communication: str, build: Callable[[], Any], ranks: int, dtype: torch.dtype) -> Engine:
    """torch's ``parallelize_module``, with the plan that transformers has for Llama; on DTensors.

    The head is split like DeepSpeed's, by its inputs, so that the ranks make the same reductions.
    """
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
    from torch.distributed.tensor.placement_types import Replicate

    close: Callable[[], object] = c10d.destroy_process_group
    if communication == "ours":
        import comm_orchestrator

        comm_orchestrator.init_distributed("ccl", verbose=False)
        close = comm_orchestrator.destroy_process_group
    elif communication == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        c10d.init_process_group("fake", store=FakeStore(), rank=int(os.environ["RANK"]), world_size=ranks)
    else:
        c10d.init_process_group(communication)
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    model = build()
    plan: dict[str, ParallelStyle] = {
        f"model.{name}": styles[style]() for name, style in model.config.base_model_tp_plan.items()
    }
    plan["lm_head"] = RowwiseParallel(input_layouts=Replicate())
    mesh = init_device_mesh("cpu", (ranks,))
    # Every rank has all weights: nothing has to be sent.
    model = parallelize_module(model, mesh, plan, src_data_rank=None)
    found = Engine(model, {"transformers": version("transformers")}, close)
    functional.all_reduce = found.calls.timed(functional.all_reduce)
    # The reduction is asynchronous; the tensor that it returns waits at its first use.
    functional.wait_tensor = found.calls.timed_further(functional.wait_tensor)
    return found


# By the module of a variant.
ENGINES: dict[str, Callable[[Callable[[], Any], int, torch.dtype], Engine]] = {
    "alone": alone,
    "compiler": compiler,
    **{f"auto_tp_{name}": functools.partial(auto_tp, name) for name in ("ours", "operator", "gloo")},
    **{f"parallelize_{name}": functools.partial(parallelize, name) for name in ("ours", "gloo", "fake")},
}
