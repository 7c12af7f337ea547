"""Wrong values of each role that an argument can have.

A value here is one line, and tried in every argument of its role by :mod:`wrong_calls.kinds`.
"""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import torch
import torch.distributed as c10d
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from wrong_calls.right import ones, tensors

import comm_orchestrator as dist
from comm_utils.errors import ArgumentTypeError

__all__ = [
    "FLAGS",
    "GROUPS",
    "GROUP_ROOTS",
    "LISTS",
    "LOST_GROUPS",
    "MODES",
    "NEEDING_A_ROOT",
    "NEVER_REDUCED",
    "OPS",
    "REFUSED_REDUCTIONS",
    "ROOTS",
    "TAGS",
    "TENSOR_KINDS",
    "TIMEOUTS",
    "TRANSFORMS",
    "TYPE",
    "VALUE",
]

VALUE, TYPE = dist.ArgumentError, ArgumentTypeError


@dataclass(frozen=True)
class TensorKind:
    """A value that cannot be communicated.

    Attributes:
        make, error, texts: as of a row; the argument's name comes before ``texts``.
        written_only: it can be read.
        read_only: it is refused for another reason where it is written.
    """

    make: Callable[[], Any]
    error: type[Exception]
    texts: tuple[str, ...]
    written_only: bool = False
    read_only: bool = False


def _quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer releases of torch announce their end
        return torch.quantize_per_tensor(ones(), 0.1, 0, torch.quint8)


