"""Results as comma-separated values, for spreadsheets."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, fields

from comm_utils.atomic_write import replacing
from comm_utils.csv_cells import cell
from comm_utils.observability.bench_results import BenchResult

__all__ = ["write"]


def write(results: Sequence[BenchResult], path: str) -> None:
    """A line for each result, with the names of its fields above; rounds are separated by spaces.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path) as file:
        writer = csv.DictWriter(file, [one.name for one in fields(BenchResult)], lineterminator="\n")
        writer.writeheader()
        for one in results:
            cells = {**asdict(one), "rounds_us": " ".join(f"{time:.3f}" for time in one.rounds_us)}
            writer.writerow({name: cell(value) for name, value in cells.items()})
