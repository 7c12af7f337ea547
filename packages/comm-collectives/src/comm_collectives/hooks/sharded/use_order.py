"""The order in which a pass uses the units of a model, observed to foresee the next pass."""

from __future__ import annotations

from comm_collectives.hooks.sharded.units import Unit

__all__ = ["UseOrder"]


class UseOrder:
    """Records the uses of one pass, and compares them with those of the last one.

    A pass that differs from the last one is followed from the next place at which both agree.
    """

    def __init__(self) -> None:
        self.expected: list[Unit] = []
        self._seen: list[Unit] = []
        self._position = 0

    def begin(self) -> None:
        """Begin a pass."""
        self._seen = []
        self._position = 0

    def end(self) -> None:
        """Expect this pass the next time."""
        if self._seen:
            self.expected = self._seen
        self.begin()

    def use(self, unit: Unit) -> None:
        """Record that ``unit`` is used now."""
        self._seen.append(unit)
        place = self._position
        if place < len(self.expected) and self.expected[place] is unit:
            self._position = place + 1
        elif unit in self.expected[place:]:
            self._position = self.expected.index(unit, place) + 1

    def next(self) -> Unit | None:
        """Return the unit that is expected next; None where the pass is expected to end, or nothing is known."""
        return self.expected[self._position] if self._position < len(self.expected) else None

    def is_at_end(self) -> bool:
        """Return whether the pass is expected to use nothing more."""
        return bool(self.expected) and self._position >= len(self.expected)
