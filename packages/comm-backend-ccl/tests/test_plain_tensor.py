"""The predicate of the fast path takes no tensor whose memory is not what it claims."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from comm_backend_ccl import native_module, shared_memory, tables
from comm_utils import ReduceOp, kernels
from comm_utils.torch_support.plain_tensors import TRANSFORMS, PlainTensors, is_intercepted, plain_tensors

pytestmark = pytest.mark.skipif(
    not native_module.has_kernels() or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="needs native code and a torch with DLPack's exchange API",
)


def resized(size: int, count: int = 8, dtype: torch.dtype = torch.float32, skipped: int = 0) -> torch.Tensor:
    whole = torch.ones(count + skipped, dtype=dtype)
    part = whole[skipped:]
    whole.untyped_storage().resize_(size)
    return part


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


def seen_by(transform: Callable[..., Callable[..., object]], shape: tuple[int, ...]) -> list[int | None]:
    found: list[int | None] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(native_module.plain_tensor(tensor))
        return tensor.sum()

    transform(note)(torch.ones(shape))
    return found


HOSTILE: dict[str, Callable[[], object]] = {
    "a storage of 4 bytes": lambda: resized(4),
    "a storage one element short": lambda: resized(28),
    "a storage one byte short": lambda: resized(31),
    "a freed storage": lambda: resized(0),
    "a freed storage of bytes": lambda: resized(0, 8, torch.uint8),
    "a part of a storage that ends before": lambda: resized(32, 8, skipped=4),
    "a zero tensor": lambda: torch._efficientzerotensor((3,)),
    "fake": fake,
    "uint4": lambda: torch.empty(4, dtype=torch.uint8).view(torch.uint4),
    "int1": lambda: torch.empty(4, dtype=torch.uint8).view(torch.int1),
    "bits8": lambda: torch.empty(3, dtype=torch.uint8).view(torch.bits8),
    "quantized": quantized,
    "float8": lambda: torch.ones(3).to(torch.float8_e5m2),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch._neg_view(torch.ones(3)),
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "nested": nested,
    "meta": lambda: torch.ones(3, device="meta"),
    "strided": lambda: torch.ones(6)[::2],
    "expanded": lambda: torch.ones(1).expand(4),
    "without elements": lambda: torch.ones(0),
    "a subclass": lambda: torch.nn.Parameter(torch.ones(2)),
    "no tensor": lambda: None,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tensors_are_not_plain(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    tensor = HOSTILE[name]()
    capfd.readouterr()
    assert native_module.plain_tensor(tensor) is None
    assert capfd.readouterr().err == ""  # as libtorch's C shim logs what it is asked in vain
    memory = shared_memory.create(1)
    group = shared_memory.join(os.getpid(), memory, 0, [os.getpid()], False)
    shared_memory.close_descriptor(memory[0])
    path = shared_memory.fast_path(group, tables.Operation.ALL_REDUCE, ReduceOp.SUM, -1, lambda *_: None)
    assert path is not None
    assert path(torch.ones(3)) is True
    assert path(tensor) is False
    assert path(torch.ones(3)) is True


@pytest.mark.parametrize("name", HOSTILE)
def test_python_accessors_come_to_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where libtorch's C shim is not found, or a probe shows that it reads something else."""
    native = native_module.NATIVE
    try:
        key, probe = TRANSFORMS.value, torch.ones(3)
        right = (probe, probe._cdata, 12, 0, 6, False, False)
        bind = partial(native.bind_torch, torch.Tensor, torch.uint8, torch.int8)
        assert bind([right], is_intercepted, key) == native_module.reads_storage_natively
        for at, wrong in ((6, True), (5, True), (4, 7), (3, 1), (2, 16), (1, 1)):
            assert not bind([(*right[:at], wrong, *right[at + 1 :])], is_intercepted, key)
        assert native_module.plain_tensor(HOSTILE[name]()) is None
        for dtype in (torch.float32, torch.uint8, torch.int8):
            assert native_module.plain_tensor(torch.ones(3, dtype=dtype)) == tables.DTYPES[dtype]
        leaf, many = torch.ones(3, requires_grad=True), [torch.ones(3), torch.ones(2, 2)]
        accepting = kernels.plain_tensors("cpu", [torch.float32], False, False, lambda _: False)
        assert accepting is not None
        assert accepting(many)
        assert not accepting([leaf])
        batch = kernels.plain_batch(many)
        assert batch is not None
        assert batch.is_usual
        assert batch.unpack([torch.zeros(7)])
        assert many[1].tolist() == [[0, 0], [0, 0]]
        assert [one._version for one in many] == [1, 1]
        many[0].resize_(2)
        assert not batch.unpack([torch.ones(7)])
        assert kernels.plain_batch([torch.ones(3), leaf]).is_usual is False  # type: ignore[union-attr]
    finally:
        assert native_module._bind_torch() == native_module.reads_storage_natively


