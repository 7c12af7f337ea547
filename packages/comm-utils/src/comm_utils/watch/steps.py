"""Groups in which the calls on another group go in steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["Steps"]


class Steps:
    """The names of these groups, by the name of the group; steps may have steps of their own."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, ...]] = {}

    def add(self, group: str, steps: Sequence[str]) -> None:
        """Add to the steps of ``group``; forget all of them where there are none."""
        if steps:
            known = self._of.get(group, ())
            self._of[group] = (*known, *(one for one in steps if one not in known))
        else:
            self._of.pop(group, None)

    def whole(self, group: str) -> str:
        """Return the group whose calls go in steps in ``group``; that itself where it was not made for steps."""
        parent = next((one for one, steps in list(self._of.items()) if group in steps), None)
        return group if parent is None else self.whole(parent)

    def below(self, group: str) -> Iterator[str]:
        """Yield the steps of ``group``, and theirs."""
        for step in self._of.get(group, ()):
            yield step
            yield from self.below(step)
