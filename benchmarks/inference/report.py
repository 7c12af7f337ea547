"""Tables for a terminal and for a page of Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from measuring import Table, judged

from inference.results import Results, Verdict

__all__ = ["BEGIN", "table", "targets_table"]

BEGIN = "<!-- begin: nox -s bench-inference -- --write -->"


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def cell(results: Results, name: str, measure: str, factor: float = 1.0) -> str:
    median, lower, upper = (factor * one for one in results.median(name, measure))
    return f"{figure(median)} ({figure(lower)} to {figure(upper)})"


def table(results: Results, title: str) -> Table:
    """A line for each variant: medians over rounds and, in brackets, their 95 % intervals."""
    lines = []
    for name in results.rounds:
        communicates = any(results.values(name, "communication_us"))
        columns = (("communication_us", 1.0), ("together_us", 1.0), ("share", 100.0))
        inside = [cell(results, name, *one) if communicates else "-" for one in columns]
        lines.append([name, cell(results, name, "tokens_per_s"), cell(results, name, "first_ms"), *inside])
    head = ["", "tokens/s", "first token, ms", "communication, µs a token", "after both have called, µs", "share, %"]
    return Table(title, head, lines)


def targets_table(verdicts: Sequence[Verdict]) -> Table:
    lines = []
    for one in verdicts:
        text = one.target.text if one.target.must else f"*beside:* {one.target.text}"
        if one.ratio is None:
            lines.append([text, "not measured", ""])
            continue
        lines.append([text, f"{one.ratio:.3f} ({one.lower:.3f} to {one.upper:.3f})", judged(bool(one.met))])
    return Table("Targets", ["target", "ratio of medians, ours to the other", ""], lines)
