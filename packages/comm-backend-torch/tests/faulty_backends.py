"""Providers of backends that are gloo with one fault, each an attribute of this module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from comm_backend_torch import TorchBackend
from comm_utils.backend import Availability, Setup
from comm_utils.torch_support import initialization
from comm_utils.torch_support.handle import Handle

# A message that goes astray is waited for.
_GROUPS_TIME = timedelta(seconds=10)


class Provider:
    def __init__(self, backend_class: type[TorchBackend]) -> None:
        self.backend_class = backend_class

    def availability(self) -> Mapping[str, Availability]:
        return {"gloo": Availability(True, "gloo comes with torch")}

    def initialize(self, setup: Setup) -> TorchBackend:
        initialization.initialize(replace(setup, backend="gloo"))
        return self.backend_class(setup.timeout)

    def adopts(self, library: str) -> bool:
        return library == "gloo"

    def adopt(self) -> TorchBackend:
        return self.backend_class(initialization.world_timeout())


class ProviderThatAdoptsNothing(Provider):
    def adopt(self) -> TorchBackend:
        raise NotImplementedError("adopt")


class ProviderThatDoesNotKnow(Provider):
    def adopts(self, library: str) -> bool:
        raise NotImplementedError("adopts")


class Faultless(TorchBackend):
    def create_group(self, ranks: Sequence[int], name: str, timeout: timedelta | None = None, *more: Any) -> Any:
        return super().create_group(ranks, name, timeout or _GROUPS_TIME, *more)


class WithoutFastPaths(Faultless):
    def fast_path(self, *_: Any) -> None:
        return None


class Ended(Handle):
    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> None:
        return None


class Spoilt:
    """A handle, one member of which raises."""

    def __init__(self, work: Any, member: str) -> None:
        self._work, self._member = work, member

    def __getattr__(self, name: str) -> Any:
        if name == self._member:
            raise NotImplementedError(name)
        return getattr(self._work, name)


def _with(operation: str, change: Callable[..., Any]) -> type[TorchBackend]:
    """Return gloo, where ``change`` replaces ``operation`` and gets the right one as its first argument."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(getattr(super(made, self), operation), self, *args, **kwargs)

    method.__name__ = operation
    made = type("Faulty", (Faultless,), {operation: method})
    return made


def _untouched(operation: str, output: int) -> type[TorchBackend]:
    def change(right: Any, _: Any, *args: Any, async_op: bool = False, **more: Any) -> Any:
        return Ended(args[output]) if async_op else right(*args, **more)

    return _with(operation, change)


def _zeroed(operation: str, source: int) -> type[TorchBackend]:
    def change(right: Any, _: Any, *args: Any, **more: Any) -> Any:
        work = right(*args, **more)
        if work is None:
            args[source].zero_()
        return work

    return _with(operation, change)


def _taken_for_global(operation: str, role: str) -> type[TorchBackend]:
    def change(right: Any, _: Any, *args: Any, **more: Any) -> Any:
        if f"group_{role}" in more:
            more[role] = more.pop(f"group_{role}")
        return right(*args, **more)

    return _with(operation, change)


def _astray(operation: str) -> type[TorchBackend]:
    def change(right: Any, self: Any, tensor: Any, dst: Any = None, group: Any = None, *args: Any, **more: Any) -> Any:
        if group is not None and dst is not None:
            ranks = self.get_process_group_ranks(group)
            dst = ranks[ranks.index(dst) - 1]
        return right(tensor, dst, group, *args, **more)

    return _with(operation, change)


def _spoilt(operation: str, member: str) -> type[TorchBackend]:
    def change(right: Any, _: Any, *args: Any, **more: Any) -> Any:
        work = right(*args, **more)
        return None if work is None else Spoilt(work, member)

    return _with(operation, change)


def _raises(operation: str) -> type[TorchBackend]:
    def change(right: Any, _: Any, *args: Any, **more: Any) -> Any:
        raise NotImplementedError(operation)

    return _with(operation, change)


def _barrier_without_handle(right: Any, _: Any, group: Any = None, async_op: bool = False, *more: Any) -> None:
    right(group)


def _sorted_ranks(right: Any, _: Any, ranks: Sequence[int], *more: Any) -> Any:
    return right(sorted(ranks), *more)


def _without(field: str) -> type[TorchBackend]:
    def change(right: Any, _: Any, *args: Any) -> Any:
        return replace(right(*args), **{field: frozenset()})

    return _with("capabilities", change)


def _wrong_sender(right: Any, _: Any, *args: Any, **more: Any) -> int:
    return int(right(*args, **more)) + 1


def _not_shared(right: Any, _: Any, shape: Any, dtype: Any = None, group: Any = None) -> Any:
    return torch.empty(shape, dtype=torch.float32)


_OUTPUTS = {
    "reduce": 0,
    "broadcast": 0,
    "all_gather": 0,
    "all_gather_into_tensor": 0,
    "all_to_all_single": 0,
    "gather": 1,
    "scatter": 0,
}
_INPUTS = {"all_gather": 1, "all_gather_into_tensor": 1, "all_to_all_single": 1, "gather": 0}
_PEERS = {"reduce": "dst", "broadcast": "src", "gather": "dst", "scatter": "src", "isend": "dst", "irecv": "src"}
_MEMBERS = ("get_future", "is_success", "synchronize", "result", "exception")

FAULTS = {
    "faultless": Provider(Faultless),
    "without_fast_paths": Provider(WithoutFastPaths),
    **{f"untouched_by_{name}": Provider(_untouched(name, output)) for name, output in _OUTPUTS.items()},
    **{f"zeroed_by_{name}": Provider(_zeroed(name, source)) for name, source in _INPUTS.items()},
    **{f"group_rank_of_{name}": Provider(_taken_for_global(name, role)) for name, role in _PEERS.items()},
    **{f"{name}_goes_astray": Provider(_astray(name)) for name in ("send", "isend")},
    **{f"all_reduce_without_{name}": Provider(_spoilt("all_reduce", name)) for name in _MEMBERS},
    "irecv_without_source_rank": Provider(_spoilt("irecv", "source_rank")),
    "recv_of_a_wrong_sender": Provider(_with("recv", _wrong_sender)),
    "barrier_without_handle": Provider(_with("barrier", _barrier_without_handle)),
    "create_group_sorts": Provider(_with("create_group", _sorted_ranks)),
    "mark_broken_does_nothing": Provider(_with("mark_broken", lambda *_: None)),
    "get_timeout_is_wrong": Provider(_with("get_timeout", lambda *_: timedelta(seconds=1))),
    "empty_shared_raises": Provider(_raises("empty_shared")),
    "empty_shared_of_one_dtype": Provider(_with("empty_shared", _not_shared)),
    "batch_isend_irecv_raises": Provider(_raises("batch_isend_irecv")),
    "no_reductions": Provider(_without("reductions")),
    "no_dtypes": Provider(_without("dtypes")),
    "adopt_raises": ProviderThatAdoptsNothing(Faultless),
    "adopts_raises": ProviderThatDoesNotKnow(Faultless),
}


def __getattr__(name: str) -> Provider:
    if name not in FAULTS:
        raise AttributeError(name)
    return FAULTS[name]
