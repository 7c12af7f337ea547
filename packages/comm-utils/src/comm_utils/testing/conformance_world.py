"""The basis of the conformance suite's ranks: a world of one backend, tensors, references. Needs torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import reduce

import torch
from torch.distributed import TCPStore

from comm_utils.backend import Backend, Capabilities, Setup
from comm_utils.reduce_op import ReduceOp
from comm_utils.testing.conformance_provider import load_provider

__all__ = ["TIMEOUT", "TOLERANCES", "World", "bring_up", "close", "reference", "same", "sample"]

#: Given at initialisation.
TIMEOUT = timedelta(seconds=60)
TOLERANCES: dict[torch.dtype, float] = {
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
    torch.float32: 1e-5,
    torch.float64: 1e-12,
}
_STEPS: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def own_device(kind: str) -> torch.device | None:
    """Return the device of this rank; ranks that see fewer devices than there are ranks share them."""
    if kind == "cpu":
        return None
    return torch.device(kind, int(os.environ["LOCAL_RANK"]) % torch.get_device_module(kind).device_count())


def bring_up(provider: str, backend: str, device: str, timeout: timedelta = TIMEOUT) -> Backend:
    """Initialise ``backend`` among the ranks that the runner started."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore(os.environ["MASTER_ADDR"], port, world_size, rank == 0, timedelta(seconds=30))
    place = own_device(device)
    setup = Setup(backend, rank, world_size, store, timeout, place)
    return load_provider(provider).initialize(setup)


def sample(dtype: torch.dtype, shape: tuple[int, ...], rank: int, seed: int = 0) -> torch.Tensor:
    """Values of rank ``rank`` that every rank can compute; small enough that no sum or product overflows."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return (torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5).to(dtype)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.complex128).to(dtype)
    high = 2 if dtype == torch.bool else 4
    return torch.randint(0, high, shape, generator=generator).to(dtype)


def reference(op: ReduceOp, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the reduction of ``parts``: floats in float64, integers as they are."""
    first = parts[0]
    if first.dtype.is_floating_point:
        parts = [part.double() for part in parts]
    elif first.dtype in _UNSIGNED:  # torch computes little with these
        return reference(op, [part.long() for part in parts]).to(first.dtype)
    if op is ReduceOp.AVG:
        return reduce(torch.add, parts) / len(parts)
    return reduce(_STEPS[op], parts).to(torch.float64 if first.dtype.is_floating_point else first.dtype)


def same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """``got`` is ``expected`` bit by bit."""
    assert torch.equal(got.cpu(), expected), f"{what}: got {got}, expected {expected}"


def close(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """``got`` is what :func:`reference` gave, floats to the tolerance of their dtype."""
    if not got.dtype.is_floating_point:
        same(got, expected, what)
        return
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(
        got.double().cpu(), expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}"
    )


class World:
    """A world of one backend; ``fast_paths`` are the operations that are to have one."""

    def __init__(self, backend: Backend, device: str, fast_paths: Collection[str] = ()) -> None:
        self.backend, self.fast_paths = backend, fast_paths
        self.rank, self.size = backend.get_rank(None), backend.get_world_size(None)
        self.capabilities: Capabilities = backend.capabilities(None, device)
        self.device = device

    def mine(self, dtype: torch.dtype, n: int) -> torch.Tensor:
        return sample(dtype, (n,), self.rank).to(self.device)

    def everyones(self, dtype: torch.dtype, n: int) -> list[torch.Tensor]:
        return [sample(dtype, (n,), rank) for rank in range(self.size)]
