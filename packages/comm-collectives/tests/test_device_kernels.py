"""The kernels of codecs for GPUs, interpreted on the CPU; ``test_codecs_on_devices.py`` compares them on a GPU.

The interpreter rounds to bfloat16 and 8-bit floats in a way of its own, so these formats are compared there alone.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comm_collectives.compression import Codec, device_kernels, fused, make_codec
from comm_utils.testing import run_ranks

KINDS = ("normal", "of all magnitudes", "denormal", "zeros", "largest")


def drawn(kind: str, count: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=random)
    if kind == "of all magnitudes":
        values *= torch.pow(10.0, torch.randint(-44, 38, (count,), generator=random).float())
    if kind == "largest":
        values = values.sign() * torch.finfo(torch.float32).max
    return values * {"denormal": 1e-41, "zeros": 0.0}.get(kind, 1.0)


def results(codec: Codec, source: torch.Tensor) -> list[torch.Tensor]:
    count, error = source.numel(), torch.full_like(source, 1e-3)
    wire = torch.zeros(codec.encoded_bytes(count), dtype=torch.uint8)
    with_error, decoded, added = torch.zeros_like(wire), torch.ones_like(source), torch.ones_like(source)
    codec.encode(source, wire)
    codec.decode(wire, decoded)
    codec.decode(wire, added, add=True)
    codec.encode(source, with_error, error)
    return [wire, decoded, added, with_error, error]


class OnDevice:
    """Within this, codecs take tensors of the CPU for those of a GPU.

    Attributes:
        taken: for each call, whether a kernel has done it.
    """

    def __init__(self) -> None:
        self.taken: list[bool] = []

    def __enter__(self) -> OnDevice:
        self._before = fused.encode, fused.decode, device_kernels._is_on_gpu, device_kernels._run
        run = device_kernels._run

        def counted(*arguments: Any) -> bool:
            self.taken.append(run(*arguments))
            return self.taken[-1]

        device_kernels._run, device_kernels._is_on_gpu = counted, lambda _: True
        fused.encode, fused.decode = device_kernels.encode, device_kernels.decode
        return self

    def __exit__(self, *_: object) -> None:
        fused.encode, fused.decode, device_kernels._is_on_gpu, device_kernels._run = self._before


def compare(name: str) -> None:
    """Compare the kernels of a format with what torch computes."""
    for options in ({},) if name == "fp16" else ({}, {"block_size": 16}, {"block_size": 4096}):
        codec = make_codec(name, **options)
        for kind in KINDS:
            for count in (1, 255, 9000):
                source = drawn(kind, count)
                with OnDevice() as device:
                    found = results(codec, source)
                assert device.taken == [True] * (2 if name == "fp16" else 4)
                names = ("wire", "decoded", "added", "wire with error", "error")
                for what, one, expected in zip(names, found, results(codec, source), strict=True):
                    assert torch.equal(one.view(torch.uint8), expected.view(torch.uint8)), (options, kind, count, what)
    source = torch.ones(9000)
    source[17], source[8000] = torch.nan, torch.inf
    with OnDevice():
        _, decoded, _, _, error = results(make_codec(name), source)
    assert not decoded[[17, 8000]].isfinite().any()
    assert decoded[4000] == 1
    assert error.isfinite().all()


@pytest.mark.parametrize("name", ["fp16", "int8", "int4", "onebit"])
def test_interpreted(name: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed: nox -s triton")
    run_ranks(compare, 1, name, env={"TRITON_INTERPRET": "1", "COMM_TESTS_FORK": "0"}, timeout_s=280)


def test_a_kernel_that_cannot_be_built_is_replaced_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Unbuildable:
        def __getitem__(self, _: object) -> Any:
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(device_kernels, "_broken", set())
    monkeypatch.setattr(device_kernels, "_kernels", lambda: SimpleNamespace(encode_blocks=Unbuildable()))
    codec, source = make_codec("int8"), drawn("normal", 1000)
    with caplog.at_level(logging.WARNING, "comm"), OnDevice() as device:
        found = results(codec, source)
    assert device.taken == [False] * 4
    assert all(map(torch.equal, found, results(codec, source)))
    (record,) = caplog.records
    assert "int8 goes on in torch's own kernels" in record.getMessage()
    assert "Failed to find C compiler" in record.getMessage()


@pytest.mark.parametrize(
    ("source", "size", "block"),
    [
        (torch.ones(96), 104, 48),
        (torch.ones(0), 0, 256),
        (torch.ones(512)[::2], 260, 256),
        (torch._neg_view(torch.ones(256)), 260, 256),
        (torch.ones(256, dtype=torch.float64), 260, 256),
        (torch.ones(256), 259, 256),
        (torch.ones(256), 264, 256),
        (torch.ones(256), 260, 512),
    ],
    ids=range(8),
)
def test_others_are_left_to_torch(source: torch.Tensor, size: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_kernels, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(device_kernels, "_run", lambda *_: True)
    wire, fitting = torch.zeros(size, dtype=torch.uint8), torch.ones(256)
    taken = block == 512  # one block, which is not full
    assert device_kernels.encode("int8", source, wire, block, None) is taken
    assert device_kernels.decode("int8", wire, source, block, False) is taken
    right = torch.zeros(260, dtype=torch.uint8)
    assert device_kernels.encode("int8", fitting, right, 256, torch.zeros(256))
    for error in (torch.zeros(255), torch.zeros(512)[::2], torch.zeros(256).double()):
        assert not device_kernels.encode("int8", fitting, right, 256, error)
    assert not device_kernels.encode("int8", fitting, right.view(torch.int8), 256, None)
    assert not device_kernels.encode("int8", fitting, torch.zeros(261, dtype=torch.uint8)[1:], 256, None)


def test_formats_to_which_a_gpu_does_not_round_once_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    served, names = {}, ("bf16", "fp8_e4m3", "fp16", "int4")
    on_gpu: Any = SimpleNamespace(is_cuda=True, device="cuda")
    for capability in ((7, 5), (8, 0), (8, 9), (9, 0)):
        monkeypatch.setattr(device_kernels, "_capability", lambda _, found=capability: found)
        served[capability] = {name for name in names if device_kernels._is_served(name, 256, on_gpu)}
    assert served[7, 5] == {"fp16", "int4"}
    assert served[8, 0] == served[8, 9] == {"fp16", "int4", "bf16"}
    assert served[9, 0] == {"fp16", "int4", "bf16", "fp8_e4m3"}


@pytest.mark.parametrize("name", ["fp16", "int8"])
def test_what_is_written_counts_as_a_new_version(name: str) -> None:
    codec, source = make_codec(name), torch.ones(64)
    wire, error, target = torch.zeros(codec.encoded_bytes(64), dtype=torch.uint8), torch.zeros(64), torch.zeros(64)
    codec.encode(source, wire, error)
    codec.decode(wire, target)
    assert wire._version
    assert error._version
    assert target._version
    assert source._version == 0