class _Wrapper(torch.Tensor):
    """A tensor whose elements are in another one, as those of many libraries."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*[one.inner if isinstance(one, cls) else one for one in args], **(kwargs or {}))


class _HalfMade:
    """An object that has no attributes yet, which its ``repr`` shows."""

    def __repr__(self) -> str:
        return f"_HalfMade({self.name})"  # type: ignore[attr-defined]


def _quantized_by_channel() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zeros = torch.zeros(4, dtype=torch.int64)
        return torch.quantize_per_channel(ones(), torch.full((4,), 0.1), zeros, 0, torch.qint8)


def _fake() -> torch.Tensor:
    tensor = ones()
    return FakeTensorMode().from_tensor(tensor)


def _with_storage(size_bytes: int, offset: int = 0) -> torch.Tensor:
    """Four elements, behind ``offset`` others, in a storage that was resized as FSDP frees parameters."""
    tensor = ones(4 + offset)[offset:]
    tensor.untyped_storage().resize_(size_bytes)
    return tensor


def _asynchronous() -> torch.Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(ones())


TENSOR_KINDS = {
    "none": TensorKind(lambda: None, TYPE, ("got None", "expected a")),
    "string": TensorKind(lambda: "weights", TYPE, ("got 'weights' of type str", "expected a")),
    "number": TensorKind(lambda: 1.5, TYPE, ("got 1.5 of type float", "expected a")),
    "numpy": TensorKind(lambda: ones().numpy(), TYPE, ("of type ndarray", "expected a")),
    "meta": TensorKind(
        lambda: ones().to("meta"), VALUE, ("got a tensor on meta", "of this group serves cpu", "have no elements; make")
    ),
    "numpy-scalar": TensorKind(lambda: np.float32(1), TYPE, ("of type float32", "expected a")),
    "bool": TensorKind(lambda: True, TYPE, ("got True of type bool", "expected a")),
    "bytes": TensorKind(lambda: b"1234", TYPE, ("got b'1234' of type bytes", "expected a")),
    "generator": TensorKind(lambda: (one for one in (1.0,)), TYPE, ("of type generator", "expected a")),
    "dict": TensorKind(lambda: {"tensor": 1}, TYPE, ("got {'tensor': 1} of type dict", "expected a")),
    "storage": TensorKind(lambda: ones().untyped_storage(), TYPE, ("of type UntypedStorage", "expected a")),
    "class": TensorKind(lambda: torch.Tensor, TYPE, ("got <class 'torch.Tensor'>", "expected a")),
    "half-made": TensorKind(_HalfMade, TYPE, ("got <_HalfMade> of type _HalfMade", "expected a")),
    "uninitialized": TensorKind(
        torch.nn.UninitializedParameter, TYPE, ("got an UninitializedParameter", "materialize(shape)")
    ),
    "uninitialized-buffer": TensorKind(torch.nn.UninitializedBuffer, TYPE, ("got an UninitializedBuffer", "no shape")),
    "fake": TensorKind(_fake, TYPE, ("got a FakeTensor", "no elements", "real tensor")),
    "functional": TensorKind(
        lambda: torch._to_functional_tensor(ones()), TYPE, ("without memory of its own", "outside of these functions")
    ),
    "wrapper": TensorKind(lambda: _Wrapper(ones()), TYPE, ("got a _Wrapper", "tensors within it")),
    "asynchronous": TensorKind(_asynchronous, TYPE, ("got an AsyncCollectiveTensor", ".wait()")),
    "zeros-without-memory": TensorKind(
        lambda: torch._efficientzerotensor(4), TYPE, ("zeros without memory", ".clone()")
    ),
    "empty-storage": TensorKind(
        lambda: _with_storage(0), VALUE, ("got a storage of 0 bytes", "shape (4,) of float32 needs 16", "resize_(16)")
    ),
    "short-storage": TensorKind(lambda: _with_storage(12), VALUE, ("got a storage of 12 bytes", "needs 16")),
    "behind-its-storage": TensorKind(
        lambda: _with_storage(16, 4), VALUE, ("got a storage of 16 bytes", "at offset 4 needs 32")
    ),
    "huge": TensorKind(
        lambda: ones(1).expand(1 << 30, 1 << 30),
        VALUE,
        ("shape (1073741824, 1073741824)", "contiguous copy needs 4611686018427387904 bytes"),
        read_only=True,
    ),
    "sparse-csr": TensorKind(lambda: torch.ones(2, 2).to_sparse_csr(), TYPE, ("got a sparse tensor", "sparse_csr")),
    "sparse-hybrid": TensorKind(lambda: torch.ones(2, 2).to_sparse(1), TYPE, ("got a sparse tensor", "to_dense()")),
    "mkldnn": TensorKind(lambda: ones().to_mkldnn(), TYPE, ("got a tensor in the layout of MKL-DNN", "to_dense()")),
    "jagged": TensorKind(
        lambda: torch.nested.nested_tensor([ones()], layout=torch.jagged), TYPE, ("got a nested tensor", "one by one")
    ),
    "quantized-by-channel": TensorKind(_quantized_by_channel, TYPE, ("got a quantized tensor", "qint8")),
    "imaginary": TensorKind(
        lambda: ones(4, torch.complex64).conj().imag, VALUE, ("strides (2,)", "gaps or overlaps"), written_only=True
    ),
    "sparse": TensorKind(lambda: ones().to_sparse(), TYPE, ("got a sparse tensor", "sparse_coo", "to_dense()")),
    "nested": TensorKind(lambda: torch.nested.nested_tensor([ones()]), TYPE, ("got a nested tensor",)),
    "quantized": TensorKind(_quantized, TYPE, ("got a quantized tensor", "quint8", "int_repr()")),
    "expanded": TensorKind(
        lambda: ones(1).expand(4), VALUE, ("shape (4,)", "strides (0,)", "gaps or overlaps"), written_only=True
    ),
    "strided": TensorKind(
        lambda: ones(8)[::2], VALUE, ("shape (4,)", "strides (2,)", "contiguous or dense"), written_only=True
    ),
    "overlapping": TensorKind(
        lambda: ones(3).as_strided((2, 2), (1, 1)), VALUE, ("shape (2, 2)", "strides (1, 1)"), written_only=True
    ),
    "conjugated": TensorKind(
        lambda: ones(4, torch.complex64).conj(), VALUE, ("lazily conjugated", "resolve_conj()"), written_only=True
    ),
    "negated": TensorKind(
        lambda: torch._neg_view(ones()), VALUE, ("lazily negated", "resolve_neg()"), written_only=True
    ),
}

_OPS = "'sum', 'product', 'min', 'max', 'band', 'bor', 'bxor', 'avg'"
OPS: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "mean": ("mean", VALUE, ("op: got 'mean'", _OPS)),
    "typing-error": ("prodct", VALUE, ("op: got 'prodct'", "did you mean 'product'?")),
    "empty": ("", VALUE, ("op: got ''", _OPS)),
    "none": (None, TYPE, ("op: got None of type NoneType", _OPS)),
    "number": (2.5, TYPE, ("op: got 2.5 of type float", _OPS)),
    "list": (["sum"], TYPE, ("op: got ['sum'] of type list", _OPS)),
    "unused": (dist.ReduceOp.UNUSED, VALUE, ("op: got ReduceOp.UNUSED", _OPS)),
    "bytes": (b"sum", TYPE, ("op: got b'sum' of type bytes", _OPS)),
    "zero": (0, TYPE, ("op: got 0 of type int", _OPS)),
    "true": (True, TYPE, ("op: got True of type bool", _OPS)),
    "numpy": (np.int64(0), TYPE, ("op: got np.int64(0) of type int64", _OPS)),
    "tuple": (("sum",), TYPE, ("op: got ('sum',) of type tuple", _OPS)),
    "function": (torch.add, TYPE, ("op: got <built-in method add", _OPS)),
    "class": (dist.ReduceOp, TYPE, ("op: got <enum 'ReduceOp'>", _OPS)),
    "class-of-torch": (c10d.ReduceOp, TYPE, ("op: got <class", _OPS)),
    "dtype": (torch.float32, TYPE, ("op: got torch.float32 of type dtype", _OPS)),
    "tensor": (torch.tensor(0), TYPE, ("op: got tensor(0) of type Tensor", _OPS)),
    "half-made": (_HalfMade(), TYPE, ("op: got <_HalfMade> of type _HalfMade", _OPS)),
    "spaces": (" sum ", VALUE, ("op: got ' sum '", "did you mean 'sum'?")),
    "null": ("sum\0", VALUE, ("op: got 'sum\\x00'", "did you mean 'sum'?")),
    "dotted": ("ReduceOp.SUM", VALUE, ("op: got 'ReduceOp.SUM'", _OPS)),
    "long": ("sum" * 10**5, VALUE, (f"op: got '{'sum' * 18}", "...; expected", _OPS)),
    "nccl": (c10d._make_nccl_premul_sum(2.0), VALUE, ("op: got", _OPS)),
    "premul-sum": (c10d.ReduceOp.PREMUL_SUM, VALUE, ("op: got ReduceOp.PREMUL_SUM", _OPS, "multiply the tensor")),
}
#: op, dtype of every tensor -> what the message holds.
REFUSED_REDUCTIONS = {
    ("band", torch.float32): ("op 'band' is not defined for torch.float32", "integer or bool"),
    ("bor", torch.float16): ("op 'bor' is not defined for torch.float16", "integer or bool"),
    ("bxor", torch.bfloat16): ("op 'bxor' is not defined for torch.bfloat16", "integer or bool"),
    ("avg", torch.int64): ("op 'avg' is not defined for torch.int64", "'sum'", "float"),
    ("avg", torch.uint8): ("op 'avg' is not defined for torch.uint8", "'sum'", "float"),
    ("avg", torch.bool): ("op 'avg' is not defined for torch.bool", "'sum'", "float"),
    ("min", torch.complex64): ("op 'min' is not defined for torch.complex64", "'sum' and 'avg'"),
    ("max", torch.complex128): ("op 'max' is not defined for torch.complex128", "'sum' and 'avg'"),
    ("product", torch.complex64): ("op 'product' is not defined for torch.complex64", "'sum' and 'avg'"),
    ("band", torch.complex64): ("op 'band' is not defined for torch.complex64", "'sum' and 'avg'"),
    ("sum", torch.float8_e4m3fn): ("torch.float8_e4m3fn tensors can be moved but not reduced", "bfloat16"),
    ("avg", torch.float8_e5m2): ("torch.float8_e5m2 tensors can be moved but not reduced", "bfloat16"),
    ("max", torch.float8_e4m3fnuz): ("torch.float8_e4m3fnuz tensors can be moved but not reduced", "bfloat16"),
}
#: By name: not every torch has all of them. Their tensors are made of bytes.
NEVER_REDUCED = tuple(
    name
    for name in ("bits8", "bits16", "uint1", "uint4", "uint7", "int1", "int4", "float8_e8m0fnu", "float4_e2m1fn_x2")
    if hasattr(torch, name)
)

ROOTS: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "outside": (2, VALUE, ("got rank 2", "not in the group", "[0, 1]")),
    "negative": (-1, VALUE, ("got rank -1", "not in the group", "[0, 1]")),
    "string": ("0", TYPE, ("got '0' of type str", "expected an integer")),
    "float": (1.0, TYPE, ("got 1.0 of type float", "expected an integer")),
    "bool": (True, TYPE, ("got True of type bool", "expected an integer")),
    "huge": (2**70, VALUE, (f"got rank {2**70}", "not in the group")),
    "endless": (10**5000, VALUE, ("got rank <int>", "not in the group")),
    "nan": (float("nan"), TYPE, ("got nan of type float", "expected an integer")),
    "bytes": (b"0", TYPE, ("got b'0' of type bytes", "expected an integer")),
    "list": ([0], TYPE, ("got a list of 1", "expected an integer")),
    "dict": ({}, TYPE, ("got {} of type dict", "expected an integer")),
    "complex": (0j, TYPE, ("got 0j of type complex", "expected an integer")),
    "numpy-float": (np.float64(0), TYPE, ("got", "of type float64", "expected an integer")),
    "numpy-bool": (np.False_, TYPE, ("got", "of type bool", "expected an integer")),
    "numpy-array": (np.array([0, 1]), TYPE, ("got", "of type ndarray", "expected an integer")),
    "tensor-float": (torch.tensor(0.0), TYPE, ("got tensor(0.) of type Tensor", "expected an integer")),
    "tensor-bool": (torch.tensor(False), TYPE, ("got tensor(False) of type Tensor", "expected an integer")),
    "tensor-of-two": (torch.tensor([0, 1]), TYPE, ("got tensor([0, 1]) of type Tensor", "expected an integer")),
    "tensor-meta": (torch.tensor(0, device="meta"), TYPE, ("got tensor(...", "expected an integer")),
    "half-made": (_HalfMade(), TYPE, ("got <_HalfMade> of type _HalfMade", "expected an integer")),
}
GROUP_ROOTS = {
    "outside": (2, VALUE, "got 2", "expected 0 to 1 in a group of 2"),
    "negative": (-1, VALUE, "got -1", "expected 0 to 1 in a group of 2"),
    "huge": (2**70, VALUE, f"got {2**70}", "expected 0 to 1 in a group of 2"),
    "string": ("0", TYPE, "got '0' of type str", "expected an integer"),
    "float": (0.0, TYPE, "got 0.0 of type float", "expected an integer"),
    "bool": (False, TYPE, "got False", "expected a rank within the group"),
    "list": ([0], TYPE, "got a list of 1", "expected an integer"),
    "tensor-bool": (torch.tensor(True), TYPE, "got tensor(True) of type Tensor", "expected an integer"),
    "tensor-meta": (torch.tensor(0, device="meta"), TYPE, "got tensor(...", "expected an integer"),
}
#: Calls whose root has no default.
NEEDING_A_ROOT = ("broadcast", "reduce", "send", "isend", "send_object_list")

TAGS: dict[str, tuple[Any, type[Exception]]] = {
    "negative": (-1, VALUE),
    "string": ("first", TYPE),
    "float": (1.5, TYPE),
    "none": (None, TYPE),
    "bool": (True, TYPE),
    "huge": (2**70, VALUE),
    "beyond-int": (2**31, VALUE),
    "list": ([0], TYPE),
    "bytes": (b"1", TYPE),
    "nan": (float("nan"), TYPE),
    "numpy": (np.uint64(2**63), TYPE),
    "tensor": (torch.tensor(0), TYPE),
    "half-made": (_HalfMade(), TYPE),
}


class _NotHashable:
    """A group can be looked up; whatever this raises then is no business of the caller's."""

    def __hash__(self) -> int:
        raise LookupError("no hash")

    def __repr__(self) -> str:
        return "_NotHashable()"


