"""The table in docs/faults.md: for each cell what the survivors got, what it named, and when."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from faults.cells import BACKENDS, MOMENTS, Cell
from faults.record import Record, Told
from faults.table import FAULTS

__all__ = ["PAGE", "table", "write_page"]

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
_BEGIN, _END = "<!-- measured: begin -->", "<!-- measured: end -->"
Found = Mapping[Cell, tuple[Record, list[str]]]


def write_page(found: Found) -> None:
    """Put the table between the markers of the page.

    Raises:
        ValueError: the page has no markers.
    """
    text = PAGE.read_text()
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{PAGE} lacks the lines {_BEGIN} and {_END}")
    PAGE.write_text(f"{before}{begin}\n\n{table(found)}\n\n{end}{after}")


def table(found: Found) -> str:
    """Return the summary, the table of the default mode, that of strict checks, and why cells are missing."""
    met = sum(not problems for _, problems in found.values())
    parts = [f"{met} of {len(found)} cells meet the bar.", _rows(found, strict=False)]
    if any(cell.strict for cell in found):
        parts += ["With `checks.mismatch` set to `strict`:", _rows(found, strict=True)]
    parts += ["What happens in each row:", "\n".join(_meanings())]
    return "\n\n".join(parts)


def _rows(found: Found, strict: bool) -> str:
    names = [title for title, _, _ in BACKENDS.values()]
    lines = [f"| fault | moment | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    for fault, row in FAULTS.items():
        if strict and not row.mismatch:
            continue
        for moment in MOMENTS:
            cells = [Cell(fault, moment, backend, strict and backend != "shm") for backend in BACKENDS]
            texts = [_text(cell, found) for cell in cells]
            if any(text not in ("", "-") for text in texts):
                lines.append(f"| {row.title} | {moment} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _text(cell: Cell, found: Found) -> str:
    if cell.reason:
        return "-"
    if cell not in found:
        return ""
    record, problems = found[cell]
    culprit_counts = not cell.row.dies and cell.row.expects(cell.moment).culprit
    survivors = [told for told in record.ranks if culprit_counts or told.rank != cell.row.culprit]
    errors = [told.error for told in survivors if told.error is not None]
    if errors:
        kinds = sorted({f"`{error['kinds'][0]}`" for error in errors})
        seconds = [one for told in survivors if (one := record.seconds_of(told)) is not None]
        named = _named(cell, record, survivors)
        text = f"{', '.join(kinds)}: {named}; {max(0.0, max(seconds)):.1f} s"
    else:
        text = "results right"
    return text if not problems else f"**not met**: {text}"


def _named(cell: Cell, record: Record, survivors: list[Told]) -> str:
    """Say what the messages of all survivors that got an error name."""
    messages = [(told.error["message"], told.error["call"]) for told in survivors if told.error is not None]
    culprit = record.ranks[cell.row.culprit]
    parts = {
        f"rank {culprit.rank}": rf"\branks? {culprit.rank}\b",
        "its pid": rf"\bpid {culprit.pid}\b",
        "its host": r"\bon host-[ab]\b",
    }
    found = [part for part, pattern in parts.items() if all(re.search(pattern, message) for message, _ in messages)]
    if all(call in message for message, call in messages):
        found.append("the call")
    return ", ".join(found) or "nothing"


def _where(key: str) -> str:
    """Return the place of a cell that makes no sense: a moment, a backend, or both with a stroke between them."""
    parts = [f"on {BACKENDS[one][0]}" if one in BACKENDS else f"{one} a collective" for one in key.split("/")]
    return " ".join(parts)


def _meanings() -> Iterator[str]:
    for row in FAULTS.values():
        said = [row.what[moment] for moment in MOMENTS if moment not in row.unless]
        why = [f"No cell {_where(key)}: {reason}" for key, reason in row.unless.items()]
        text = f"- **{row.title}**: {' '.join((*said, *why))}"
        yield textwrap.fill(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
