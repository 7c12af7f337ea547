"""Codecs of other packages on real ranks: one with a header, and versions that differ between ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import comm_orchestrator as dist
from comm_collectives.compression import Codec
from comm_utils.errors import CollectiveMismatchError
from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]


class Scaled(Codec):
    """8 bits an element, with one scale before each piece."""

    name = "scaled"

    def encoded_bytes(self, count: int) -> int:
        return 4 + count

    def encode(self, source: torch.Tensor, wire: torch.Tensor, error: torch.Tensor | None = None) -> None:
        scale = source.abs().max() / 127
        wire[:4].view(torch.float32).copy_(scale)
        wire[4:].view(torch.int8).copy_(torch.round(source / scale))

    def decode(self, wire: torch.Tensor, target: torch.Tensor, add: bool = False) -> None:
        decoded = wire[4:].view(torch.int8).float() * wire[:4].view(torch.float32)
        target.copy_(target + decoded if add else decoded)

    def bound(self, source: torch.Tensor) -> torch.Tensor:
        return torch.full_like(source, float(source.abs().max()) / 254)


class Wider(Scaled):
    """A later version, which sends two bytes an element."""

    def encoded_bytes(self, count: int) -> int:
        return 4 + 2 * count

    def encode(self, source: torch.Tensor, wire: torch.Tensor, error: torch.Tensor | None = None) -> None:
        super().encode(source, wire[: 4 + source.numel()], error)

    def decode(self, wire: torch.Tensor, target: torch.Tensor, add: bool = False) -> None:
        super().decode(wire[: 4 + target.numel()], target, add)


def compression_of(codec: Codec) -> dist.Compression:
    compression = dist.Compression("int8")
    compression.codec = codec
    return compression


def uneven(backend: str) -> list[float]:
    """Return what this rank gets where rank r sends nothing to the next one, 7 elements to every other."""
    dist.init_distributed(backend, verbose=False, timeout=60)
    rank, size = dist.get_rank(), dist.get_world_size()
    sends = [0 if to == (rank + 1) % size else 7 for to in range(size)]
    takes = [0 if rank == (sender + 1) % size else 7 for sender in range(size)]
    source = torch.cat([torch.full((count,), 10.0 * rank + to + 1) for to, count in enumerate(sends)])
    target = torch.full((sum(takes),), -1.0)
    dist.all_to_all_single(target, source, takes, sends, compression=compression_of(Scaled()))
    dist.destroy_process_group()
    return target.view(-1, 7).mean(1).tolist()


@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_a_codec_with_a_header_in_an_all_to_all_with_empty_entries(bare_pools: Pools, backend: str) -> None:
    found = bare_pools(3).run(uneven, backend)
    senders = [[other for other in range(3) if rank != (other + 1) % 3] for rank in range(3)]
    for rank, values in enumerate(found):
        assert values == pytest.approx([10.0 * other + rank + 1 for other in senders[rank]], rel=1e-5)


def differing(backend: str, call: str) -> str:
    dist.init_distributed(backend, verbose=False, timeout=60)
    compression = compression_of(Wider() if dist.get_rank() else Scaled())
    tensor, size = torch.ones(1000), dist.get_world_size()
    try:
        if call == "all_reduce":
            dist.all_reduce(tensor, compression=compression)
        elif call == "all_gather":
            dist.all_gather_into_tensor(torch.empty(1000 * size), tensor, compression=compression)
        else:
            dist.all_to_all_single(torch.empty(1000), tensor, compression=compression)
        message = "no error"
    except CollectiveMismatchError as error:
        message = str(error)
    dist.all_reduce(tensor)
    assert tensor[0].item() == size
    dist.destroy_process_group()
    return message


@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "all_to_all"])
@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_versions_of_a_codec_that_differ_raise_before_anything_is_sent(
    bare_pools: Pools, backend: str, call: str
) -> None:
    for message in bare_pools(2).run(differing, backend, call):
        assert "of which nothing was sent" in message
        assert "Scaled, 260 bytes for 256 elements" in message
        assert "Wider, 516 bytes for 256 elements" in message