GROUPS: dict[str, tuple[Any, str]] = {
    "string": ("world", "got 'world' of type str"),
    "ranks": ([0, 1], "got a list of 2"),
    "number": (0, "got 0 of type int"),
    "float": (0.0, "got 0.0 of type float"),
    "tuple": ((0, 1), "got a tuple of 2"),
    "dict": ({}, "got {} of type dict"),
    "frozenset": (frozenset((0, 1)), "got frozenset({0, 1}) of type frozenset"),
    "class": (dist.ProcessGroup, "got <class 'torch"),
    "torch-group": (c10d.group, "got <class 'torch.distributed"),
    "store": (dist.HashStore(), "got <torch._C._distributed_c10d.HashStore"),
    "tensor": (torch.ones(2), "got tensor([1., 1.]) of type Tensor"),
    "array": (np.ones(2), "got array([1., 1.]) of type ndarray"),
    "not-hashable": (_NotHashable(), "got _NotHashable() of type _NotHashable"),
}

#: Groups that are groups and cannot be used; all ranks make them together.
LOST_GROUPS: dict[str, Callable[[], Any]] = {
    "destroyed": lambda: _destroyed_group(),
    "nobodys": lambda: c10d.ProcessGroup(dist.get_rank(), dist.get_world_size()),
}


