"""Tables for a terminal and for a page of Markdown, and the plot."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import MIB, Table, judged, named, put_between

from peers.results import Results, Verdict
from peers.tasks import MEMORIES, TRAINING, Task

__all__ = ["draw", "rewrite", "tables", "targets_table"]

BEGIN, END = "<!-- begin: nox -s bench-peers -- --write -->", "<!-- end -->"
#: What is drawn below the others.
UNDER = "ours, inference"
# A colour and a mark for each, so that a row looks alike in every plot.
STYLES = {
    "ours": ("#c0392b", "o"),
    "ours, inference": ("#e67e22", "o"),
    "ours, shared": ("#8e44ad", "D"),
    "oneCCL": ("#2980b9", "s"),
    "Open MPI": ("#27ae60", "^"),
    "MPICH": ("#16a085", "v"),
    "Intel MPI": ("#2c3e50", "P"),
    "DeepSpeed": ("#7f8c8d", "X"),
    "gloo": ("#bdc3c7", "*"),
}


def figure(value_us: float | None) -> str:
    if value_us is None:
        return ""
    return f"{value_us:,.0f}" if value_us >= 1000 else f"{value_us:.1f}" if value_us >= 10 else f"{value_us:.2f}"


def cell(results: Results, task: Task, name: str) -> str:
    median_us = results.median_us(task, name)
    if median_us is None:
        return "-"
    return f"{figure(median_us)} ({figure(results.min_us(task, name))})"


def collective(results: Results, title: str, tasks: Sequence[Task], label: str) -> Table:
    """A line for each task, a column for each peer; last how many times our time the fastest peer takes."""
    names = results.rows(tasks)
    peers = [name for name in names if not name.startswith("ours") and "," not in name]
    lines = []
    for task in tasks:
        ours_us, fastest = results.median_us(task, "ours"), results.fastest(task, peers)
        ratio = "-"
        if ours_us and fastest:
            lower = results.lower_ratio(task, "ours", fastest[1])
            bracket = "" if lower is None else f" ({lower:.2f})"
            ratio = f"{fastest[0] / ours_us:.2f}{bracket} {fastest[1]}"
        first = task.operation if label == "operation" else task.dtype if label == "type" else ""
        first = " ".join(filter(None, (first, named(task.size_bytes))))
        lines.append([first, *(cell(results, task, name) for name in names), ratio])
    return Table(title, [label, *names, "fastest peer / ours"], lines)


def training(results: Results) -> Table | None:
    lines = []
    for operation in (one for one in TRAINING if not one.endswith("_alone")):
        task, alone = Task(2, operation, 0), Task(2, f"{operation}_alone", 0)
        for name in results.rows([task]):
            both_us, alone_us = results.median_us(task, name), results.median_us(alone, name)
            share = f"{100 * (1 - alone_us / both_us):.0f} %" if both_us and alone_us else "-"
            lines.append([operation, name, cell(results, task, name), cell(results, alone, name), share])
    head = ["", "on", "in all", "without communication", "share of communication"]
    return Table("Training and inference, float32, 2 ranks", head, lines) if lines else None


def tables(results: Results) -> list[Table]:
    found: list[Table] = []
    for memory in MEMORIES:
        some = [task for task in results.times_us if task.memory == memory and task.operation not in TRAINING]
        sums = [task for task in some if task.operation == "all_reduce"]
        plain = [one for one in sums if one.ranks == 2 and one.dtype == "float32"]
        for title, label, tasks in (
            ("all_reduce, float32, 2 ranks", "size", plain),
            ("Other collectives, float32, 2 ranks", "operation", [one for one in some if one not in sums]),
            ("all_reduce, 16-bit types, 2 ranks", "type", [one for one in sums if one.dtype != "float32"]),
            ("all_reduce, float32, 4 ranks on 2 cores", "size", [one for one in sums if one.ranks == 4]),
        ):
            if tasks:
                found.append(collective(results, f"{title}, {memory}", tasks, label))
    if (last := training(results)) is not None:
        found.append(last)
    return found


def targets_table(verdicts: Sequence[Verdict]) -> Table:
    lines = []
    for one in verdicts:
        text = one.target.text if one.target.must else f"*to reach for:* {one.target.text}"
        if one.task is None or one.got_us is None or one.bound_us is None:
            lines.append([text, "not measured", "", "", ""])
            continue
        where = f"{named(one.task.size_bytes)} {one.task.memory}" + (f", {one.beside}" if one.beside else "")
        met = judged(bool(one.met))
        if one.measured < len(one.target.tasks):
            met += " where measured"
        lines.append([text, where, figure(one.got_us), figure(one.bound_us), f"{one.lower:.2f}", met])
    head = ["target, beside the fastest peer", "at, beside", "µs", "at most µs", "ratio, lower end", ""]
    return Table("Targets, each where it is hardest", head, lines)


def rewrite(page: Path, machine: str, generated: str, begin: str = BEGIN) -> None:
    """Replace the section of ``machine`` between the marks of a page, or add it after the others.

    Raises:
        SystemExit: the page has no such marks.
    """

    def merged(between: str) -> str:
        sections = {}
        for section in re.split(r"^### ", between, flags=re.MULTILINE)[1:]:
            heading, _, text = section.partition("\n")
            sections[heading.strip()] = text.strip()
        sections[machine] = generated.strip()
        return "".join(f"\n### {heading}\n\n{text}\n" for heading, text in sections.items()) + "\n"

    put_between(page, begin, END, merged)


def draw(results: Results, path: Path) -> None:
    """Time against size of all_reduce, and the other collectives beside one another, as SVG."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("svg")
    # Text stays text, and the same numbers give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "peers", "font.size": 9})
    plot: Any = importlib.import_module("matplotlib.pyplot")
    canvas, (left, right) = plot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")

    tasks = [task for task in results.times_us if task == Task(2, "all_reduce", task.size_bytes, memory=task.memory)]
    memory = MEMORIES[0] if any(task.memory == MEMORIES[0] for task in tasks) else MEMORIES[-1]
    tasks = [task for task in tasks if task.memory == memory]
    tasks.sort(key=lambda task: task.size_bytes)
    for name, (colour, mark) in STYLES.items():
        points = [(task.size_bytes, us) for task in tasks if (us := results.median_us(task, name)) is not None]
        if points:
            style: dict[str, Any] = {"linewidth": 2 if name.startswith("ours") else 1, "markersize": 4}
            if name == UNDER:
                # Often equal to "ours": a wider line and larger marks, which show around those.
                style = {"linewidth": 5, "markersize": 9, "alpha": 0.6, "zorder": 1.5}
            left.loglog(*zip(*points, strict=True), color=colour, marker=mark, label=name, **style)
    left.set_xscale("log", base=2)
    left.set_xticks([task.size_bytes for task in tasks], [named(task.size_bytes) for task in tasks], rotation=45)
    left.minorticks_off()
    left.set(
        title=f"all_reduce, float32, 2 ranks, {memory}", xlabel="size of the tensor", ylabel="median time of a call, µs"
    )
    left.grid(alpha=0.3)
    left.legend()

    largest = [one for one in results.times_us if one.operation not in ("all_reduce", *TRAINING)]
    largest = [one for one in largest if one.size_bytes == 64 * MIB and one.memory == memory]
    names = [name for name in STYLES if name in results.rows(largest)]
    for number, name in enumerate(names):
        heights = [(results.median_us(task, name) or 0.0) / 1000 for task in largest]
        at = [place + (number - (len(names) - 1) / 2) * 0.8 / len(names) for place in range(len(largest))]
        right.bar(at, heights, 0.8 / len(names), color=STYLES[name][0], label=name)
    right.set_xticks(range(len(largest)), [task.operation.replace("_tensor", "\n_tensor") for task in largest])
    right.set(title="64 MiB, float32, 2 ranks", ylabel="median time of a call, ms")
    right.set_axisbelow(True)
    right.grid(axis="y", alpha=0.3)
    canvas.savefig(path, metadata={"Date": None})
    plot.close(canvas)
