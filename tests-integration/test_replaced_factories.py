"""Calls where a program has replaced torch's factory functions, as ``deepspeed.zero.Init`` does for half precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_utils.testing import patience, run_ranks

REPLACED = ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")
SHAPE = (2, 2, 3, 4)


@contextmanager
def model_in_half_precision() -> Iterator[None]:
    """Give new floating-point tensors the dtype of a model's parameters, whatever is asked for."""

    def replaced(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def create(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = function(*args, **kwargs)
            return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

        return create

    before = {name: getattr(torch, name) for name in REPLACED}
    for name, function in before.items():
        setattr(torch, name, replaced(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(torch, name, function)


def results(backend: str) -> dict[str, list[float]]:
    """Return what each kind of call gives, of which the temporaries are made in half precision by the program."""
    dist.init_distributed(backend, timeout=60 * patience(), verbose=False)
    size, value = dist.get_world_size(), 1.2345678
    plain = torch.full(SHAPE, value)
    whole = torch.full((1, *SHAPE[1:]), value)
    outputs = {name: torch.zeros(SHAPE).to(memory_format=torch.channels_last) for name in ("gather", "exchange")}
    parts = [torch.zeros(SHAPE).to(memory_format=torch.channels_last) for _ in range(size)]
    reduced = {name: torch.full((64, 64), value) for name in ("int8", "powersgd", "sum")}
    many = [torch.full((5,), value), torch.full((3,), value, dtype=torch.float64)]
    found: dict[str, list[float]] = {}
    with model_in_half_precision():
        assert torch.zeros(1, dtype=torch.float32).dtype == torch.bfloat16
        found["all_gather of one tensor"] = torch.cat(dist.all_gather(plain)).flatten().tolist()
        dist.all_gather_into_tensor(outputs["gather"], whole)
        dist.all_to_all_single(outputs["exchange"], plain)
        dist.all_gather(parts, plain)
        dist.all_reduce(reduced["sum"], "avg")
        for codec in ("int8", "powersgd"):
            dist.all_reduce(reduced[codec], "avg", compression=codec)
        with dist.coalescing():
            for one in many:
                dist.all_reduce(one, "avg")
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, many[1][:0])
        assert [one.dtype for one in objects] == [torch.float64] * size
    for name, tensor in {**outputs, **reduced}.items():
        found[name] = tensor.flatten().tolist()
    for name, tensors in {"all_gather": parts, "coalesced": many}.items():
        found[name] = [number for tensor in tensors for number in tensor.flatten().tolist()]
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_temporaries_have_the_dtype_of_the_call(backend: str) -> None:
    for found in run_ranks(results, 2, backend, timeout_s=120 * patience()):
        for name, numbers in found.items():
            bound = 1e-2 if name == "int8" else 1e-5
            assert numbers == pytest.approx([1.2345678] * len(numbers), rel=bound), name
