"""Hooks that make plain modules tensor parallel in place, by a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from comm_collectives.annotations import Group
from comm_collectives.groups import get_process_group_ranks, get_rank
from comm_collectives.hooks.group_arguments import group_along
from comm_collectives.hooks.handle import LAYERS, Handle, check_module, check_unregistered, handles_of
from comm_collectives.hooks.model_agreement import check_on_all_ranks
from comm_collectives.hooks.model_hook import ModelHook
from comm_collectives.hooks.sharded.gradient_norm import clip_to_norm, total_norm
from comm_collectives.hooks.sharded.handle import Sharded
from comm_collectives.hooks.sharded.refuse_clipping import DividedTensor, refuse_clipping
from comm_collectives.hooks.tensor_parallel import layers
from comm_collectives.hooks.tensor_parallel.plan import Placement, resolve_plan
from comm_collectives.hooks.tensor_parallel.replicas import difference_of_replicas
from comm_collectives.hooks.tensor_parallel.sequence import sum_gradients
from comm_collectives.hooks.tensor_parallel.sharding import Shard, check_shard, replace_data
from comm_utils.errors import ArgumentError, ArgumentTypeError, CollectiveMismatchError
from comm_utils.given import shown
from comm_utils.group_names import group_text
from comm_utils.log import logger

__all__ = ["ModelParallel", "register_model_parallel_hooks"]

_CALL = "register_model_parallel_hooks"
#: Styles whose parameters stay whole, and whose gradients are summed over the group.
_SUMMED = ("sequence", "summed")


class ModelParallel(Handle):
    """The hooks of a tensor-parallel model; made by :func:`register_model_parallel_hooks`.

    Attributes:
        group: the tensor-parallel group.
        shards: the parameters of which each rank has a part.
    """

    def __init__(
        self, model: nn.Module, placements: list[Placement], shards: list[Shard], group: Group, sequence_dim: int | None
    ) -> None:
        super().__init__(_CALL, model, dict(model.named_parameters()), LAYERS)
        self.group, self.shards = group, shards
        self.divided = [one.parameter for one in shards]
        self.divided_over = get_process_group_ranks(group)
        summed = _summed_parameters(placements, sequence_dim is not None)
        self._summed = [one for one in summed.values() if one.requires_grad]
        self._frozen = {name: one for name, one in summed.items() if not one.requires_grad}
        self._difference: CollectiveMismatchError | None = None

        def check(module: nn.Module, inputs: Any) -> None:  # keeps this handle alive
            if summed:
                self._check_gradients(module)

        # A graph ends at the check.
        hook = cast("Any", torch.compiler.disable)(check) if summed else check
        self.on_removal(model.register_forward_pre_hook(ModelHook(hook, _CALL)).remove)
        self.on_removal(self._restore)
        for shard in shards:
            replace_data(shard.parameter, shard.part_of(shard.parameter, group))
        for one in placements:
            for undo in _add(one, group, sequence_dim):
                self.on_removal(undo)
        for summing in sum_gradients(self._summed, group):
            self.on_removal(summing.remove)
        self.on_removal(refuse_clipping(self))

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state of the model with whole parameters, on every rank; called by all ranks of the group.

        Returns:
            Tensors by name, as ``state_dict()`` of the model without hooks has them; sharded ones in new memory.

        Raises:
            CollectiveMismatchError: a parameter that is not divided differs between the ranks by more than rounding;
                names it, and the style that it may need.
        """
        by_id = {id(one.parameter): one for one in self.shards}
        full: dict[str, torch.Tensor] = {}
        gathered: dict[int, torch.Tensor] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            shard = by_id.get(id(tensor))
            if shard is not None and id(tensor) not in gathered:
                gathered[id(tensor)] = shard.whole(tensor, self.group)
            full[name] = gathered[id(tensor)] if shard is not None else tensor.detach()
        difference = difference_of_replicas("full_state_dict", self._replicas(full), self.group)
        if difference is not None:
            raise difference
        return full

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load whole parameters; each rank keeps its parts. The inverse of :meth:`full_state_dict`.

        Args:
            state: tensors by name with their full shapes, the same on every rank; only read.
        """
        by_id = {id(one.parameter): one for one in self.shards}
        own = {
            name: by_id[id(tensor)].part_of(state[name], self.group)
            if id(tensor) in by_id and name in state
            else state[name]
            for name, tensor in self.model.state_dict(keep_vars=True).items()
            if name in state
        }
        self.model.load_state_dict({**state, **own})

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients so that the norm of those of all parameters together is at most ``max_norm``.

        Every rank of the group calls it, between the backward and the step, in place of
        ``torch.nn.utils.clip_grad_norm_``, which would take the norm of this rank's part. The parts of divided
        parameters count together, and a parameter that every rank holds counts once.

        Args:
            max_norm: the largest norm; ``math.inf`` to get the norm alone.
            norm_type: the order, above 0, or ``math.inf``.

        Returns:
            The norm before, (), the same on every rank of the group.

        Raises:
            ArgumentError: the order is not above 0, the hooks were removed, or the model has sharded hooks, so that
                its parameters have no gradients.
        """
        call = "clip_grad_norm"
        if not self.is_registered:
            raise ArgumentError(
                f"{call}: got called after remove(); parameters are whole again, so call "
                "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)"
            )
        if any(isinstance(one, Sharded) for one in handles_of(self.model)):
            raise ArgumentError(
                f"{call}: got a model with the hooks of register_sharded_hooks() as well, whose gradients are those of "
                "the optimizer's tensors; leave clipping out, or limit values with torch.nn.utils.clip_grad_value_ on "
                "these tensors"
            )
        parameters = [one for one in self.model.parameters() if one.requires_grad]
        gradients = [one.grad for one in parameters if one.grad is not None]
        divided = {id(one.grad) for one in self.divided if one.grad is not None}
        counted = [one for one in gradients if id(one) in divided or not get_rank(self.group)]
        device = parameters[0].device if parameters else torch.device("cpu")
        norm = total_norm(call, counted, norm_type, self.group, {one.dtype for one in parameters}, device)
        clip_to_norm(gradients, max_norm, norm)
        return norm

    def divided_tensors(self) -> Iterator[DividedTensor]:
        """Return the parameters of which each rank has a part, with descriptions for messages."""
        for shard in self.shards:
            yield f"parameter {shard.name!r}", shard.parameter, True

    def remove(self) -> None:
        """Restore whole parameters and take the hooks off again; called by all ranks of the group.

        Raises:
            ArgumentError: other hooks were registered on the same parameters later; remove these first.
            CollectiveMismatchError: as :meth:`full_state_dict`; the hooks are removed.
        """
        super().remove()
        difference, self._difference = self._difference, None
        if difference is not None:
            raise difference

    def _replicas(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return those of ``tensors`` that are parameters of which every rank has the whole."""
        divided = set(map(id, self.divided))
        # A module's own state_dict() may leave parameters out.
        return {
            name: tensors[name] for name, one in self.parameters.items() if id(one) not in divided and name in tensors
        }

    def _check_gradients(self, module: nn.Module) -> None:
        """Check that all gradients that have to be summed over the group will be."""
        if not torch.is_grad_enabled():
            return
        if module is not self.model and self._summed:
            raise ArgumentError(
                "forward: got called with gradients on a copy of a model with sequence parallelism or the style "
                "'summed', and the hooks that sum gradients over the group are not copied; run the copy within "
                f"torch.no_grad(), or copy the model before {_CALL}()"
            )
        for name, one in self._frozen.items():
            if one.requires_grad:
                raise ArgumentError(
                    f"forward: parameter {name!r} requires a gradient, which it did not when the hooks were "
                    "registered, so nothing sums it over the group: remove() the hooks and register them again"
                )

    def _restore(self) -> None:
        self._difference = difference_of_replicas("remove", self._replicas(self.parameters), self.group)
        for shard in self.shards:
            replace_data(shard.parameter, shard.whole(shard.parameter, self.group))


def register_model_parallel_hooks(
    module: nn.Module, groups: Any = None, plan: Mapping[str, Any] | None = None, *, sequence_dim: int | None = None
) -> ModelParallel:
    """Divide layers of ``module`` among the ranks of a tensor-parallel group, in place, by ``plan``.

    Styles of a plan (Shoeybi et al., 2019, section 3; Korthikanti et al., 2022, section 4.2):

    - "column": a linear layer whose output features are divided. Its output stays divided.
    - "column_gathered": likewise, and every rank gets the whole output.
    - "row": a linear layer whose input features are divided, as a column-parallel layer leaves them. Outputs are
      summed.
    - "vocabulary": an embedding whose rows are divided; of a linear layer the same as "column".
    - "summed": a module between a column- and a row-parallel layer, such as the norms of queries and keys of each
      head, that sees what this rank's part of the layers computes. Its parameters stay whole, and their gradients are
      summed over the group.
    - "sequence": a module between the layers, such as a norm, that sees this rank's part of the sequence. Its
      parameters stay whole, and their gradients are summed over the group.
    - "sequence_scatter": each rank keeps its part of the sequence of what the module returns.
    - "sequence_gather": every rank gets the whole sequence of what the module returns.

    Args:
        module: the same on every rank; its parameters are overwritten with this rank's parts. Optimizers are made
            later.
        groups: ``ParallelGroups``, a ``DeviceMesh``, or the tensor-parallel process group; None is the world group.
        plan: styles by pattern of module names (``fnmatch``); ``("column", 3)`` is for a weight that holds three,
            such as those of queries, keys and values.
        sequence_dim: the dimension of activations along which the sequence is divided between layers; None for whole
            sequences (no sequence parallelism).

    Returns:
        A handle, whose ``remove()`` restores whole parameters, on all ranks together.

    Raises:
        ArgumentError: the plan does not fit the model, or the group's size does not divide a layer; names the module.
        CollectiveMismatchError: ranks have different models or plans; names the rank and the first difference.
    """
    found: tuple[list[Placement], list[Shard]] = ([], [])
    group = group_along(_CALL, "groups", groups, "tensor")

    def prepare() -> tuple[Mapping[str, torch.Tensor], Mapping[str, object]]:
        nonlocal found
        found = _prepare(module, plan, sequence_dim, group)
        settings = {"plan": [(one.name, one.style, one.parts) for one in found[0]], "sequence_dim": sequence_dim}
        return dict(module.named_parameters()), settings

    check_on_all_ranks(_CALL, prepare, group)
    handle = ModelParallel(module, *found, group, sequence_dim)
    if get_rank(group) == 0:
        logger.info(
            "%s: divided %d parameters over %s",
            _CALL,
            len(handle.shards),
            group_text(get_process_group_ranks(group), getattr(group, "group_desc", "")),
        )
    return handle


def _prepare(model: Any, plan: Any, sequence_dim: Any, group: Group) -> tuple[list[Placement], list[Shard]]:
    check_module(_CALL, model)
    if sequence_dim is not None and (not isinstance(sequence_dim, int) or isinstance(sequence_dim, bool)):
        raise ArgumentTypeError(f"{_CALL}: sequence_dim: got {shown(sequence_dim)}; expected an integer, or None")
    parameters = dict(model.named_parameters())
    check_unregistered(_CALL, parameters, ("gradients", LAYERS))
    for name, parameter in parameters.items():
        if nn.parameter.is_lazy(parameter) or parameter.is_meta:
            raise ArgumentTypeError(
                f"{_CALL}: module: parameter {name!r} has no elements yet; initialize the model before registering "
                "hooks"
            )
    placements = resolve_plan(_CALL, model, plan, sequence_dim is not None)
    shards: dict[int, Shard] = {}
    for one in placements:
        for shard in _shards(one):
            known = shards.setdefault(id(shard.parameter), shard)
            if (known.dim, known.parts) != (shard.dim, shard.parts):
                raise ArgumentError(
                    f"{_CALL}: plan: {shard.name!r} is also {known.name!r}, which is divided along dimension "
                    f"{known.dim}; expected the same for both, not dimension {shard.dim}"
                )
            check_shard(_CALL, shard, group)
    _check_tied(model, placements, shards)
    _check_summed(placements, shards)
    return placements, list(shards.values())


def _check_tied(model: nn.Module, placements: list[Placement], shards: Mapping[int, Shard]) -> None:
    """Check that no other module uses a parameter that is divided."""
    planned = {id(one.module) for one in placements}
    for name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            if id(parameter) in shards and id(module) not in planned:
                raise ArgumentError(
                    f"{_CALL}: plan: {name}.{attribute} is {shards[id(parameter)].name!r}, which is divided; give "
                    f"{name!r} a style as well, such as 'vocabulary'"
                )


def _check_summed(placements: list[Placement], shards: Mapping[int, Shard]) -> None:
    """Check that parameters whose gradients are summed are whole on every rank."""
    for one in placements:
        for parameter in one.module.parameters() if one.style in _SUMMED else ():
            if id(parameter) in shards:
                divided = shards[id(parameter)].name
                raise ArgumentError(
                    f"{_CALL}: plan: module {one.name!r} is {one.style!r} and has {divided!r}, which is divided; "
                    "expected modules without divided layers, such as the norms in it"
                )


def _shards(one: Placement) -> list[Shard]:
    """Return the parameters of a module that its style divides."""
    module: Any = one.module
    if one.style.startswith("column") or one.style == "vocabulary":
        names, dim = ["weight", "bias"], 0
    elif one.style == "row":
        names, dim = ["weight"], 1
    else:
        return []
    found = {name: getattr(module, name, None) for name in names}
    return [
        Shard(f"{one.name}.{name}", parameter, dim, one.parts)
        for name, parameter in found.items()
        if parameter is not None
    ]


def _add(one: Placement, group: Group, sequence_dim: int | None) -> list[layers.Undo]:
    module: Any = one.module
    if one.style == "row":
        return layers.add_row(module, group, sequence_dim)
    if isinstance(module, nn.Embedding) and one.style == "vocabulary":
        return layers.add_vocabulary(module, group, sequence_dim)
    if one.style.startswith("column") or one.style == "vocabulary":
        return layers.add_column(module, group, sequence_dim, one.style == "column_gathered")
    if sequence_dim is not None and one.style in ("sequence_scatter", "sequence_gather"):
        add = layers.add_scatter if one.style == "sequence_scatter" else layers.add_gather
        return add(module, group, sequence_dim)
    return []


def _summed_parameters(placements: list[Placement], by_sequence: bool) -> dict[str, torch.Tensor]:
    """Return the parameters of whose gradients each rank computes a term, each once, by name.

    Args:
        placements: of the plan.
        by_sequence: whether the sequence is divided between layers, so that a row-parallel layer adds its bias to a
            part of it.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for one in placements:
        if one.style not in _SUMMED and not (one.style == "row" and by_sequence):
            continue
        for name, parameter in one.module.named_parameters(one.name):
            if one.style in _SUMMED or parameter is one.module.bias:
                found.setdefault(id(parameter), (name, parameter))
    return dict(found.values())
