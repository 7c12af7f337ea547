"""What all launchers have in common: they turn a program and a number of ranks into commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launchers.processes import Command, Finished, run


@dataclass(frozen=True)
class Launcher:
    """A way to start ranks.

    ``commands(program, ranks)`` are to be run at once, and start as many ranks in all; ``program`` is a command line.
    """

    name: str
    commands: Callable[[Sequence[str], int], list[Command]]

    def run(
        self,
        program: Sequence[str],
        ranks: int,
        environment: Mapping[str, str] | None = None,
        deadline_s: float = 120,
    ) -> list[Finished]:
        """Start ``program`` on ``ranks`` ranks, with ``environment`` added to that of each; return when all ended."""
        more = environment or {}
        commands = [replace(one, environment={**one.environment, **more}) for one in self.commands(program, ranks)]
        return run(commands, deadline_s)


def reports(finished: Sequence[Finished]) -> list[dict[str, Any]]:
    """What ranks that all ended well said, ordered by rank: a JSON object each, with their ``rank``."""
    whole = "\n\n".join(map(str, finished))
    assert all(one.returncode == 0 for one in finished), whole
    found = [report for one in finished for line in one.stdout.splitlines() for report in _objects(line)]
    return sorted(found, key=lambda report: int(report["rank"]))


def _objects(line: str) -> Iterator[dict[str, Any]]:
    """The objects in a line; a launcher that merges what its ranks write may put two into one."""
    decoder, position = json.JSONDecoder(), line.find("{")
    while position >= 0:
        report, end = decoder.raw_decode(line, position)
        yield report
        position = line.find("{", end)
