"""Data-parallel training: gradients are reduced in buckets while the rest of the backward runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from comm_collectives.annotations import Group
from comm_collectives.arguments import enter
from comm_collectives.collectives import all_reduce
from comm_collectives.hooks.gradient_reduction import GradientReduction
from comm_collectives.hooks.handle import (
    GRADIENTS,
    Handle,
    check_module,
    check_unregistered,
    trainable_parameters,
)
from comm_collectives.hooks.initial_state import broadcast_tensors
from comm_collectives.hooks.model_agreement import check_on_all_ranks
from comm_collectives.hooks.model_changes import ModelChanges, refuse_assignment
from comm_collectives.hooks.other_reductions import refuse_in_ddp, refuse_reduced
from comm_collectives.hooks.required_gradients import RequiredGradients
from comm_collectives.hooks.sparse_gradients import sparse_parameters
from comm_collectives.hooks.synchronization import Synchronization
from comm_collectives.keyword_errors import with_keyword_errors
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown

__all__ = ["DataParallel", "DataParallelOptions", "register_data_parallel_hooks"]

_CALL = "register_data_parallel_hooks"
_MIB = 1 << 20


@dataclass(frozen=True)
class DataParallelOptions:
    """Settings of :func:`register_data_parallel_hooks`; the same on all ranks.

    Attributes:
        reduction: how gradients are reduced.
        bucket_size_bytes: a bucket ends with the parameter that makes it as large.
        first_bucket_size_bytes: the same for the first bucket, which is small so that communication begins early.
        overlap: reduce buckets while the backward runs; False starts all of them at its end.
        sparse_gradients: ranks exchange the rows of the gradients of embeddings with ``sparse=True``, which stay
            sparse, or become dense where a rank uses the weight otherwise too; False makes them dense first.
        broadcast_parameters: begin with the parameters and buffers of the first rank.
        broadcast_buffers: after each backward that reduces gradients, take over the buffers of the first rank, such as
            the averages of batch normalization. Where that changes a buffer that another graph has saved, the backward
            of that graph raises torch's error about a variable that was modified in place.

    Raises:
        ArgumentError: a size below 1.
    """

    reduction: GradientReduction = field(default_factory=GradientReduction)
    bucket_size_bytes: int = 25 * _MIB
    first_bucket_size_bytes: int = _MIB
    overlap: bool = True
    sparse_gradients: bool = True
    broadcast_parameters: bool = True
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        call = "DataParallelOptions"
        if not isinstance(self.reduction, GradientReduction):
            raise ArgumentTypeError(f"{call}: reduction: got {shown(self.reduction)}; expected a GradientReduction")
        for name in ("bucket_size_bytes", "first_bucket_size_bytes"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int):
                raise ArgumentTypeError(f"{call}: {name}: got {shown(size)}; expected a number of bytes")
            if size < 1:
                raise ArgumentError(f"{call}: {name}: got {size}; expected 1 byte or more")
        for name in ("overlap", "sparse_gradients", "broadcast_parameters", "broadcast_buffers"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentTypeError(f"{call}: {name}: got {shown(getattr(self, name))}; expected True or False")


class DataParallel(Handle):
    """The handle of :func:`register_data_parallel_hooks`.

    Attributes:
        options, group: what was given.
    """

    def __init__(
        self, model: nn.Module, options: DataParallelOptions, group: Group, ignored: Collection[nn.Parameter] = ()
    ) -> None:
        parameters = trainable_parameters(_CALL, model, ignored)
        skipped = set(map(id, ignored))
        super().__init__(_CALL, model, parameters, GRADIENTS)
        self.options, self.group = options, group
        self.on_removal(options.reduction.claim(_CALL, parameters, self))
        if options.broadcast_parameters:
            kept = [one for one in model.parameters() if id(one) not in skipped]
            broadcast_tensors([*kept, *model.buffers()], group)
        self._has_buffers = options.broadcast_buffers and any(True for _ in model.buffers())
        by_rows = sparse_parameters(model) if options.sparse_gradients else set()
        trained = list(parameters.values())
        held = {name: one for name, one in model.named_parameters() if id(one) not in skipped}
        required = RequiredGradients(held, "nothing reduces it")
        self._synchronization = Synchronization(
            list(parameters),
            trained,
            [one in by_rows for one in trained],
            required,
            options.reduction,
            group,
            (options.first_bucket_size_bytes, options.bucket_size_bytes),
            options.overlap,
            self._take_buffers,  # by which the hooks keep this handle alive
        )
        self.on_removal(self._synchronization.release)
        changes = ModelChanges(model, "nothing reduces its gradient", ignored)
        self.on_removal(changes.release)
        self.on_removal(refuse_assignment(_CALL, model, held))
        self.on_removal(model.register_forward_pre_hook(_Checks(self.parameters, required, changes)).remove)
        for place, parameter in enumerate(trained):
            register: Any = parameter.register_post_accumulate_grad_hook
            hook = register(self._synchronization.hook_of(place))
            self.on_removal(hook.remove)

    @property
    def buckets(self) -> list[tuple[str, ...]]:
        """Return the names of the parameters of each bucket; empty before the first backward."""
        return [one.names for one in self._synchronization.buckets]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication in backwards that run within the block.

        The next backward outside of it, or :meth:`reduce_gradients`, reduces what was accumulated.
        """
        synchronization = self._synchronization
        before, synchronization.is_enabled = synchronization.is_enabled, False
        try:
            yield
        finally:
            synchronization.is_enabled = before

    def reduce_gradients(self) -> None:
        """Reduce the gradients that there are, on all ranks, as at the end of a backward.

        Raises:
            ArgumentError: within a backward, or after :meth:`remove`; with ``op="sum"``, a gradient is the result of
                the last reduction, which would be added up once more.
        """
        if not self.is_registered or self._synchronization.is_running:
            state = "a backward is under way" if self.is_registered else "the hooks were removed"
            raise ArgumentError(f"reduce_gradients: {state}; call it after backward() and before remove()")
        self._synchronization.reduce()

    def remove(self) -> None:
        """Take the hooks off again, without a trace; gradients stay, in memory of their own.

        Raises:
            ArgumentError: within a backward; or other hooks were registered on the same parameters later.
        """
        if self._synchronization.is_running:
            raise ArgumentError("remove: a backward is under way; call it after backward()")
        super().remove()

    def _take_buffers(self) -> None:
        if self._has_buffers:
            # Batch normalization in training saves its averages for the backward, and does not read them there.
            averages = {
                id(one)
                for module in self.model.modules()
                if isinstance(module, _NormBase) and module.training
                for one in module._buffers.values()
            }
            buffers = list(self.model.buffers())
            broadcast_tensors(buffers, self.group, {id(one) for one in buffers}.difference(averages))