@functools.cache
def _destroyed_group() -> Any:
    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    return group


FLAGS: dict[str, tuple[Any, str]] = {
    "string": ("no", "got 'no' of type str"),
    "list": ([], "got a list of 0"),
    "float": (0.5, "got 0.5 of type float"),
    "tensor": (torch.tensor(True), "got tensor(True) of type Tensor"),
    "tensor-of-two": (torch.ones(2), "got tensor([1., 1.]) of type Tensor"),
    "tensor-meta": (torch.tensor(True, device="meta"), "got tensor(..."),
    "array": (np.ones(2), "got array([1., 1.]) of type ndarray"),
    "half-made": (_HalfMade(), "got <_HalfMade> of type _HalfMade"),
}

_SECONDS = "expected seconds or a timedelta"
TIMEOUTS: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "nan": (float("nan"), VALUE, ("got nan", f"{_SECONDS} of more than 0, and finite")),
    "infinite": (float("inf"), VALUE, ("got inf", f"{_SECONDS} of more than 0, and finite")),
    "zero": (0, VALUE, ("got 0;", f"{_SECONDS} of more than 0")),
    "negative": (-1.5, VALUE, ("got -1.5", f"{_SECONDS} of more than 0")),
    "negative-timedelta": (timedelta(seconds=-1), VALUE, ("got datetime.timedelta", f"{_SECONDS} of more than 0")),
    "tiny": (1e-9, VALUE, ("got 1e-09", "expected at least a microsecond")),
    "longest": (timedelta.max, VALUE, ("got datetime.timedelta", "expected at most 36525 days")),
    "huge": (1e300, VALUE, ("got 1e+300", "expected at most 36525 days")),
    "endless": (10**5000, VALUE, ("got <int>", "expected at most 36525 days")),
    "bool": (True, TYPE, ("got True", _SECONDS)),
    "string": ("1", TYPE, ("got '1'", _SECONDS)),
    "list": ([1], TYPE, ("got [1]", _SECONDS)),
    "complex": (1j, TYPE, ("got 1j", _SECONDS)),
    "decimal": (Decimal(1), TYPE, ("got Decimal('1')", _SECONDS)),
    "tensor": (torch.tensor(1.0), TYPE, ("got tensor(1.)", _SECONDS)),
    "numpy": (np.timedelta64(1, "s"), TYPE, ("got np.timedelta64(1,'s')", _SECONDS)),
}

