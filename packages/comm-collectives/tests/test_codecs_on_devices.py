"""Codecs on a GPU: the bits of the CPU, and the bounds that they state."""

from __future__ import annotations

import pytest
import torch

from comm_collectives.compression import make_codec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CODECS = {name: make_codec(name) for name in ("none", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "onebit")}
CODECS |= {"int8 by 16": make_codec("int8", block_size=16), "int4 by 32": make_codec("int4", block_size=32)}


def drawn(kind: str, count: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=random)
    if kind == "of all magnitudes":
        values *= torch.pow(10.0, torch.randint(-44, 38, (count,), generator=random).float())
    elif kind == "denormal":
        values *= 1e-41
    elif kind == "zeros":
        values.zero_()
    return values


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("kind", ["normal", "of all magnitudes", "denormal", "zeros"])
def test_a_gpu_has_the_bits_of_the_cpu(name: str, kind: str) -> None:
    codec = CODECS[name]
    for count in (1, 255, 4096, 100_003):
        source = drawn(kind, count)
        found = []
        for device in ("cpu", "cuda"):
            own, lost = source.to(device), torch.full((count,), 1e-3, device=device)
            wire = torch.empty(codec.encoded_bytes(count), dtype=torch.uint8, device=device)
            with_error, decoded, added = torch.empty_like(wire), torch.ones_like(own), torch.ones_like(own)
            codec.encode(own, wire)
            codec.decode(wire, decoded)
            codec.decode(wire, added, add=True)
            codec.encode(own, with_error, lost)
            found.append([one.cpu() for one in (wire, decoded, added, with_error, lost)])
            assert torch.equal(own.cpu(), source)
            difference = (decoded.double() - own.double()).abs()
            assert ((difference <= codec.bound(own)) | codec.bound(own).isinf()).all()
        for what, on_cpu, on_gpu in zip(("wire", "decoded", "added", "wire with error", "error"), *found, strict=True):
            assert torch.equal(on_cpu.view(torch.uint8), on_gpu.view(torch.uint8)), (what, count)


@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_stays_visible(name: str) -> None:
    codec, source, error = CODECS[name], torch.ones(5000, device="cuda"), torch.zeros(5000, device="cuda")
    source[4321], source[17] = torch.nan, torch.inf
    wire = torch.empty(codec.encoded_bytes(5000), dtype=torch.uint8, device="cuda")
    codec.encode(source, wire, error)
    target = torch.zeros(5000, device="cuda")
    codec.decode(wire, target)
    assert not target[[17, 4321]].isfinite().any()
    assert target[4000] == 1
    assert error.isfinite().all()
