"""Remember which parameters of a model require gradients, which has to stay as it was when hooks were registered."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from comm_utils.errors import ArgumentError

__all__ = ["RequiredGradients"]


class RequiredGradients:
    """Remembers which of ``parameters`` require gradients now.

    Args:
        parameters: by their names in the model.
        consequence: of a gradient of another one, for messages.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], consequence: str) -> None:
        self._consequence = consequence
        named = [(name.removeprefix("_orig_mod."), one) for name, one in parameters.items()]
        self._frozen = [(name, one) for name, one in named if not one.requires_grad]
        self._trained = [(name, one) for name, one in named if one.requires_grad]

    def refuse_unfrozen(self, call: str) -> None:
        """Check that no other parameter requires a gradient.

        Args:
            call: the user's call, for messages.

        Raises:
            ArgumentError: names the parameter.
        """
        for name, one in self._frozen:
            if one.requires_grad:
                raise ArgumentError(
                    f"{call}: parameter {name!r} requires a gradient, which it did not when the hooks were registered, "
                    f"so {self._consequence}: remove() the hooks and register them again"
                )

    def refuse_changes(self) -> None:
        """Check that the same parameters require gradients; for a backward.

        Raises:
            ArgumentError: names the parameter.
        """
        self.refuse_unfrozen("backward")
        for name, one in self._trained:
            if not one.requires_grad:
                raise ArgumentError(
                    f"backward: parameter {name!r} no longer requires a gradient; expected what was so when the hooks "
                    "were registered: remove() the hooks and register them again"
                )