def test_wrapped_tensors_are_not_plain() -> None:
    for transform, shape in ((torch.vmap, (2, 3)), (torch.func.grad, (3,)), (torch.func.functionalize, (3,))):
        assert seen_by(transform, shape) == [None]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_the_predicate_of_every_backend(name: str, inference: bool, grad: bool) -> None:
    """Native code and the predicate in Python that it asks otherwise say the same."""
    accepted = [dtype for dtype in tables.DTYPES if dtype not in (torch.uint16, torch.uint32, torch.uint64)]
    asked: list[object] = []

    def otherwise(tensors: Sequence[object]) -> bool:
        asked.append(tensors)
        return False

    native = kernels.plain_tensors("cpu", accepted, inference, grad, otherwise)
    python = in_python(accepted, inference, grad)
    assert native is not None
    tensor, plain, leaf = HOSTILE[name](), torch.ones(3), torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        made_there = torch.ones(3)
    for tensors, wanted in (
        ([plain], True),
        ((plain, plain), True),
        ([leaf], grad),
        ([plain, leaf], grad),
        ((made_there,), inference),
        ([tensor], False),
        ((plain, tensor), False),
        ([plain, torch.ones(3, dtype=torch.float64)], False),
    ):
        asked.clear()
        assert native(tensors) is python(tensors) is wanted
        assert asked == ([] if wanted else [tensors])
    assert native([]) is python([]) is True
    few = kernels.plain_tensors("cpu", [torch.int8], inference, grad, otherwise)
    assert few is not None
    assert few([torch.ones(3, dtype=torch.int8)])
    assert not few([plain])
    assert not few(plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_the_predicate_of_devices(inference: bool, grad: bool) -> None:
    asked: list[object] = []

    def otherwise(tensors: Sequence[object]) -> bool:
        asked.append(tensors)
        return False

    native = kernels.plain_tensors("cuda", [torch.float32, torch.float16, torch.uint8], inference, grad, otherwise)
    python = in_python([torch.float32, torch.float16, torch.uint8], inference, grad, "cuda")
    assert native is not None
    plain, whole = torch.ones(3, device="cuda"), torch.ones(20, device="cuda")
    short = torch.ones(8, device="cuda")
    short.untyped_storage().resize_(28)
    with torch.inference_mode():
        made_there = torch.ones(3, device="cuda")
    for tensors, wanted in (
        ([plain], True),
        ((plain, whole[3:], whole.view(4, 5)), True),
        ([torch.ones(3, device="cuda", requires_grad=True)], grad),
        ((made_there,), inference),
        ([torch.ones(3)], False),
        ([plain, torch.ones(3)], False),
        ([plain, plain.half()], False),
        ([plain.double()], False),
        ([whole[::2]], False),
        ([whole[:0]], False),
        ([short], False),
        ([torch._neg_view(plain)], False),
        ([torch.nn.Parameter(torch.ones(2, device="cuda"))], False),
        ([None], False),
    ):
        asked.clear()
        assert native(tensors) is python(tensors) is wanted, tensors
        assert asked == ([] if wanted else [tensors])
    with torch.device("cuda"):  # a mode through which questions go
        assert native([plain]) is python([plain]) is True
    assert kernels.plain_tensors("xpu", [torch.float32], inference, grad, otherwise) is None


def in_python(dtypes: list[torch.dtype], inference: bool, grad: bool, device: str = "cpu") -> PlainTensors:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "plain_tensors", lambda *_: None)
        return plain_tensors(device, dtypes, inference=inference, grad=grad)


def test_predicates_are_freed() -> None:
    class Otherwise:
        def __call__(self, tensors: Sequence[object]) -> bool:
            raise LookupError(self)

    otherwise = Otherwise()
    native: Any = kernels.plain_tensors("cpu", [torch.float32], False, False, otherwise)
    with pytest.raises(LookupError):
        native([None])
    otherwise.of_its_own = native  # type: ignore[attr-defined]
    gone = weakref.ref(otherwise)
    del otherwise, native
    gc.collect()
    assert gone() is None


def test_plain_tensors_are() -> None:
    native = native_module.plain_tensor
    for dtype, code in tables.DTYPES.items():
        wanted = None if dtype in (torch.uint16, torch.uint32, torch.uint64) else code
        whole = torch.zeros(20, dtype=dtype)
        for tensor in (whole, whole[3:], whole.view(4, 5), whole[0], whole[:1].view(1, 1)):
            assert native(tensor) == wanted
    grown = torch.ones(4)
    grown.untyped_storage().resize_(1000)
    assert native(grown) == tables.DTYPES[torch.float32]
    assert native(torch._lazy_clone(grown)) == tables.DTYPES[torch.float32]


def test_libtorch_is_asked_directly_on_the_version_that_is_tested() -> None:
    assert native_module.reads_storage_natively


def test_defaults_of_the_program_do_not_matter() -> None:
    program = (
        "import torch; torch.set_default_dtype(torch.float64); from comm_backend_ccl import native_module as native"
    )
    check = "torch.set_default_device('meta'); print(native.reads_storage_natively, native._bind_torch())"
    outcome = subprocess.run([sys.executable, "-c", f"{program}; {check}"], check=True, capture_output=True, text=True)
    assert outcome.stdout.split() == [str(native_module.reads_storage_natively)] * 2