class _Checks:
    """Checks before each forward, which find nothing in a copy of the model and in one that was pickled."""

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], required: RequiredGradients, changes: ModelChanges | None
    ) -> None:
        self._parameters, self._required, self._changes = parameters, required, changes

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        # An error, or other ways out of Python, would end the graph of torch.compile.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            refuse_in_ddp("forward", self._parameters)
            self._required.refuse_unfrozen("forward")
            if self._changes is not None:
                self._changes.refuse_added("forward")

    def __reduce__(self) -> tuple[Any, ...]:
        return _Checks, ({}, RequiredGradients({}, ""), None)


@with_keyword_errors
def register_data_parallel_hooks(
    model: nn.Module,
    options: DataParallelOptions | None = None,
    group: Group = None,
    ignored_parameters: Iterable[str | nn.Parameter] | None = None,
) -> DataParallel | None:
    """Reduce the gradients of ``model`` over the ranks of ``group`` in every backward from now on.

    Every rank of the group calls it, with the same model. Tied parameters count once. ``parameter.grad`` is reduced
    when ``backward()`` returns, and None where no rank has a gradient.

    Args:
        model: its parameters that require gradients, of any float or complex dtypes. With ``broadcast_parameters``,
            parameters and buffers are overwritten with those of the first rank.
        options: None for the default settings.
        group: None is the world group.
        ignored_parameters: names of parameters of ``model``, or parameters, that get no hooks and are not broadcast,
            such as those of experts that this rank alone has. They may differ between ranks. Buffers are unaffected.

    Returns:
        The handle; its ``remove()`` takes the hooks off again. None on a rank that is not in ``group``.

    Raises:
        CollectiveMismatchError: on all ranks, if models or options differ; names the rank and the first difference.
        ArgumentError: a parameter has such hooks already, or none requires a gradient; ``model`` or a module in it is
            one of DDP or FSDP2, see :func:`use_reduction`; ``model`` does not have an ignored parameter; gradients
            cannot be compressed as ``options`` say; on the other ranks, that a rank refused its arguments.
        ArgumentTypeError: ``model`` is no module, or a parameter has no shape yet.
    """
    call = _CALL
    if enter(call, group) is None:
        return None
    chosen = DataParallelOptions() if options is None else options
    ignored: list[nn.Parameter] = []

    def prepare() -> tuple[Mapping[str, torch.Tensor], Mapping[str, object]]:
        if not isinstance(chosen, DataParallelOptions):
            raise ArgumentTypeError(f"{call}: options: got {shown(options)}; expected DataParallelOptions")
        refuse_reduced(call, check_module(call, model))
        ignored.extend(_ignored(model, ignored_parameters))
        parameters = trainable_parameters(call, model, ignored)
        check_unregistered(call, parameters, group=group, model=model, ignored=ignored)
        by_rows = sparse_parameters(model) if chosen.sparse_gradients else set()
        dense = {name: one for name, one in parameters.items() if one not in by_rows}
        chosen.reduction.check_compression(call, all_reduce, dense, group)
        is_broadcast = chosen.broadcast_parameters or chosen.broadcast_buffers
        buffers = dict(model.named_buffers()) if is_broadcast else {}
        return {**parameters, **buffers}, {"options": chosen}

    check_on_all_ranks(call, prepare, group)
    return DataParallel(model, chosen, group, ignored)


def _ignored(model: nn.Module, given: Any) -> list[nn.Parameter]:
    """Return the parameters of ``model`` that ``given`` says; None says none."""
    where = f"{_CALL}: ignored_parameters"
    if given is None:
        return []
    if isinstance(given, (str, torch.Tensor)) or not isinstance(given, Iterable):
        raise ArgumentTypeError(f"{where}: got {shown(given)}; expected a collection of names or parameters")
    by_name = {name.removeprefix("_orig_mod."): one for name, one in model.named_parameters(remove_duplicate=False)}
    known = set(map(id, by_name.values()))
    found = []
    for one in given:
        if not isinstance(one, (str, nn.Parameter)):
            raise ArgumentTypeError(f"{where}: got {shown(one)}; expected a name or a parameter")
        parameter = by_name.get(one) if isinstance(one, str) else one
        if parameter is None or id(parameter) not in known:
            got = repr(one) if isinstance(one, str) else f"one of shape {tuple(one.shape)}"
            raise ArgumentError(
                f"{where}: got {got}, which the model does not have; its parameters are {shown(list(by_name))}"
            )
        found.append(parameter)
    return found
