"""A cell of the matrix: a fault, the moment at which it happens, the backend, and the mode of checking."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from faults.table import FAULTS, Fault

__all__ = ["BACKENDS", "MOMENTS", "Cell", "cells_to_run", "every_cell", "parse", "tenth"]

MOMENTS = ("before", "during", "after")
#: Name in a cell -> how tables call it, argument of ``init_distributed``, environment.
BACKENDS: dict[str, tuple[str, str, dict[str, str]]] = {
    "gloo": ("gloo", "gloo", {}),
    "oneccl": ("oneCCL", "ccl", {"CCL_SHARED_MEMORY": "0"}),
    "shm": ("shared memory", "ccl", {"CCL_SHARED_MEMORY": "1"}),
}
#: Shared memory is strict by default.
_STRICT_ANYWAY = "shm"
_PARTS = 10


@dataclass(frozen=True)
class Cell:
    """One combination; ``strict`` asks for it by configuration, else the default of the backend holds."""

    fault: str
    moment: str
    backend: str
    strict: bool = False

    def __str__(self) -> str:
        return "/".join((self.fault, self.moment, self.backend, *(["strict"] if self.strict else [])))

    @property
    def row(self) -> Fault:
        """The fault."""
        return FAULTS[self.fault]

    @property
    def prevents(self) -> bool:
        """True where mismatches are found before any data moves."""
        return self.strict or self.backend == _STRICT_ANYWAY

    @property
    def reason(self) -> str:
        """Return why this combination makes no sense, or nothing."""
        unless = self.row.unless
        both = f"{self.moment}/{self.backend}"
        return unless.get(self.moment, "") or unless.get(self.backend, "") or unless.get(both, "")

    @property
    def what(self) -> str:
        """Return what happens in this cell, as a sentence."""
        return self.row.what[self.moment]


def every_cell() -> Iterator[Cell]:
    """Yield all combinations, also those that make no sense; mismatches twice where the default is not strict."""
    for fault, row in FAULTS.items():
        for moment in MOMENTS:
            for backend in BACKENDS:
                yield Cell(fault, moment, backend)
                if row.mismatch and backend != _STRICT_ANYWAY:
                    yield Cell(fault, moment, backend, strict=True)


def cells_to_run() -> list[Cell]:
    """Return the combinations that make sense."""
    return [cell for cell in every_cell() if not cell.reason]


def _may_not_start(cell: Cell) -> bool:
    return cell.row.hosts > 1 and cell.backend == "oneccl"


def tenth(seed: int) -> list[Cell]:
    """Return every tenth cell, the first of them by the seed: ten consecutive seeds run all of them once.

    Without those on oneCCL between two hosts, as it does not always start between two network namespaces.
    """
    mixed: list[Cell] = []
    for fault in FAULTS:
        row = [cell for cell in cells_to_run() if cell.fault == fault and not _may_not_start(cell)]
        random.Random(fault).shuffle(row)
        mixed += row
    return mixed[seed % _PARTS :: _PARTS]


def parse(text: str) -> Cell:
    """Return the cell of a name such as ``sigkill/during/gloo`` or ``wrong-op/after/gloo/strict``.

    Raises:
        ValueError: there is no such cell, or it makes no sense; says why.
    """
    found = {str(cell): cell for cell in every_cell()}
    if text not in found:
        raise ValueError(f"got the cell {text!r}; expected FAULT/MOMENT/BACKEND[/strict], such as {next(iter(found))}")
    if found[text].reason:
        raise ValueError(f"{text} is not run: {found[text].reason}")
    return found[text]
