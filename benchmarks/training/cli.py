"""The options, the rounds, and what is made of them."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from measuring import machine, output_file, positive, timed_run
from peers.catalogue import Peer
from peers.processes import Ranks, started
from peers.rank import CORES
from peers.report import rewrite

from training import report
from training.overlap import overlap_of
from training.results import Memory, Results, round_ms
from training.variants import COMPARISONS, MEMORY, OVERLAP, RANKS, SIZES, Comparison

__all__ = ["main"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"
PROGRAM = Path(__file__).with_name("__main__.py")
MEMORY_STEPS, TRACED_STEPS, WARM_UP_STEPS = 3, 5, 3
# Of a page.
COLUMNS = 120


def options_from(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time, memory and hidden communication of a step of training.")
    parser.add_argument("--rounds", type=positive, help="default: 11, or 3 with --quick")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and only the smallest sizes")
    parser.add_argument(
        "--parameters", type=float, nargs="+", choices=SIZES, metavar="MILLIONS", help="default: 1 20 100"
    )
    parser.add_argument(
        "--only", nargs="*", choices=COMPARISONS, metavar="COMPARISON", help=f"of: {'; '.join(COMPARISONS)}"
    )
    parser.add_argument("--memory", type=int, nargs="*", metavar="RANKS", help="default: 1 2 4")
    parser.add_argument("--memory-parameters", type=float, choices=SIZES, metavar="MILLIONS", help="default: 20")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="draw a step of the data-parallel hooks (SVG)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write everything to this file")
    parser.add_argument("--write", action="store_true", help="also write the section of this machine in docs")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 where a target is missed")
    options = parser.parse_args(arguments)
    defaults: dict[str, tuple[Any, Any]] = {
        "rounds": (11, 3),
        "parameters": ([1.0, 20.0, 100.0], [0.1]),
        "only": (list(COMPARISONS), list(COMPARISONS)),
        "memory": ([1, 2, 4], [1, 2]),
        "memory_parameters": (20.0, 1.0),
    }
    for name, (usual, quick) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else usual)
    if any(ranks < 1 for ranks in options.memory):
        parser.error("--memory: got a number below 1, expected at least 1")
    return options


def ask(ranks: Ranks, do: str, **arguments: Any) -> list[dict[str, Any]]:
    return ranks.ask({"do": do, **arguments})


def mean_loss(answers: Sequence[dict[str, Any]]) -> float:
    return float(sum(one["loss"] for one in answers)) / len(answers)


def check_parameters(ranks: Ranks, millions: float, number: int) -> None:
    """Compare the parameters that every rank has whole; ``number``: of the round, from 0.

    Raises:
        SystemExit: they differ, so gradients were not averaged.
    """
    answers = ask(ranks, "parameters")
    for rank, answer in enumerate(answers):
        if answer["parameters"] != answers[0]["parameters"]:
            raise SystemExit(
                f"{ranks.peer.name}, {millions:g} million parameters, round {number + 1}: rank {rank} got other "
                "parameters than rank 0, expected the same on all ranks"
            )


def compare(comparison: Comparison, results: Results, options: argparse.Namespace, note: Callable[[str], None]) -> None:
    """All rounds of all sizes: both variants train in turns, and each begins every second round.

    Raises:
        SystemExit: their losses differ by more than the comparison allows, or a variant's ranks have other parameters.
    """
    with started([comparison.ours, comparison.other], RANKS, {}, note, PROGRAM) as sets:
        if len(sets) < 2:
            return
        for millions in options.parameters:
            for one in sets:
                results.parameters[millions] = ask(one, "build", millions=millions)[0]["parameters"]
                ask(one, "train", steps=WARM_UP_STEPS)
            rounds: tuple[list[float], list[float]] = ([], [])
            for number in range(options.rounds):
                losses = [0.0, 0.0]
                for which in (number % 2, 1 - number % 2):
                    answers = ask(sets[which], "train", steps=SIZES[millions].steps)
                    rounds[which].append(round_ms(answers))
                    losses[which] = mean_loss(answers)
                for one in sets:
                    check_parameters(one, millions, number)
                if not abs(losses[0] - losses[1]) <= comparison.tolerance * losses[1]:
                    raise SystemExit(
                        f"{comparison.ours.name}, {millions:g} million parameters, round {number + 1}: got a loss of "
                        f"{losses[0]:.6f}, expected {losses[1]:.6f} as with {comparison.other.name}, "
                        f"to {comparison.tolerance:g} of it"
                    )
            results.rounds[comparison.name, millions] = rounds
            for one in sets:
                ask(one, "drop")


def measure_memory(peer: Peer, ranks: int, results: Results, millions: float, note: Callable[[str], None]) -> None:
    with started([peer], ranks, {}, note, PROGRAM) as sets:
        for one in sets:
            answers = ask(one, "memory", millions=millions, steps=MEMORY_STEPS)
            parameters = results.parameters[millions] = answers[0]["parameters"]
            between, most = (max(of[name] for of in answers) for name in ("between_bytes", "most_bytes"))
            results.memory[peer.name, millions, ranks] = Memory(between / parameters, most / parameters)


def measure_overlap(results: Results, options: argparse.Namespace, note: Callable[[str], None]) -> None:
    """Record steps of the data-parallel hooks; draw them where that is asked for."""
    with started([OVERLAP], RANKS, {}, note, PROGRAM) as sets, tempfile.TemporaryDirectory() as folder:
        for one in sets:
            for millions in options.parameters:
                trace = Path(folder, f"{millions:g}")
                results.parameters[millions] = ask(one, "build", millions=millions)[0]["parameters"]
                ask(one, "train", steps=WARM_UP_STEPS)
                ask(one, "trace", folder=str(trace), steps=TRACED_STEPS)
                results.overlap[millions] = overlap_of(trace, TRACED_STEPS)
                ask(one, "drop")
            if options.timeline:
                draw(trace, options.timeline)


def draw(trace: Path, file: Path) -> None:
    command = [str(Path(sys.executable).with_name("commctl")), "trace", "plot", str(trace), "-o", str(file)]
    subprocess.run([*command, "--kind", "timeline"], check=True)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": version("torch")}
    try:
        return {**found, "deepspeed": version("deepspeed")}
    except PackageNotFoundError:
        return found


def generated(options: argparse.Namespace, results: Results, notes: Sequence[str]) -> str:
    """The part of the page that is written by this program."""
    found, of = machine(), versions()
    facts = (
        f"Measured on {CORES} of {found['cores']} cores, Linux {found['kernel']}, Python {of['python']}, torch "
        f"{of['torch']}, DeepSpeed {of.get('deepspeed', 'not installed')}, {options.rounds} rounds. Medians over the "
        "rounds, in brackets their 95 % intervals."
    )
    parts = [textwrap.fill(facts, COLUMNS), *(table.markdown() for table in report.tables(results))]
    if notes:
        lines = (textwrap.fill(f"- {note}", COLUMNS, subsequent_indent="  ") for note in notes)
        parts.append("\n".join(("Notes of this run:\n", *lines)))
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_from(arguments)
    results = Results()
    with timed_run(CORES) as timed:
        for name in options.only:
            compare(COMPARISONS[name], results, options, timed.note)
        for peer, *_ in MEMORY:
            for ranks in options.memory:
                measure_memory(peer, ranks, results, options.memory_parameters, timed.note)
        if "ddp" in options.only or options.timeline:
            measure_overlap(results, options, timed.note)

    print(f"median of {options.rounds} rounds (95 % interval)")
    for table in report.tables(results):
        print(table.text())
    print(f"measured in {timed.wall_s:.0f} s")
    if options.json:
        given = {key: value for key, value in vars(options).items() if key not in ("json", "timeline")}
        found = {"versions": versions(), "machine": machine(), "options": given, **vars(timed)}
        options.json.write_text(json.dumps({**found, **results.to_json()}, indent=1) + "\n")
    if options.write:
        rewrite(PAGE, machine()["processor"], generated(options, results, timed.notes), report.BEGIN)
    return int(options.strict and any(one.met == "missed" for one in results.verdicts()))
