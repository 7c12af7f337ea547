"""Tables for a terminal and for a page of Markdown."""

from __future__ import annotations

from measuring import Table

from training.results import Results, expected_bytes

__all__ = ["BEGIN", "tables"]

BEGIN = "<!-- begin: nox -s bench-training -- --write -->"


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def cell(found: tuple[float, float, float]) -> str:
    median, lower, upper = map(figure, found)
    return f"{median} ({lower} to {upper})"


def steps(results: Results) -> Table:
    lines = []
    for one in results.verdicts():
        ratio = f"{one.ratio:.3f} ({one.lower:.3f} to {one.upper:.3f})"
        met = f"**{one.met}**" if one.met == "missed" else one.met
        names = f"{one.comparison.ours.name} / {one.comparison.other.name}"
        limit = f"{one.comparison.most:g}"
        lines.append([names, f"{one.millions:g}", cell(one.ours_ms), cell(one.other_ms), ratio, limit, met])
    head = ["ours / other", "million parameters", "ours, ms a step", "other, ms a step", "ratio", "at most", ""]
    return Table("Time of a step", head, lines)


def memory(results: Results) -> Table:
    lines = []
    for (name, millions, ranks), one in results.memory.items():
        mib = 2**-20 * results.parameters[millions]
        lines.append(
            [
                name,
                str(ranks),
                f"{expected_bytes(name, ranks):.1f}",
                f"{one.between:.1f}",
                f"{one.most:.1f}",
                figure(one.between * mib),
                figure(one.most * mib),
            ]
        )
    head = ["", "ranks", "expected", "between steps", "at most", "between steps, MiB", "at most, MiB"]
    sizes = ", ".join(f"{millions:g}" for millions in dict.fromkeys(millions for _, millions, _ in results.memory))
    return Table(f"Memory of a rank, bytes for each parameter and in all, {sizes} million parameters", head, lines)


def overlap(results: Results) -> Table:
    head = ["million parameters", "calls a step", "from call to completion, ms a step", "hidden, ms", "hidden"]
    lines = [
        [
            f"{millions:g}",
            f"{one.calls:.1f}",
            figure(one.communication_ms),
            figure(one.hidden_ms),
            f"{100 * one.share:.0f} %",
        ]
        for millions, one in results.overlap.items()
    ]
    return Table("Communication of the data-parallel hooks behind backward, 2 ranks", head, lines)


def tables(results: Results) -> list[Table]:
    """Those that something was measured for."""
    made = ((results.rounds, steps), (results.memory, memory), (results.overlap, overlap))
    return [make(results) for measured, make in made if measured]
