"""Validation of one rank's arguments, before anything is sent.

Every message names the call, the argument, what was given, what was expected, and the remedy where there is one.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.distributed import GroupMember, ProcessGroup
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from comm_collectives.memory import is_dense, overlapping
from comm_utils.active import active_backend, slot
from comm_utils.backend import Backend
from comm_utils.errors import ArgumentError, ArgumentTypeError, BrokenGroupError, NotInitializedError
from comm_utils.given import LONGEST, shown
from comm_utils.log import logger
from comm_utils.torch_support.plain_tensors import TRANSFORMS, is_intercepted, missing_storage

__all__ = [
    "QUANTIZED",
    "active",
    "as_flag",
    "as_timedelta",
    "check_dtype",
    "check_list",
    "check_numel",
    "check_tensor",
    "describe",
    "enter",
    "group_rank_of",
    "integer",
    "is_member",
    "splits",
]

_warned: set[str] = set()
_MKLDNN: Any = torch._mkldnn  # type: ignore[attr-defined]
QUANTIZED = frozenset((torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4))
# NumPy's bool, by its names in both major releases.
_BOOLS = ("bool", "bool_")
_TRANSFORMED = (
    "a tensor without memory of its own, as under torch.vmap or torch.func.grad; expected a tensor outside of these "
    "functions"
)
# A copy of more than that cannot be made.
_MEMORY_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def is_member(call: str, group: object, name: str = "group") -> bool:
    """Return whether this rank is in ``group``; False for what ``new_group`` gives to ranks outside the group.

    Raises:
        ArgumentTypeError: it is no group at all.
    """
    if group is None or isinstance(group, ProcessGroup):
        return True
    if type(group) is type(GroupMember.NON_GROUP_MEMBER) and group == GroupMember.NON_GROUP_MEMBER:
        return False
    hint = ""
    if type(group).__name__ == "DeviceMesh":
        hint = "; pass mesh.get_group(), or mesh.get_group(name) of one of several dimensions"
    raise ArgumentTypeError(
        f"{call}: {name}: got {describe(group)}; expected a process group from new_group(), or None for the world "
        f"group{hint}"
    )


def active(call: str) -> Backend:
    """Return the active backend, for a call that is about no group or about any.

    Raises:
        NotInitializedError: nothing is initialised.
    """
    try:
        return active_backend()
    except NotInitializedError as error:
        raise NotInitializedError(f"{call}: {error}") from None


def enter(call: str, group: ProcessGroup | None, timeout: float | timedelta | None = None) -> Backend | None:
    """Return the backend for a call on ``group``; None where this rank is not a member and the call is a no-op.

    Failures and records of what travels name ``call``.

    Args:
        timeout: of this call, in place of the group's.

    Raises:
        NotInitializedError, BrokenGroupError, ArgumentTypeError, ArgumentError
    """
    backend = slot.backend
    if is_member(call, group):
        if is_intercepted():
            _refuse_interception(call)
        try:
            backend.check_group(group)
        except (BrokenGroupError, NotInitializedError) as error:
            raise type(error)(f"{call}: {error}") from None
        return backend.during(call) if timeout is None else backend.during(call, as_timedelta(call, timeout))
    if call not in _warned:
        _warned.add(call)
        logger.warning("%s: this rank is not a member of the group; the call does nothing", call)
    return None


def _refuse_interception(call: str) -> None:
    """Raise where torch only records what is done, or where new tensors have no memory; other modes only look on."""
    if torch._C._is_tracing():
        raise ArgumentError(
            f"{call}: got called under torch.jit.trace, which cannot record it; trace what comes before and after, or "
            "use torch.compile"
        )
    if torch._C._dispatch_tls_is_dispatch_key_included(TRANSFORMS):
        raise ArgumentError(
            f"{call}: got called under a transform such as torch.vmap or torch.func.grad, in which tensors have no "
            "memory of their own; call it outside of these functions"
        )
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, (FakeTensorMode, FunctionalTensorMode)):
            if getattr(torch.compiler, "_is_exporting_flag", False):  # since torch 2.7
                raise ArgumentError(
                    f"{call}: got called under torch.export, which cannot record it in its non-strict form; pass "
                    "strict=True, which puts synchronous calls on the default group into the program, or export what "
                    "comes before and after"
                )
            raise ArgumentError(
                f"{call}: got called under {type(mode).__name__}, in which new tensors have no memory of their own; "
                "leave the mode before the call"
            )
        if type(mode).__name__ == "ProxyTorchDispatchMode":  # importing it takes a compiler's modules
            raise ArgumentError(
                f"{call}: got called under make_fx, whose graph would lack it; trace what comes before and after, or "
                "use torch.compile"
            )


def as_flag(call: str, name: str, value: Any) -> bool:
    """``value`` as a bool, given as one, as an integer or as None."""
    kind = type(value)
    if value is None or isinstance(value, int) or (kind.__module__ == "numpy" and kind.__name__ in _BOOLS):
        return bool(value)
    raise ArgumentTypeError(f"{call}: {name}: got {describe(value)}; expected True or False")


def check_tensor(
    call: str, name: str, value: Any, backend: Backend, group: ProcessGroup | None, *, written: bool = False
) -> None:
    """``value`` is a tensor that ``backend`` can read for ``group``, and write in place if ``written``."""
    if type(value) is not torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise ArgumentTypeError(f"{call}: {name}: got {describe(value)}; expected a tensor")
        if hasattr(value, "to_local"):
            raise ArgumentTypeError(
                f"{call}: {name}: got a {type(value).__name__}; pass {name}.to_local(), this rank's part"
            )
        if is_lazy(value):
            raise ArgumentTypeError(
                f"{call}: {name}: got an {type(value).__name__}, which has no shape yet; call the module once, or "
                f"{name}.materialize(shape), before"
            )
    if value.is_nested:
        raise ArgumentTypeError(f"{call}: {name}: got a nested tensor; pass the tensors in it one by one")
    if value.layout is _MKLDNN:
        raise ArgumentTypeError(f"{call}: {name}: got a tensor in the layout of MKL-DNN; pass {name}.to_dense()")
    if value.layout is not torch.strided:
        raise ArgumentTypeError(
            f"{call}: {name}: got a sparse tensor ({value.layout}); sparse tensors are not supported, pass "
            f"{name}.to_dense()"
        )
    if value.is_quantized or value.dtype in QUANTIZED:
        raise ArgumentTypeError(
            f"{call}: {name}: got a quantized tensor ({value.dtype}); pass its int_repr(), scales apart"
        )
    device = value.device.type
    served = backend.device_types(group)
    if device not in served:
        raise ArgumentError(
            f"{call}: {name}: got a tensor on {value.device}; backend {backend.get_backend(group)!r} of this group "
            f"serves {' and '.join(served)}; {_device_remedy(device)}"
        )
    _check_memory(call, name, value)
    if written:
        _check_writable(call, name, value)
    elif not value.is_contiguous():
        _check_copy(call, name, value)


def _check_memory(call: str, name: str, tensor: torch.Tensor) -> None:
    """Check that there is memory behind all elements of ``tensor``, which can be read and written as such."""
    if isinstance(tensor, FakeTensor):
        raise ArgumentTypeError(
            f"{call}: {name}: got a {type(tensor).__name__}, which has no elements; pass a real tensor"
        )
    try:
        missing = missing_storage(tensor)
        is_nowhere = missing is None and bool(tensor.numel()) and not tensor.data_ptr()
    except (NotImplementedError, RuntimeError, TypeError):  # tensors of functorch
        raise ArgumentTypeError(f"{call}: {name}: got {_TRANSFORMED}") from None
    if is_nowhere and tensor.device.type != "meta":
        raise ArgumentTypeError(f"{call}: {name}: got {_without_memory(name, tensor)}")
    if missing is not None:
        found, needed = missing
        place = f" at offset {tensor.storage_offset()}" if tensor.storage_offset() else ""
        raise ArgumentError(
            f"{call}: {name}: got a storage of {found} bytes, but shape {tuple(tensor.shape)} of "
            f"{str(tensor.dtype).removeprefix('torch.')}{place} needs {needed}; resize the storage "
            f"({name}.untyped_storage().resize_({needed})) before the call, as FSDP does when it gathers parameters"
        )


def _without_memory(name: str, tensor: torch.Tensor) -> str:
    """Describe a tensor that has elements at no address, and what to pass instead."""
    kind = type(tensor).__name__
    if kind == "AsyncCollectiveTensor":
        return f"an {kind}, whose elements have not arrived; pass {name}.wait()"
    if type(tensor) is not torch.Tensor:
        return f"a {kind}, whose elements lie in tensors within it; pass these one by one"
    if torch._is_functional_tensor(tensor):
        return _TRANSFORMED
    return f"a tensor of zeros without memory; pass {name}.clone()"


def _check_copy(call: str, name: str, tensor: torch.Tensor) -> None:
    """Check that there can be a copy of a tensor that is only read, where one has to be made."""
    if tensor.device.type == "cpu" and tensor.nbytes > _MEMORY_BYTES:
        raise ArgumentError(
            f"{call}: {name}: got a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()}, whose "
            f"contiguous copy needs {tensor.nbytes} bytes; expected at most {_MEMORY_BYTES}, which this host has"
        )


def _check_writable(call: str, name: str, tensor: torch.Tensor) -> None:
    if not is_dense(tensor):
        raise ArgumentError(
            f"{call}: {name}: got a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()}, which has "
            "gaps or overlaps in memory; a tensor that is written must be contiguous or dense: pass "
            f"{name}.contiguous() and copy back"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ArgumentError(
            f"{call}: {name}: got a lazily {'conjugated' if tensor.is_conj() else 'negated'} view, which cannot be "
            f"written in place; pass {name}.resolve_conj().resolve_neg()"
        )


def _device_remedy(device: str) -> str:
    if device == "cpu":
        return "initialise with a backend for CPU tensors beside it, such as dist_backend='cpu:gloo,cuda:nccl'"
    if device == "meta":
        return "tensors on meta have no elements; make the tensor, or load the model, on a device that is served"
    library = {"cuda": "nccl", "xpu": "xccl"}.get(device)
    if library is None:
        return "move the tensor to a device that is served"
    both = f"cpu:gloo,{device}:{library}"
    return f"backend {library!r} serves {device} tensors (dist_backend={both!r}), or pass tensor.cpu()"


def check_list(
    call: str,
    name: str,
    value: Any,
    length: int,
    backend: Backend,
    group: ProcessGroup | None,
    *,
    like: torch.Tensor | None = None,
    written: bool = False,
) -> None:
    """``value`` is a list of ``length`` tensors, of the dtype of ``like`` where it is given."""
    if not isinstance(value, (list, tuple)):
        raise ArgumentTypeError(f"{call}: {name}: got {describe(value)}; expected a list of {length} tensors")
    if len(value) != length:
        raise ArgumentError(
            f"{call}: {name}: got a list of {len(value)}; expected {length} tensors, one for each rank of the group"
        )
    for position, tensor in enumerate(value):
        check_tensor(call, f"{name}[{position}]", tensor, backend, group, written=written)
        if like is not None:
            check_dtype(call, f"{name}[{position}]", tensor, like)
    if written and overlapping(value):
        raise ArgumentError(f"{call}: {name}: got tensors that share memory; expected one memory for each rank's data")


def check_dtype(call: str, name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Both tensors are of one dtype and on one device."""
    if tensor.dtype != like.dtype:
        raise ArgumentError(
            f"{call}: {name}: got dtype {tensor.dtype}; expected {like.dtype}, that of the other tensor"
        )
    if tensor.device != like.device:
        raise ArgumentError(
            f"{call}: {name}: got a tensor on {tensor.device}; expected {like.device}, as the other tensor"
        )


