"""How each variant trains the model; each step is forward, backward and AdamW, all in float32."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as c10d
from language_model import loss_of
from torch import Tensor, nn

__all__ = ["ENGINES", "WORLDS", "Engine", "World"]

LR = 1e-4


@dataclass
class Engine:
    """``model``: called in the forward pass; ``finish``: from the loss to changed parameters and no gradients.

    ``remove``: gives its memory back. ``whole``: the parameters of which each rank has all elements.
    """

    model: Callable[[Tensor], Tensor]
    finish: Callable[[Tensor], object]
    remove: Callable[[], object] = lambda: None
    whole: Callable[[], Iterable[Tensor]] = tuple

    def step(self, text: Tensor) -> Tensor:
        loss = loss_of(self.model(text[:, :-1]), text)
        self.finish(loss)
        return loss.detach()


@dataclass
class World:
    """The ranks' group; ``close`` ends it."""

    close: Callable[[], object]
    facts: dict[str, str] = field(default_factory=dict)


def ours() -> World:
    import comm_orchestrator as dist

    dist.init_distributed("ccl", verbose=False)
    return World(dist.destroy_process_group)


def deepspeeds() -> World:
    """DeepSpeed's own communication: on CPUs, gloo for all that training needs."""
    import deepspeed

    # Its operator, which would have to be compiled, serves inference only.
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    return World(c10d.destroy_process_group, {"deepspeed": version("deepspeed")})


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, fused=True)


def plainly(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def ddp(model: nn.Sequential) -> Engine:
    optimizer = adamw(model.parameters())
    engine = nn.parallel.DistributedDataParallel(model)
    return Engine(engine, functools.partial(plainly, optimizer), whole=model.parameters)


def data_parallel(model: nn.Sequential) -> Engine:
    import comm_orchestrator as dist

    handle = dist.register_data_parallel_hooks(model)
    assert handle is not None  # as on ranks outside of the group
    return Engine(model, functools.partial(plainly, adamw(model.parameters())), handle.remove, model.parameters)


def fsdp2(model: nn.Sequential) -> Engine:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (c10d.get_world_size(),))
    for name, module in model.named_children():
        if name.startswith("block"):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Engine(model, functools.partial(plainly, adamw(model.parameters())))


def sharded(stage: int, model: nn.Sequential) -> Engine:
    import comm_orchestrator as dist

    handle = dist.register_sharded_hooks(model, stage=stage)
    assert handle is not None
    optimizer = adamw(handle.parameter_groups())
    handle.attach(optimizer)
    return Engine(model, functools.partial(plainly, optimizer), handle.remove, model.parameters if stage < 3 else tuple)


def zero(stage: int, model: nn.Sequential) -> Engine:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
    }
    engine = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)[0]

    def finish(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return Engine(engine, finish, engine.destroy, model.parameters if stage < 3 else tuple)


# By the module of a variant.
ENGINES: dict[str, Callable[[nn.Sequential], Engine]] = {
    "ddp": ddp,
    "data_parallel": data_parallel,
    "fsdp2": fsdp2,
    **{f"sharded_{stage}": functools.partial(sharded, stage) for stage in (1, 2, 3)},
    **{f"zero_{stage}": functools.partial(zero, stage) for stage in (1, 2, 3)},
}
WORLDS = {name: deepspeeds if name.startswith("zero") else ours for name in ENGINES}
