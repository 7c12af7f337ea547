"""Parameters of a module that another module reads, such as the weight of a tied output layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from comm_collectives.hooks.sharded.units import Unit

__all__ = ["WatchedParameters", "watch_parameters"]


class WatchedParameters(dict[str, "nn.Parameter | None"]):
    """A module's parameters by name, which announces that a freed one is read.

    Args:
        parameters: those of the module.
        units: what each of them belongs to, by name.
        on_access: called with the unit of a freed parameter before the parameter is returned.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter | None],
        units: Mapping[str, Unit],
        on_access: Callable[[Unit], None],
    ) -> None:
        super().__init__(parameters)
        self._units, self._on_access = dict(units), on_access

    def __reduce__(self) -> tuple[type[dict[str, nn.Parameter | None]], tuple[dict[str, nn.Parameter | None]]]:
        """Copy the parameters alone: those of a copy belong to no unit."""
        return dict, (dict(self),)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        unit = self._units.get(name)
        if unit is not None and not unit.is_gathered():
            self._on_access(unit)
        return super().__getitem__(name)


def watch_parameters(
    module: nn.Module, unit_of: Mapping[int, Unit], on_access: Callable[[Unit], None]
) -> Callable[[], None]:
    """Announce reads of freed parameters of ``module`` as its attributes; return what ends this.

    Args:
        unit_of: units by the ``id`` of their parameters.
        on_access: as for :class:`WatchedParameters`.
    """
    before = module._parameters
    units = {name: unit_of[id(one)] for name, one in before.items() if one is not None and id(one) in unit_of}
    module._parameters = WatchedParameters(before, units, on_access)

    def undo() -> None:
        # What was added or removed meanwhile stays so.
        module._parameters = type(before)(module._parameters)

    return undo
