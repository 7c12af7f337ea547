"""The handle of a sharded model: its hooks, its optimizers, and its state."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from comm_collectives.annotations import Group
from comm_collectives.groups import get_world_group
from comm_collectives.hooks.buckets import assign_buckets
from comm_collectives.hooks.gradient_reduction import GradientReduction
from comm_collectives.hooks.handle import (
    GRADIENTS,
    LAYERS,
    Handle,
    handles_of,
    trainable_parameters,
)
from comm_collectives.hooks.initial_state import broadcast_tensors
from comm_collectives.hooks.model_agreement import check_on_all_ranks
from comm_collectives.hooks.model_changes import ModelChanges, refuse_assignment
from comm_collectives.hooks.model_hook import ModelHook
from comm_collectives.hooks.required_gradients import RequiredGradients
from comm_collectives.hooks.sharded.flat_shard import FlatShard
from comm_collectives.hooks.sharded.freed_parameter import as_gathered
from comm_collectives.hooks.sharded.gathering import Gathering
from comm_collectives.hooks.sharded.gradient_norm import clip_to_norm, total_norm
from comm_collectives.hooks.sharded.gradients import Gradients
from comm_collectives.hooks.sharded.memory_use import MemoryUse, storage_bytes
from comm_collectives.hooks.sharded.optimizer_groups import divide_into_groups
from comm_collectives.hooks.sharded.optimizers import (
    check_optimizer,
    described,
    flats_of,
    notice_loss_scaling,
    notice_zero_grad,
    refuse_closure,
    refuse_model_parameters,
    refuse_scaled_step,
    watch_state_calls_of,
)
from comm_collectives.hooks.sharded.prefix import check_names, check_prefix
from comm_collectives.hooks.sharded.refuse_clipping import DividedTensor, refuse_clipping
from comm_collectives.hooks.sharded.state import (
    checked_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
)
from comm_collectives.hooks.sharded.state_calls import watch_state_calls
from comm_collectives.hooks.sharded.tensors_in import outputs_of
from comm_collectives.hooks.sharded.units import Unit, divide_model, group_by_kind
from comm_utils.errors import ArgumentError

__all__ = ["Sharded"]

_CALL = "register_sharded_hooks"


class Sharded(Handle):
    """The hooks of a sharded model, and what belongs to them; made by :func:`register_sharded_hooks`.

    Attributes:
        stage: 1, 2 or 3.
        group: whose ranks have a part each.
    """

    def __init__(
        self,
        model: nn.Module,
        stage: int,
        group: Group,
        bucket_size_bytes: int,
        reduction: GradientReduction,
        prefetch: bool,
    ) -> None:
        trainable = trainable_parameters(_CALL, model)
        held = dict(model.named_parameters()) if stage == 3 else trainable
        super().__init__(_CALL, model, held, GRADIENTS)
        self.stage, self.group = stage, group
        self.on_removal(reduction.claim(_CALL, trainable, self))
        self._world = get_world_group()
        self._optimizers: list[Optimizer] = []
        broadcast_tensors([*model.parameters(), *model.buffers()], group)
        roots: list[tuple[Unit, nn.Module]] = []
        if stage == 3:
            roots = self._divide_model(model, bucket_size_bytes)
            self._flats = [flat for unit, _ in roots for flat in unit.flats]
        else:
            self._flats = self._divide_parameters(trainable, bucket_size_bytes)
        self._trainable_flats = [flat for flat in self._flats if flat.requires_grad]
        in_order = self._trainable_flats[::-1] if stage == 3 else self._trainable_flats
        self._gradients = Gradients(in_order, reduction, group, stage)
        self._required = RequiredGradients(dict(model.named_parameters()), "no optimizer's tensor stands for it")
        self._changes = ModelChanges(model, "no optimizer's tensor stands for it")
        self._gradients.on_first_gradient = self._refuse_changes
        self.on_removal(self._release)
        self.on_removal(self._gradients.remove)
        self.on_removal(self._changes.release)
        if stage < 3:
            self.on_removal(refuse_assignment(_CALL, model, dict(model.named_parameters())))
        self._register_on_model(model)
        self._gathering: Gathering | None = None
        if stage == 3:
            self._gather_in_passes(model, roots, prefetch)
        names = {id(parameter): name for name, parameter in trainable.items()}
        self._names = names
        allow = refuse_model_parameters(names)
        self.on_removal(allow)
        weakref.finalize(self, allow)
        self.on_removal(refuse_clipping(self))

    def _divide_parameters(self, parameters: Mapping[str, nn.Parameter], bucket_size_bytes: int) -> list[FlatShard]:
        names = list(parameters)[::-1]  # gradients arrive about in this order
        members = [parameters[name] for name in names]
        return [
            FlatShard([names[place] for place in bucket], [members[place] for place in bucket], self.group, False)
            for bucket in assign_buckets(members, bucket_size_bytes)
        ]

    def _divide_model(self, model: nn.Module, bucket_size_bytes: int) -> list[tuple[Unit, nn.Module]]:
        roots: list[tuple[Unit, nn.Module]] = []
        for part in divide_model(model, bucket_size_bytes):
            unit = Unit(part.name, part.is_whole)
            for names, members in group_by_kind(part.parameters):
                flat = FlatShard(names, members, self.group, True)
                flat.free()
                unit.flats.append(flat)
            roots.append((unit, part.module))
        return roots

    def _register_on_model(self, model: nn.Module) -> None:
        gradients, required, changes = self._gradients, self._required, self._changes

        def before(module: nn.Module, inputs: Any) -> None:
            if module is not model:  # a copy has the hooks, and its parameters are its own
                return
            self._check_world("forward")
            gradients.abandon_failed()
            for flat in self._flats:
                flat.refuse_conversion("forward")
                flat.keep_replaced("forward")
            if any(flat.is_changed for flat in self._trainable_flats):
                raise ArgumentError(
                    "optimizer.step: its results were not gathered; call handle.attach(optimizer) once, or "
                    "handle.gather() after each step (after a checkpoint was loaded, handle.load_state_dict())"
                )
            if torch.is_grad_enabled():
                with as_gathered():
                    required.refuse_unfrozen("forward")
                    changes.refuse_added("forward")

        def after(module: nn.Module, inputs: Any, outputs: Any) -> None:
            # The end of this backward, also where the first gradient arrives in a backward within it.
            if module is model and torch.is_grad_enabled():
                for tensor in outputs_of(outputs).tensors:
                    cast("Any", tensor).register_hook(lambda gradient: gradients.begin())

        disable = cast("Any", torch.compiler.disable)  # a graph ends at these
        self.on_removal(model.register_forward_pre_hook(ModelHook(disable(before))).remove)
        self.on_removal(model.register_forward_hook(ModelHook(disable(after))).remove)

    def _refuse_changes(self) -> None:
        with as_gathered():
            self._required.refuse_changes()

    def _gather_in_passes(self, model: nn.Module, roots: list[tuple[Unit, nn.Module]], prefetch: bool) -> None:
        gradients = self._gradients
        gathering = Gathering(model, roots, prefetch, gradients.begin, lambda: gradients.is_running, gradients.agree)
        gradients.on_begin = gathering.begin_backward
        gradients.on_complete = gathering.complete
        gradients.on_end = gathering.end_backward
        self._gathering = gathering
        self.on_removal(gathering.remove)
        self.on_removal(watch_state_calls(model, lambda: gathering.is_open))

    def _check_world(self, call: str) -> None:
        if get_world_group() is not self._world:
            raise ArgumentError(
                f"{call}: the world was set up anew after {_CALL}(); register hooks on a model again in each world"
            )

    def _check_registered(self, call: str) -> None:
        if not self.is_registered:
            raise ArgumentError(f"{call}: got called after remove(); call {_CALL}() again")
        self._check_world(call)
        for flat in self._flats:
            flat.keep_replaced(call)

    # --- the optimizer

    def parameter_groups(self, groups: Iterable[Any] | None = None) -> list[dict[str, Any]]:
        """Return what an optimizer is built from: flat views of this rank's part, in groups with their options.

        The optimizer has to treat each element alike, as SGD, Adam and AdamW do; others, such as LAMB, Muon or
        Adafactor, would see flat vectors of several parameters instead of each parameter.

        Args:
            groups: as for ``torch.optim``: dicts with parameters of the model in ``"params"`` and options, or
                parameters. None is one group of all parameters that require gradients. Others are not updated.

        Raises:
            ArgumentError: a parameter is not of the model, or in two groups; an optimizer is attached already.
        """
        call = "parameter_groups"
        self._check_registered(call)
        if groups is None:
            groups = [one for flat in self._trainable_flats for one in flat.parameters]
        if self._optimizers:
            raise ArgumentError(f"{call}: got called after attach(); expected it before, as it makes new tensors")
        made = divide_into_groups(call, groups, self._trainable_flats)
        for bucket in self._gradients.buckets:
            bucket.view_segments()
        return made

    def attach(self, optimizer: Optimizer) -> None:
        """Have ``optimizer.step()`` check that there are gradients, and gather parameters after it.

        Its ``load_state_dict()`` then takes the state of this rank's part alone, and its ``zero_grad()`` drops
        gradients of :meth:`no_sync` as well.

        Every rank calls it, with an optimizer of the same class, groups and options.

        Raises:
            CollectiveMismatchError: on all ranks, if optimizers differ; names the rank and the first difference.
            ArgumentTypeError: ``optimizer`` is none.
            ArgumentError: it has parameters of the model instead of :meth:`parameter_groups`, or other tensors. Its
                ``step()`` raises it without gradients, while gradients wait for their reduction, and when a
                ``torch.amp.GradScaler`` calls it.
        """
        self._check_registered("attach")

        def prepare() -> tuple[Mapping[str, torch.Tensor], Mapping[str, object]]:
            checked = check_optimizer("attach", optimizer, self._names, self._trainable_flats)
            return {}, described(checked, self._trainable_flats)

        check_on_all_ranks("attach", prepare, self.group)
        checked = optimizer
        groups = len(checked.param_groups)
        self._optimizers.append(checked)

        def before(optimizer: Optimizer, positional: Any, named: Any) -> None:
            nonlocal groups
            self._check_world("optimizer.step")
            refuse_scaled_step(optimizer)
            refuse_closure(positional, named)
            if groups != len(optimizer.param_groups):  # after add_param_group()
                check_optimizer("optimizer.step", optimizer, self._names, self._trainable_flats)
                groups = len(optimizer.param_groups)
            self._gradients.abandon_failed()
            for flat in self._flats:
                flat.keep_replaced("optimizer.step")
            if self._gradients.holds_gradients:
                raise ArgumentError(
                    "optimizer.step: got called while gradients of no_sync() wait for their reduction; run the last "
                    "backward before a step outside of no_sync()"
                )
            flats = flats_of(optimizer, self._trainable_flats)
            if all(segment.parameter.grad is None for flat in flats for segment in flat.segments):
                raise ArgumentError("optimizer.step: got called without gradients; call backward() first")

        def after(optimizer: Optimizer, positional: Any, named: Any) -> None:
            self._gather(flats_of(optimizer, self._trainable_flats))

        def drop() -> None:
            self._gradients.drop({id(one) for group in checked.param_groups for one in group["params"]})

        for hook in (checked.register_step_pre_hook(before), checked.register_step_post_hook(after)):
            self.on_removal(hook.remove)
        for undo in watch_state_calls_of(checked, self._trainable_flats, self.stage):
            self.on_removal(undo)
        self.on_removal(notice_loss_scaling(checked))
        self.on_removal(notice_zero_grad(checked, drop))
        self.on_removal(lambda: self._optimizers.remove(checked))

    def gather(self) -> None:
        """Bring the updated parameters of all ranks together; for a step of an optimizer that is not attached.

        In stage 3 the next forward does so, module by module. In stages 1 and 2 a forward without it raises.
        """
        self._check_registered("gather")
        self._gather(self._trainable_flats)

    def _gather(self, flats: list[FlatShard]) -> None:
        for flat in flats:
            flat.count_versions()
        if self._gathering is not None:
            self._gathering.free_all()
            return
        for flat in flats:
            flat.start_gather()
        for flat in flats:
            flat.finish_gather()

    def no_sync(self) -> AbstractContextManager[None]:
        """Add up gradients on this rank in the backwards within; the first one outside reduces the sum.

        Meanwhile every rank has gradients of all parameters, in every stage. Without it, each backward reduces its
        gradients and adds them to those of this rank's part. ``zero_grad()`` of an attached optimizer drops the sum.
        """
        self._check_registered("no_sync")
        return self._gradients.no_sync()

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients so that the norm of those of all parameters together is at most ``max_norm``.

        Every rank calls it, between the backward and the step, in place of ``torch.nn.utils.clip_grad_norm_``, which
        would find no gradients in the model, and those of this rank's part in the optimizer.

        Args:
            max_norm: the largest norm.
            norm_type: the order, above 0, or ``math.inf``.

        Returns:
            The norm before, (), the same on every rank.

        Raises:
            ArgumentError: the order is not above 0, gradients wait for their reduction, or layers of the model are
                divided among ranks of other groups (tensor parallelism), whose gradients the norm would leave out.
        """
        call = "clip_grad_norm"
        self._check_registered(call)
        divided = [one for one in handles_of(self.model) if one.kind == LAYERS]
        if divided:
            raise ArgumentError(
                f"{call}: got a model whose layers {divided[0].call}() divides among ranks; the norm here is that of "
                "this rank's part of them, and would scale gradients differently on each rank: leave clipping out, or "
                "limit values with torch.nn.utils.clip_grad_value_ on the optimizer's tensors"
            )
        self._gradients.abandon_failed()
        if self._gradients.holds_gradients:
            raise ArgumentError(f"{call}: got called while gradients of no_sync() wait for their reduction")
        gradients = [one.grad for one in self._shards() if one.grad is not None and one.numel()]
        flats = self._trainable_flats
        norm = total_norm(call, gradients, norm_type, self.group, {flat.dtype for flat in flats}, flats[0].device)
        clip_to_norm(gradients, max_norm, norm)
        return norm

    def divided_tensors(self) -> Iterator[DividedTensor]:
        """Return the parameters of the model and the optimizer's tensors, with descriptions for messages."""
        for flat in self._trainable_flats:
            for name, one in zip(flat.names, flat.parameters, strict=True):
                yield f"parameter {name!r}", one, False
            for segment in flat.segments:
                name = flat.names[(*segment.positions, 0)[0]]
                yield f"the tensor of handle.parameter_groups() for {name!r}", segment.parameter, True

    def _shards(self) -> list[nn.Parameter]:
        return [segment.parameter for flat in self._trainable_flats for segment in flat.segments]

    # --- parameters and state

    @contextmanager
    def full_parameters(self, writes: bool = False) -> Iterator[None]:
        """Have all parameters on every rank within; every rank enters and leaves it.

        Args:
            writes: keep what is written to the parameters meanwhile, which has to be the same on every rank. In stages
                1 and 2, parameters are always there, and writes to them always kept.
        """
        self._check_registered("full_parameters")
        if self._gathering is None:
            yield
            return
        yield from self._gathering.opened(writes)

    def full_state_dict(self) -> dict[str, Any]:
        """Return ``model.state_dict()`` with whole parameters, as copies on the CPU; every rank calls it."""
        with self.full_parameters():
            return {
                name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
                for name, value in self.model.state_dict(keep_vars=True).items()
            }

    def state_dict(self, optimizer: Optimizer | None = None, prefix: str = "") -> dict[str, Any]:
        """Return this rank's part of the state, for ``torch.distributed.checkpoint`` to save or to load into.

        What is saved by W ranks can be loaded by any number of ranks, in any stage, with any size of buckets, or into
        ``{"model": model.state_dict()}`` of a model without hooks. Nothing is sent.

        Args:
            optimizer: None for the model alone.
            prefix: put before every name, such as ``"tensor1."`` or ``"stage0."``. A checkpoint has one tensor of a
                name, so ranks with other tensors under the same names need another prefix: the other ranks of tensor
                parallelism, and the other stages of a pipeline.

        Returns:
            ``"model"``, and ``"optimizer"`` where there is one.

        Raises:
            ArgumentError: layers of the model are divided among ranks (tensor parallelism), and there is no prefix; the
                optimizer has tensors of something else, or keeps state that is not by element.
            ArgumentTypeError: ``prefix`` is no string.
        """
        self._check_registered("state_dict")
        check_prefix("state_dict", prefix, self.model)
        state: dict[str, Any] = {"model": self._model_state(prefix)}
        if optimizer is not None:
            checked = check_optimizer("state_dict", optimizer, self._names, self._trainable_flats)
            state["optimizer"] = optimizer_state(checked, self._trainable_flats, prefix)
        return state

    def _model_state(self, prefix: str) -> dict[str, Any]:
        with nullcontext() if self._gathering is None else self._gathering.as_open():
            values = self.model.state_dict(keep_vars=True)
        return model_state(self.model, self._flats, values, prefix)

    def load_state_dict(self, state: Mapping[str, Any], optimizer: Optimizer | None = None, prefix: str = "") -> None:
        """Take over the state that :meth:`state_dict` returned and a checkpoint was loaded into; every rank calls it.

        Args:
            state: what ``torch.distributed.checkpoint.load`` was given, a copy of it, or ``{"model": ...}`` with whole
                tensors, as :meth:`full_state_dict` returns them. ``torch.save`` and ``copy.deepcopy`` make copies.
            optimizer: as for :meth:`state_dict`.
            prefix: the one that :meth:`state_dict` was given.

        Raises:
            ArgumentError: the state is that of other parameters or groups, of another prefix or of another number of
                ranks; layers of the model are divided among ranks, and there is no prefix.
            ArgumentTypeError: ``prefix`` is no string.
        """
        call = "load_state_dict"
        self._check_registered(call)
        check_prefix(call, prefix, self.model)
        check_names(state, self.model, prefix)
        write = None
        if "model" in state:
            write = checked_model_state(self.model, self._model_state(prefix), state["model"], prefix)
        if optimizer is not None:
            checked = check_optimizer(call, optimizer, self._names, self._trainable_flats)
            if "optimizer" not in state:
                raise ArgumentError(
                    f"{call}: state: got one without 'optimizer'; expected that of state_dict(optimizer)"
                )
            load_optimizer_state(checked, self._trainable_flats, state["optimizer"], prefix)
        if write is not None:
            write()
        self._gather(self._flats)

    def memory(self) -> MemoryUse:
        """Return the bytes that parameters, gradients and the state of attached optimizers take on this rank now."""
        parameters = [*self.model.parameters(), *self._shards()]
        gradients = [one.grad for one in parameters if one.grad is not None]
        kept = [
            value for optimizer in self._optimizers for values in optimizer.state.values() for value in values.values()
        ]
        return MemoryUse(
            storage_bytes([*parameters, *(one for flat in self._flats for one in flat.tensors())]),
            storage_bytes([*gradients, *self._gradients.tensors()]),
            storage_bytes(value for value in kept if isinstance(value, torch.Tensor)),
        )

    def remove(self) -> None:
        """Take the hooks off again and leave an ordinary model; every rank calls it. A second call does nothing.

        Raises:
            ArgumentError: a backward runs; gradients of :meth:`no_sync` wait for their reduction and would be lost;
                other hooks were registered on the same parameters later.
        """
        if self.is_registered:
            self._gradients.abandon_failed()
            if self._gradients.is_running:
                raise ArgumentError("remove: got called within a backward; expected it after the end of it")
            if self._gradients.holds_gradients:
                raise ArgumentError(
                    "remove: got called while gradients of no_sync() wait for their reduction, and would be lost; run "
                    "the last backward before it outside of no_sync()"
                )
        super().remove()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None and self.is_registered:
            self._gradients.abandon()  # the error is the one to report
        super().__exit__(kind, error, at)

    def _release(self) -> None:
        for flat in self._flats:
            if not flat.is_gathered:
                flat.start_gather()
        for flat in self._flats:
            flat.release()
        self._flats.clear()
        self._trainable_flats.clear()