#: What is no list where a list belongs.
LISTS: dict[str, Callable[[], Any]] = {
    "generator": lambda: (one for one in tensors(2)),
    "dict": lambda: dict(enumerate(tensors(2))),
    "set": lambda: set(tensors(2)),
    "range": lambda: range(2),
    "map": lambda: map(torch.neg, tensors(2)),
    "deque": lambda: deque(tensors(2)),
    "array": lambda: np.ones((2, 4)),
    "bytes": lambda: b"12",
    "parameters": lambda: torch.nn.ParameterList(tensors(2)),
}


def _in_fake_mode(run: Callable[[Any], None]) -> None:
    with FakeTensorMode():
        run(None)


def _in_fake_mode_of_real_tensors(run: Callable[[Any], None]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        run(None)


def _under(transform: Callable[..., Any], *shape: int) -> Callable[[Callable[[Any], None]], None]:
    def around(run: Callable[[Any], None]) -> None:
        def traced(one: torch.Tensor) -> torch.Tensor:
            run(one)
            return one.sum()

        transform(traced)(torch.ones(shape))

    return around


def _under_jvp(run: Callable[[Any], None]) -> None:
    def traced(one: torch.Tensor) -> torch.Tensor:
        run(one)
        return one * 1

    torch.func.jvp(traced, (ones(),), (ones(),))


def _in_functional_mode(run: Callable[[Any], None]) -> None:
    with FunctionalTensorMode():
        run(None)


def _in_a_trace(run: Callable[[Any], None]) -> None:
    def traced(one: torch.Tensor) -> torch.Tensor:
        run(one)
        return one * 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about what a trace does not record
        torch.jit.trace(traced, (ones(),), check_trace=False)


def _beside(transform: Callable[..., Any]) -> Callable[[Callable[[Any], None]], None]:
    """Within a transform whose tensors the call does not touch."""
    return lambda run: _under(transform, 3)(lambda one: run(None))


def _in_make_fx(run: Callable[[Any], None]) -> None:
    make_fx(lambda one: run(None) or one * 1)(ones())


#: Modes in which no call works, and what the message says.
MODES: dict[str, tuple[Callable[[Callable[[Any], None]], None], str]] = {
    "fake": (_in_fake_mode, "got called under FakeTensorMode"),
    "fake-of-real-tensors": (_in_fake_mode_of_real_tensors, "got called under FakeTensorMode"),
    "functional": (_in_functional_mode, "got called under FunctionalTensorMode"),
    "trace": (_in_a_trace, "got called under torch.jit.trace"),
    "make-fx": (_in_make_fx, "got called under make_fx"),
    "vmap": (_beside(torch.vmap), "got called under a transform"),
    "grad": (_beside(torch.func.grad), "got called under a transform"),
    "functionalize": (_beside(torch.func.functionalize), "got called under a transform"),
}
#: Transforms under which a tensor has no memory.
TRANSFORMS = {
    "vmap": _under(torch.vmap, 3, 4),
    "grad": _under(torch.func.grad, 4),
    "jvp": _under_jvp,
    "functionalize": _under(torch.func.functionalize, 4),
}
