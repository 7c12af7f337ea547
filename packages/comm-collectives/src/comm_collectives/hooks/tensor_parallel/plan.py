"""Plans: which modules of a model become parallel, and as what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown

__all__ = ["STYLES", "Placement", "resolve_plan"]

#: Styles, and the modules that each is for; None for any.
STYLES: dict[str, tuple[type[nn.Module], ...] | None] = {
    "column": (nn.Linear,),
    "column_gathered": (nn.Linear,),
    "row": (nn.Linear,),
    "vocabulary": (nn.Embedding, nn.Linear),
    "summed": None,
    "sequence": None,
    "sequence_scatter": None,
    "sequence_gather": None,
}
#: Styles that make sense only where the sequence is divided between layers.
_OF_SEQUENCES = ("sequence", "sequence_scatter", "sequence_gather")


@dataclass(frozen=True)
class Placement:
    """A module of the model, and what it becomes.

    Attributes:
        name: of the module in the model.
        module: itself.
        style: one of :data:`STYLES`.
        parts: number of weights of equal size that its weight holds one after the other, such as 3 for a projection to
            queries, keys and values.
    """

    name: str
    module: nn.Module
    style: str
    parts: int = 1


def resolve_plan(call: str, model: nn.Module, plan: Any, sequence_parallel: bool) -> list[Placement]:
    """Return what ``plan`` says about the modules of ``model``, in the model's order.

    Args:
        call: the user's call, for messages.
        model: whose modules are named.
        plan: styles by pattern of module names, as ``fnmatch`` has them; a style is a name of :data:`STYLES`, or a pair
            of a name and a number of parts.
        sequence_parallel: whether styles of sequence parallelism are allowed.

    Raises:
        ArgumentError: a pattern matches no module, two match one module, a style is unknown, or a module is no layer
            for its style.
    """
    if not isinstance(plan, Mapping) or not plan:
        raise ArgumentTypeError(
            f"{call}: plan: got {shown(plan)}; expected a dictionary such as {{'*.attention.qkv': 'column'}}"
        )
    modules = {name.removeprefix("_orig_mod."): module for name, module in model.named_modules()}
    found: dict[str, tuple[str, Placement]] = {}
    for pattern, given in plan.items():
        style, parts = _style(call, pattern, given, sequence_parallel)
        matching = [name for name in modules if fnmatchcase(name, pattern)]
        if not matching:
            raise ArgumentError(
                f"{call}: plan: pattern {pattern!r} matches no module; the model has "
                f"{shown([name for name in modules if name])}"
            )
        for name in matching:
            if name in found:
                raise ArgumentError(
                    f"{call}: plan: module {name!r} matches {found[name][0]!r} and {pattern!r}; expected one pattern"
                )
            _check_kind(call, name, modules[name], style)
            found[name] = pattern, Placement(name, modules[name], style, parts)
    return [found[name][1] for name in modules if name in found]


def _style(call: str, pattern: Any, given: Any, sequence_parallel: bool) -> tuple[str, int]:
    style, parts = given if isinstance(given, (tuple, list)) and len(given) == 2 else (given, 1)
    if not isinstance(style, str) or style not in STYLES:
        raise ArgumentError(f"{call}: plan[{pattern!r}]: got {shown(given)}; expected one of {', '.join(STYLES)}")
    if not isinstance(parts, int) or parts < 1 or (parts > 1 and not style.startswith("column")):
        raise ArgumentError(
            f"{call}: plan[{pattern!r}]: got {shown(given)}; expected a number of parts of 1 or more, for 'column' "
            "alone"
        )
    if style in _OF_SEQUENCES and not sequence_parallel:
        raise ArgumentError(
            f"{call}: plan[{pattern!r}]: got {style!r} without sequence parallelism; pass sequence_dim, the "
            "dimension of activations that is divided among the ranks"
        )
    return style, parts


def _check_kind(call: str, name: str, module: nn.Module, style: str) -> None:
    kinds = STYLES[style]
    # An embedding's or a linear layer's own subclasses may compute something else.
    if kinds is not None and type(module) not in kinds:
        expected = " or ".join(f"nn.{kind.__name__}" for kind in kinds)
        raise ArgumentError(
            f"{call}: plan: module {name!r} is a {type(module).__name__}; expected {expected} for {style!r}"
        )
    if isinstance(module, nn.Embedding):
        for option in ("max_norm", "scale_grad_by_freq"):
            if style == "vocabulary" and getattr(module, option):
                raise ArgumentError(
                    f"{call}: plan: module {name!r} has {option}, which needs the whole vocabulary on every rank; "
                    "expected an embedding without it"
                )
