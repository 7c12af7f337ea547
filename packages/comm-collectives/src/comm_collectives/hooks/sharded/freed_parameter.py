"""Parameters whose memory is freed between uses: a read of their values gathers them, or raises and says what to do.

A parameter is given another class while it is freed, as ``torch.nn.UninitializedParameter`` is while it has no shape.
torch calls ``__torch_function__`` of that class instead of every function that gets the parameter. A parameter that is
gathered has its own class, and costs nothing.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, cast

import torch
from torch import nn

from comm_collectives.hooks.sharded.tensors_in import tensors_in
from comm_utils.errors import ArgumentError, ArgumentTypeError

__all__ = ["FreedParameter", "as_gathered", "hide", "refuse_kinds", "show"]

# Attributes that are values, or views of them; all others describe the tensor.
_VALUES = frozenset(("data", "T", "H", "mT", "mH", "real", "imag"))
_METHODS = (
    "dim element_size get_device is_complex is_contiguous is_floating_point is_inference is_same_size "
    "is_shared is_signed ndimension nelement new_empty new_full new_ones new_zeros numel register_hook "
    "register_post_accumulate_grad_hook requires_grad_ retain_grad size storage_offset stride untyped_storage __len__"
)
_FUNCTIONS = (
    "empty_like full_like is_complex is_floating_point is_same_size numel ones_like rand_like randn_like zeros_like "
    "_has_compatible_shallow_copy_type"
)
# They return the parameter itself where there is nothing to convert, as in a second model.to(device).
_CONVERSIONS = "bfloat16 contiguous cpu cuda double float half to type"


def _described() -> Iterable[Any]:
    """Return the functions that need no values, as torch passes them to ``__torch_function__``."""
    for name, attribute in vars(torch._C.TensorBase).items():
        if isinstance(attribute, types.GetSetDescriptorType) and name not in _VALUES:
            yield from (
                cast("Any", attribute).__get__,
                cast("Any", attribute).__set__,
                cast("Any", attribute).__delete__,
            )
    yield from (getattr(torch.Tensor, name) for name in _METHODS.split())
    yield from (getattr(torch, name) for name in _FUNCTIONS.split())


_DESCRIBED = frozenset(_described())
_CONVERTED = frozenset(getattr(torch.Tensor, name) for name in _CONVERSIONS.split())
_SET_DATA = cast("Any", torch.Tensor.data).__set__


class FreedParameter(nn.Parameter):
    """A parameter without values; made by :func:`hide`."""

    _freed: tuple[str, Callable[[], None]]
    _gathered_class: type[nn.Parameter] = nn.Parameter

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func`` if it needs no values, or after they were gathered.

        Raises:
            ArgumentError: no forward or backward runs, in which all ranks would gather them; names the parameter.
        """
        named = kwargs or {}
        if func in _DESCRIBED or _returns_itself(func, args, named):
            with as_gathered():
                return func(*args, **named)
        for one in (*tensors_in(args), *tensors_in(named)):
            if isinstance(one, FreedParameter):
                one._demand(_name_of(func))
        return func(*args, **named)

    def _demand(self, call: str) -> None:
        """Gather the values, in a forward or backward, or raise."""
        name, on_read = self._freed
        on_read()
        if isinstance(self, FreedParameter):
            raise ArgumentError(
                f"{call}: got parameter {name!r} of a model with the hooks of register_sharded_hooks(stage=3), which "
                "free its values between uses; use it within handle.full_parameters() on all ranks (with writes=True "
                "to keep what is written), or handle.full_state_dict() for copies of all values; to convert or "
                "replace it, remove() the hooks before"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._demand("copy.deepcopy")
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._demand("pickle")
        return self.__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return the name and the form: values are not there."""
        with as_gathered():
            return f"Parameter {self._freed[0]!r} of shape {tuple(self.shape)} and {self.dtype}, freed between uses"

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)


def _returns_itself(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    if func == _SET_DATA:  # as module.to() does with what it converted
        return args[0] is args[1]
    if func not in _CONVERTED:
        return False
    with as_gathered():
        result = func(*args, **named)
    return result is args[0] or not isinstance(result, torch.Tensor)


def _name_of(func: Any) -> str:
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__", "__delete__"):
        name = str(getattr(func.__self__, "__name__", name))
    return name


def hide(parameter: nn.Parameter, name: str, on_read: Callable[[], None]) -> None:
    """Have reads of the values of ``parameter`` gather them or raise.

    Args:
        parameter: of :class:`torch.nn.Parameter` or a subclass, which it stays an instance of.
        name: in the model.
        on_read: called before the values are read; it may call :func:`show`.
    """
    if not isinstance(parameter, FreedParameter):
        cast("Any", parameter)._freed = name, on_read
        cast("Any", parameter).__class__ = _freed_class(type(parameter))


@cache
def _freed_class(of: type[nn.Parameter]) -> type[FreedParameter]:
    if of is nn.Parameter:
        return FreedParameter
    return type(f"Freed{of.__name__}", (FreedParameter, of), {"_gathered_class": of})


def show(parameter: nn.Parameter) -> None:
    """Take back what :func:`hide` did."""
    if isinstance(parameter, FreedParameter):
        cast("Any", parameter).__class__ = parameter._gathered_class
        del cast("Any", parameter)._freed


def refuse_kinds(call: str, parameters: Mapping[str, torch.Tensor]) -> None:
    """Check that each parameter has memory of its own, which can be replaced.

    Args:
        call: the user's call, for messages.
        parameters: by name.

    Raises:
        ArgumentTypeError: one wraps other tensors, as a ``DTensor`` or a quantized tensor does.
    """
    for name, one in parameters.items():
        if type(one).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise ArgumentTypeError(
                f"{call}: model: parameter {name!r} is a {type(one).__name__}, which stands for other tensors; "
                "expected a torch.nn.Parameter, or a subclass without __torch_dispatch__: replace it by an ordinary "
                "parameter before"
            )


def as_gathered() -> AbstractContextManager[None]:
    """Have freed parameters taken for others of placeholders within; for what reads no values, and is faster so."""
    return torch._C.DisableTorchFunctionSubclass()
