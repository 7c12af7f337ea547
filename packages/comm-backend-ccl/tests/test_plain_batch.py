"""Many plain tensors as one, in native code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comm_backend_ccl import kernels, native_module
from comm_utils.kernels import PlainBatch
from comm_utils.torch_support.passed_tensors import packed_sizes

pytestmark = pytest.mark.skipif(
    not native_module.has_kernels() or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="built without native code, or this torch has no DLPack exchange for it",
)


def batch_of(*tensors: torch.Tensor) -> PlainBatch:
    found = kernels.plain_batch(list(tensors))
    assert found is not None
    return found


def test_tensors_are_packed_by_dtype_and_unpacked() -> None:
    floats, halves = [torch.arange(3.0), torch.ones(2, 2)], [torch.ones(5, dtype=torch.bfloat16)]
    batch = batch_of(floats[0], *halves, floats[1])
    assert list(batch.sizes) == [torch.float32, torch.bfloat16]
    assert [id(one) for one in batch.tensors(torch.float32)] == [id(one) for one in floats]
    assert batch.tensors(torch.bfloat16)[0] is halves[0]
    assert batch.tensors(torch.float64) == []
    assert batch.sizes[torch.float32] == (28, packed_sizes(floats))
    assert batch.sizes[torch.bfloat16] == (10, packed_sizes(halves))
    assert batch.sizes[torch.float32].number == 2
    buckets = [torch.zeros(7), torch.zeros(5, dtype=torch.bfloat16)]
    assert batch.pack(buckets)
    assert [one.tolist() for one in buckets] == [[0, 1, 2, 1, 1, 1, 1], [1] * 5]
    for one in buckets:
        one *= 2
    assert batch.unpack(buckets[:1])
    assert floats[0].tolist() == [0, 2, 4]
    assert torch.equal(floats[1], torch.full((2, 2), 2.0))
    assert torch.equal(halves[0], torch.ones(5, dtype=torch.bfloat16))
    assert batch.unpack(buckets)
    assert torch.equal(halves[0], torch.full((5,), 2, dtype=torch.bfloat16))


def _freed() -> torch.Tensor:
    made = torch.ones(2)
    made.untyped_storage().resize_(0)
    return made


@pytest.mark.parametrize(
    "odd",
    [
        torch.ones(0),
        torch.ones(4)[::2],
        torch.ones(2, dtype=torch.complex64),
        torch.view_as_real(torch.ones(2, dtype=torch.complex64).conj().resolve_conj()).transpose(0, 1),
        torch.imag(torch.ones(2, dtype=torch.complex64).conj()),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, device="meta"),
        _freed(),
        "no tensor",
    ],
    ids=range(9),
)
def test_what_is_not_plain_is_in_no_batch(odd: Any) -> None:
    assert kernels.plain_batch([torch.ones(2), odd]) is None


def test_tensors_that_share_memory_are_in_no_batch() -> None:
    whole = torch.ones(8)
    assert kernels.plain_batch([whole[:4], torch.ones(3), whole[3:]]) is None
    assert kernels.plain_batch([whole, whole]) is None
    assert batch_of(whole[:4], whole[4:]).sizes[torch.float32].nbytes == 32


def test_nothing_is_moved_that_does_not_fit() -> None:
    packed = torch.full((4,), 7.0)
    for sizes in ((2, 3), (2, 1), (3, 3, 3)):
        assert not batch_of(*(torch.ones(size) for size in sizes)).pack([packed])
    two = batch_of(torch.ones(2), torch.ones(2))
    assert not two.pack([packed, torch.zeros(4, dtype=torch.float64)])
    assert packed.tolist() == [7] * 4
    assert not two.pack([torch.zeros(8)[::2]])


def test_a_tensor_that_has_other_memory_by_now_is_not_overwritten() -> None:
    tensors = [torch.ones(2), torch.ones(2)]
    batch, packed = batch_of(*tensors), torch.zeros(4)
    tensors[1].set_(torch.ones(2))  # type: ignore[call-overload]
    assert not batch.unpack([packed])
    assert tensors[0].tolist() == [1, 1]
    tensors[1].untyped_storage().resize_(0)
    assert not batch.unpack([packed])
    assert tensors[0].tolist() == [1, 1]
    tensors[1] = torch.ones(2)
    whole, cut = torch.ones(4), torch.ones(4)
    batch = batch_of(whole, cut)
    cut.resize_(3)
    assert not batch.unpack([torch.zeros(8)])
    cut.resize_(4)
    batch.tensors(torch.float32).clear()  # a list of its own
    assert batch.unpack([torch.zeros(8)])
    assert whole.tolist() == cut.tolist() == [0] * 4


def test_the_list_is_asked_again() -> None:
    tensors = [torch.ones(2), torch.ones(2)]
    batch = kernels.plain_batch(tensors)
    assert batch is not None
    removed = tensors.pop()
    assert not batch.unpack([torch.zeros(4)])
    tensors.append(None)  # type: ignore[arg-type]
    assert not batch.unpack([torch.zeros(4)])
    tensors[1] = removed
    assert batch.unpack([torch.zeros(4)])
    assert removed.tolist() == [0, 0]


def test_a_tensor_that_has_changed_is_left_alone() -> None:
    for change in (
        lambda tensor: tensor.t_(),
        lambda tensor: tensor.as_strided_((3, 2), (2, 3)),
        lambda tensor: setattr(tensor, "data", tensor.data.view(torch.int32)),
    ):
        matrix, other = torch.zeros(8)[:6].view(2, 3), torch.zeros(1)
        batch = batch_of(matrix, other)
        change(matrix)
        assert not batch.unpack([torch.ones(7)])
        assert not matrix.any()
        assert not other.any()
        reshaped = torch.zeros(2, 3)
        batch = batch_of(reshaped, other)
        reshaped.resize_(6)
        assert batch.unpack([torch.ones(7)])
        assert reshaped.tolist() == [1] * 6


def test_new_versions_are_counted() -> None:
    tensors = [torch.ones(2), torch.ones(3), torch.ones(2, dtype=torch.float64)]
    before = [one._version for one in tensors]
    batch = batch_of(*tensors)
    buckets = [torch.zeros(5), torch.zeros(2, dtype=torch.float64)]
    assert batch.pack(buckets)
    assert [one._version for one in tensors] == before
    assert batch.unpack(buckets[:1])
    assert [one._version - at for one, at in zip(tensors, before, strict=True)] == [1, 1, 0]
    assert batch.unpack(buckets)
    assert [one._version - at for one, at in zip(tensors, before, strict=True)] == [2, 2, 1]


def test_what_autograd_knows_of_is_not_usual() -> None:
    plain = torch.ones(2)
    with torch.inference_mode():
        made_there = torch.ones(2)
        assert batch_of(made_there, torch.ones(2)).unpack([torch.zeros(4)])
    assert batch_of(plain, torch.ones(2)).is_usual
    assert not batch_of(plain, torch.ones(2, requires_grad=True)).is_usual
    assert not batch_of(plain, torch.ones(2, requires_grad=True) * 2).is_usual
    assert not batch_of(plain, made_there).is_usual