def check_numel(call: str, name: str, tensor: torch.Tensor, expected: int, why: str) -> None:
    """``tensor`` has ``expected`` elements; ``why`` completes the message."""
    if tensor.numel() != expected:
        raise ArgumentError(
            f"{call}: {name}: got {tensor.numel()} elements (shape {tuple(tensor.shape)}); expected {expected}: {why}"
        )


def as_timedelta(call: str, timeout: float | timedelta | None) -> timedelta | None:
    """Return a timeout in seconds or as a timedelta, as a timedelta."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, timedelta)):
        raise ArgumentTypeError(f"{call}: timeout: got {shown(timeout)}; expected seconds or a timedelta")
    none = timedelta(0)
    if not (timeout > none if isinstance(timeout, timedelta) else 0 < timeout < math.inf):
        raise ArgumentError(
            f"{call}: timeout: got {shown(timeout)}; expected seconds or a timedelta of more than 0, and finite"
        )
    try:
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    except OverflowError:  # more days than a timedelta counts
        limit = timedelta.max
    if limit == none:
        raise ArgumentError(f"{call}: timeout: got {shown(timeout)}; expected at least a microsecond, 1e-6")
    if limit > LONGEST:
        raise ArgumentError(
            f"{call}: timeout: got {shown(timeout)}; expected at most {LONGEST.days} days, which libraries can count"
        )
    return limit


def group_rank_of(
    call: str,
    name: str,
    backend: Backend,
    group: ProcessGroup | None,
    global_rank: int | None,
    group_rank: int | None,
    default: int | None = None,
) -> int:
    """Return the group rank that ``src``/``dst`` or ``group_src``/``group_dst`` name.

    Args:
        name: ``"src"`` or ``"dst"``.
        default: a group rank for when neither is given.
    """
    if isinstance(group_rank, bool):
        raise ArgumentTypeError(
            f"{call}: group_{name}: got {group_rank}; expected a rank within the group, or give DeepSpeed's prof and "
            "log_name by name"
        )
    if global_rank is not None and group_rank is not None:
        raise ArgumentError(
            f"{call}: got both {name}={shown(global_rank)} and group_{name}={shown(group_rank)}; expected one of them"
        )
    if group_rank is not None:
        position = integer(call, f"group_{name}", group_rank)
        size = backend.get_world_size(group)
        if not 0 <= position < size:
            raise ArgumentError(
                f"{call}: group_{name}: got {shown(position)}; expected 0 to {size - 1} in a group of {size}"
            )
        return position
    if global_rank is None:
        if default is None:
            raise ArgumentError(f"{call}: {name}: missing; expected the global rank of a member of the group")
        return default
    rank = integer(call, name, global_rank)
    ranks = backend.get_process_group_ranks(group)
    if rank not in ranks:
        raise ArgumentError(
            f"{call}: {name}: got rank {shown(rank)}, which is not in the group; its global ranks are {ranks}"
        )
    return ranks.index(rank)


def splits(
    call: str, name: str, sizes: Sequence[int] | None, tensor_name: str, tensor: torch.Tensor, W: int
) -> list[int]:
    """``sizes`` as W row counts that add up to the first dimension of ``tensor``; equal ones for None."""
    rows = tensor.shape[0] if tensor.dim() else tensor.numel()
    is_list = isinstance(sizes, Sequence) and not isinstance(sizes, (str, bytes, bytearray))
    if not (sizes is None or is_list or (isinstance(sizes, torch.Tensor) and sizes.dim())):
        raise ArgumentTypeError(f"{call}: {name}: got {describe(sizes)}; expected a list of {W} integers, or None")
    if sizes is None or not len(sizes):
        if rows % W:
            raise ArgumentError(
                f"{call}: {tensor_name}: got {rows} rows (shape {tuple(tensor.shape)}), which does not divide by the "
                f"world size of {W}; pass {name} to send parts of different sizes"
            )
        return [rows // W] * W
    counts = [integer(call, name, size) for size in sizes]
    if len(counts) != W:
        raise ArgumentError(f"{call}: {name}: got {len(counts)} sizes; expected {W}, one for each rank of the group")
    if min(counts) < 0 or sum(counts) != rows:
        raise ArgumentError(
            f"{call}: {name}: got {counts}, which adds up to {sum(counts)}; expected sizes of 0 or more that add up to "
            f"{rows}, the first dimension of {tensor_name}"
        )
    return counts


def integer(call: str, name: str, value: Any) -> int:
    """``value`` as an int; True and False are none."""
    try:
        if isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool:
            raise TypeError
        return operator.index(value)
    except Exception:  # tensors of some kinds raise errors of their own
        raise ArgumentTypeError(f"{call}: {name}: got {describe(value)}; expected an integer") from None


def describe(value: Any) -> str:
    """Describe a value for an error message."""
    kind = type(value).__name__
    if isinstance(value, (list, tuple)):
        return f"a {kind} of {len(value)}"
    return "None" if value is None else f"{shown(value)} of type {kind}"
