"""Codecs keep the bounds that they state, for every finite tensor."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_collectives.compression import Codec, codec_names, fused, make_codec, registry
from comm_utils.errors import ArgumentError, CollectiveMismatchError

NAMES = ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int4", "int8", "none", "onebit", "topk"]
WITH_BLOCKS = ["fp8_e4m3", "fp8_e5m2", "int4", "int8", "onebit"]


def through(codec: Codec, source: torch.Tensor, error: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``source`` encoded and decoded."""
    size = codec.encoded_bytes(source.numel())
    memory = torch.full((size + 8,), 0x5A, dtype=torch.uint8)
    codec.encode(source, memory[:size], error)
    assert (memory[size:] == 0x5A).all()
    target = torch.full_like(source, 7.0)
    codec.decode(memory[:size], target)
    added = torch.full_like(source, 0.5)
    codec.decode(memory[:size], added, add=True)
    assert torch.equal(added.nan_to_num(7), (target + 0.5).nan_to_num(7))
    return target


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
some = st.one_of(
    st.lists(finite, max_size=70),
    st.lists(st.floats(-1, 1, width=32), max_size=300),
    st.builds(lambda value, count: [value] * count, finite, st.integers(0, 300)),
    st.lists(st.floats(-(2.0**-126), 2.0**-126, width=32), max_size=100),
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(values=some)
def test_no_element_loses_more_than_the_bound(name: str, values: list[float]) -> None:
    options = {"block_size": 16} if name in WITH_BLOCKS else {"ratio": 0.1} if name == "topk" else {}
    codec = make_codec(name, **options)
    source = torch.tensor(values, dtype=torch.float32)
    lost = (through(codec, source).double() - source.double()).abs()
    bound = codec.bound(source).double()
    assert bound.shape == source.shape
    assert not bound.isnan().any()
    # inf - inf is NaN: what became infinite has an infinite bound.
    assert ((lost <= bound) | bound.isinf()).all(), (source[lost > bound], lost[lost > bound], bound[lost > bound])


@pytest.mark.parametrize("name", NAMES)
def test_sizes_that_do_not_divide(name: str) -> None:
    codec = make_codec(name)
    for count in [0, 1, 2, 3, 15, 17, 255, 257, 2047, 2049, 5000]:
        source = torch.randn(count, generator=torch.Generator().manual_seed(count))
        lost = (through(codec, source) - source).abs()
        assert (lost <= codec.bound(source)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible(name: str, bad: float) -> None:
    codec = make_codec(name)
    source = torch.ones(5000)
    source[4321] = bad
    error = torch.zeros(5000)
    target = through(codec, source, error)
    assert not target[4321].isfinite()
    assert error.isfinite().all()
    assert target[0] == 1 or name == "topk"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_lost_arrives_later(name: str) -> None:
    codec, random = make_codec(name), torch.Generator().manual_seed(1)
    sent, arrived, error = torch.zeros(3000), torch.zeros(3000), torch.zeros(3000)
    for _ in range(30):
        source = torch.randn(3000, generator=random)
        sent += source
        arrived += through(codec, source, error)
    torch.testing.assert_close(arrived + error, sent, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("native", [True, False])
# Of 7, 15, 126 and 245 the mean in the last block is rounded up.
@pytest.mark.parametrize("count", [0, 1, 7, 15, 126, 128, 245])
def test_one_bit_of_the_largest_numbers_stays_finite(count: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(fused, "encode", lambda *_: False)
        monkeypatch.setattr(fused, "decode", lambda *_: False)
    largest = torch.finfo(torch.float32).max
    source = torch.full((count,), largest)
    source[1::3] = -largest
    assert torch.equal(through(make_codec("onebit"), source), source)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("divisor", [1, 3])
@pytest.mark.parametrize("feeds_back", [False, True])
def test_a_codec_reduces_in_one_step_as_in_several(name: str, divisor: int, feeds_back: bool) -> None:
    codec, random = make_codec(name), torch.Generator().manual_seed(2)
    own, *others = torch.randn(3, 3001, generator=random)
    error = torch.randn(3001, generator=random) if feeds_back else None
    wires = [torch.empty(codec.encoded_bytes(3001), dtype=torch.uint8) for _ in range(4)]
    for wire, other in zip(wires, others, strict=False):
        codec.encode(other, wire)
    expected, expected_error = own.clone(), None if error is None else error.clone()
    Codec.decode_reduce_encode(codec, wires[:2], expected, divisor, wires[2], expected_error)
    codec.decode_reduce_encode(wires[:2], own, divisor, wires[3], error)
    assert torch.equal(wires[2], wires[3])
    assert torch.equal(own, expected)
    assert (error is None and expected_error is None) or torch.equal(error, expected_error)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("none", 32), ("fp16", 16), ("bf16", 16), ("fp8", 8), ("int8", 8), ("int4", 4), ("onebit", 1.25), ("topk", 0.64)],
)
def test_bytes_on_the_wire(name: str, bits: float) -> None:
    codec, count = make_codec(name), 1 << 20
    assert codec.encoded_bytes(count) == pytest.approx(count * bits / 8, rel=0.04)
    assert codec.encoded_bytes(0) == 0


def test_names() -> None:
    assert {*NAMES, "fp8"} <= set(codec_names())
    assert repr(make_codec("int8", block_size=64)) == "int8(block_size=64)"
    assert repr(make_codec("fp8")) == repr(make_codec("fp8_e4m3"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("int7", {}, "got 'int7'; expected one of bf16, fp16"),
        ("int8", {"block_size": 17}, "block_size: got 17; expected a multiple of 16 up to 4096"),
        ("int8", {"block_size": True}, "block_size: got True; expected an integer"),
        ("int8", {"block_size": 8192}, "block_size: got 8192"),
        ("fp16", {"block_size": 16}, "fp16 does not take all of: block_size"),
        ("topk", {"ratio": 0}, "ratio: got 0; expected more than 0 and at most 1"),
    ],
)
def test_wrong_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make_codec(name, **options)


@pytest.mark.parametrize("place", [-1, 100, 2**31 - 1])
def test_a_peers_place_beyond_the_tensor_is_refused(place: int) -> None:
    codec = make_codec("topk", ratio=0.01)
    wire = torch.zeros(codec.encoded_bytes(100), dtype=torch.uint8)
    wire[:4].view(torch.int32)[0] = place
    with pytest.raises(CollectiveMismatchError, match="places that a tensor of 100 elements does not have"):
        codec.decode(wire, torch.zeros(100))


def install(folder: Path, package: str, entries: str, code: str = "") -> None:
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Name: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[comm_utils.codecs]\n{entries}\n")
    (folder / f"{package}.py").write_text(code)


@pytest.fixture
def forgotten_codecs() -> Iterator[None]:
    """Look for installed codecs anew, within the test and after it."""
    registry._codecs.cache_clear()
    yield
    registry._codecs.cache_clear()


@pytest.mark.usefixtures("forgotten_codecs")
@pytest.mark.parametrize("name", ["int8", "powersgd", "seq_parallel"])
def test_an_installed_codec_with_a_name_of_this_library_is_ignored_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    install(tmp_path, "theirs", f"{name} = theirs:Int8")
    monkeypatch.syspath_prepend(tmp_path)
    with caplog.at_level(logging.WARNING, "comm"):
        assert [make_codec("int8").name.partition("(")[0] for _ in range(2)] == ["int8", "int8"]
    (record,) = caplog.records
    assert f"the codec {name!r} of theirs:Int8 is ignored, as that of this library" in record.getMessage()


@pytest.mark.usefixtures("forgotten_codecs")
def test_of_two_installed_codecs_of_one_name_a_warning_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path / "second", "theirs_b", "twin = theirs_b:Twin")
    install(tmp_path / "first", "theirs_a", "twin = theirs_a:Twin")
    for folder in ("second", "first"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    with caplog.at_level(logging.WARNING, "comm"):
        assert "twin" in registry.codec_names()
    (record,) = caplog.records
    assert "the codec 'twin' of theirs_b:Twin is ignored, as that of theirs_a:Twin has the name" in record.getMessage()


THEIRS = """
from comm_collectives.compression.cast_codecs import Float16

class Unnamed(Float16):
    name = None

class Fractions(Float16):
    def encoded_bytes(self, count):
        return count / 2

class Negative(Float16):
    def encoded_bytes(self, count):
        return -count

class Fails(Float16):
    def encoded_bytes(self, count):
        raise OverflowError("too many")
"""


@pytest.mark.usefixtures("forgotten_codecs")
@pytest.mark.parametrize(
    ("package", "code", "when"),
    [
        ("theirs_exit", "import sys\nsys.exit(2)", " while it was imported"),
        ("theirs_exit_called", "def Mine():\n    raise SystemExit(2)", ""),
    ],
)
def test_an_installed_codec_that_ends_the_program_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, code: str, when: str
) -> None:
    install(tmp_path, package, f"mine = {package}:Mine", code)
    monkeypatch.syspath_prepend(tmp_path)
    message = rf"the codec 'mine' of {package}:Mine cannot be used: {package} 1\.0 called sys.exit\(2\){when}$"
    with pytest.raises(ArgumentError, match=message):
        make_codec("mine")


@pytest.mark.usefixtures("forgotten_codecs")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("Unnamed", "it has no name; expected the class attribute name = 'mine'"),
        ("Fractions", r"encoded_bytes\(256\) returned 128.0; expected an int of 1 or more"),
        ("Negative", r"encoded_bytes\(256\) returned -256; expected an int"),
        ("Fails", r"encoded_bytes\(256\) raised OverflowError: too many"),
    ],
)
def test_an_installed_codec_without_the_interface_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, reason: str
) -> None:
    install(tmp_path, "theirs_interface", f"mine = theirs_interface:{kind}", THEIRS)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ArgumentError, match=f"the codec 'mine' of theirs_interface:{kind} cannot be used: {reason}"):
        make_codec("mine")
    sys.modules.pop("theirs_interface", None)
