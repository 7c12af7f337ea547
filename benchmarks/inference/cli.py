"""The options, the rounds, and what is made of them."""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measuring import machine, output_file, positive, timed_run
from peers.processes import Ranks, started
from peers.rank import CORES
from peers.report import rewrite

from inference import report
from inference.results import TARGETS, Results, Round, describe
from inference.variants import ALONE, COMPILER, NOTHING_SENT, RANKS, VARIANTS

__all__ = ["main"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "inference.md"
PROGRAM = Path(__file__).with_name("__main__.py")
MILLION = 1_000_000
# DeepSpeed's operator can miss its peers' shared memory at the start and hang; then its ranks are started again.
ATTEMPTS, START_LIMIT_S = 3, 90.0
# Of the largest logit, in float32: sums of some thousand products in another order.
TOLERANCE = 1e-4
# Of one core: above this, ranks that wait are not idle.
MOST_IDLE_CPU = 0.02
# Of a page.
COLUMNS = 120


def options_from(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tokens a second of tensor-parallel decoding on two ranks.")
    parser.add_argument("--rounds", type=positive, help="default: 7, or 3 with --quick")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and tokens")
    parser.add_argument("--parameters", type=int, default=200, metavar="MILLIONS", help="about as many; default: 200")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
    parser.add_argument("--prompt", type=int, default=16, metavar="TOKENS", help="default: 16")
    parser.add_argument("--tokens", type=int, help="to decode in a round; default: 32, or 8 with --quick")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, metavar="VARIANT", help=f"of: {'; '.join(VARIANTS)}")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write everything to this file")
    parser.add_argument("--write", action="store_true", help="also write the section of this machine in docs")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 where a target is missed")
    options = parser.parse_args(arguments)
    options.rounds = (3 if options.quick else 7) if options.rounds is None else options.rounds
    options.tokens = (8 if options.quick else 32) if options.tokens is None else options.tokens
    for name, least in (("rounds", 1), ("tokens", 2), ("prompt", 1), ("parameters", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name}: got {getattr(options, name)}, expected at least {least}")
    return options


def check(name: str, answers: Sequence[dict[str, Any]], results: Results, options: argparse.Namespace) -> None:
    """Keep how far a variant is off.

    Raises:
        SystemExit: in float32, it is off further than sums in another order are.
    """
    off, same = max(one["off"] for one in answers), min(one["same"] for one in answers)
    results.off[name] = max(off, results.off.get(name, 0.0))
    results.same[name] = min(same, results.same.get(name, same))
    if options.dtype == "float32" and (same < options.tokens or not off <= TOLERANCE):
        raise SystemExit(
            f"{name}: got {same} tokens like one process and logits {off:.1e} of the largest off, "
            f"expected {options.tokens} and at most {TOLERANCE:.0e}"
        )


def measure(sets: Sequence[Ranks], reference: Path, results: Results, options: argparse.Namespace) -> None:
    """All rounds, after one that warms up: the variants decode in turns, and each begins a round once."""
    question = {"prompt": options.prompt, "tokens": options.tokens}
    saved = {**question, "save": str(reference)}
    compared = {**question, "reference": str(reference)}
    sets[0].ask(saved)
    for number in range(options.rounds + 1):
        first = number % len(sets)
        for one in (*sets[first:], *sets[:first]):
            answers = one.ask(compared)
            if one.peer is not NOTHING_SENT:
                check(one.peer.name, answers, results, options)
            if number:
                results.add(one.peer.name, Round.of(answers))
    results.rounds = {one.peer.name: results.rounds[one.peer.name] for one in sets}


def run(options: argparse.Namespace, results: Results, note: Callable[[str], None]) -> dict[str, Any]:
    """Start one process, with the reference, and the ranks of all variants; what they say of themselves."""
    chosen = [variant for name, variant in VARIANTS.items() if not options.only or name in options.only]
    settings = {"parameters": options.parameters * MILLION, "dtype": options.dtype}
    if any(variant.module == "auto_tp_operator" for variant in chosen) and not COMPILER.missing():
        with started([COMPILER], 1, settings, note, PROGRAM):
            pass
    facts: dict[str, Any] = {"of_variants": {}, "idle_cpu": {}}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inference-")))
        if missing := ALONE.missing():
            raise SystemExit(f"{ALONE.name}: {missing}")
        sets = stack.enter_context(started([ALONE], 1, settings, note, PROGRAM))
        sets = sets + stack.enter_context(started(chosen, RANKS, settings, note, PROGRAM, ATTEMPTS, START_LIMIT_S))
        measure(sets, folder / "reference.pt", results, options)
        for one in sets:
            name = one.peer.name
            facts["of_variants"][name] = one.facts
            facts["idle_cpu"][name] = one.idle_cpu()
            if one.idle_s >= 5 and one.idle_cpu() > MOST_IDLE_CPU:
                note(f"{name} was not idle while others were measured: it used {100 * one.idle_cpu():.1f} % of a core")
    return facts


def model_in_words(options: argparse.Namespace) -> str:
    return (
        f"{options.parameters} million weights, {options.dtype}, one sequence, {options.prompt} tokens of prompt, "
        f"{options.tokens} new tokens, {RANKS} ranks"
    )


def logits_in_words(results: Results, options: argparse.Namespace) -> str:
    off, same = max(results.off.values()), min(results.same.values())
    tokens = "all" if same == options.tokens else f"at least the first {same} of"
    return (
        f"The variants decoded {tokens} {options.tokens} tokens as one process did, with logits off by at most "
        f"{off:.1e} of the largest."
    )


def generated(options: argparse.Namespace, results: Results, verdicts: Any, notes: Sequence[str]) -> str:
    """The part of the page that is written by this program."""
    found = machine()
    facts = (
        f"Measured on {CORES} of {found['cores']} cores, Linux {found['kernel']}, Python {platform.python_version()}, "
        f"torch {version('torch')}, transformers {version('transformers')}, DeepSpeed {version('deepspeed')}, "
        f"{options.rounds} rounds. Medians over the rounds, in brackets their 95 % intervals."
    )
    parts = [
        textwrap.fill(facts, COLUMNS),
        report.table(results, model_in_words(options)).markdown(),
        textwrap.fill(logits_in_words(results, options), COLUMNS),
        report.targets_table(verdicts).markdown(),
    ]
    if notes:
        lines = (textwrap.fill(f"- {note}", COLUMNS, subsequent_indent="  ") for note in notes)
        parts.append("\n".join(("Notes of this run:\n", *lines)))
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_from(arguments)
    results = Results()
    with timed_run(CORES) as timed:
        facts = run(options, results, timed.note)

    print(f"median of {options.rounds} rounds (95 % interval)")
    print(report.table(results, model_in_words(options)).text())
    print(logits_in_words(results, options))
    verdicts = [target.judge(results) for target in TARGETS]
    print("targets: ratio of our median to the other (95 % interval)")
    for verdict in verdicts:
        print(f"  {describe(verdict)}")
    idle = facts["idle_cpu"]
    busiest = max(idle, key=lambda name: idle[name])
    print(
        f"measured in {timed.wall_s:.0f} s; idle ranks used {100 * idle[busiest]:.3f} % of a core at most ({busiest})"
    )
    if options.json:
        found = {
            "versions": {"python": platform.python_version(), "torch": version("torch"), **facts["of_variants"]},
            "machine": machine(),
            "options": {key: value for key, value in vars(options).items() if key != "json"},
            "wall_s": timed.wall_s,
            "idle_cpu": idle,
            "notes": timed.notes,
            "results": results.to_json(),
            "verdicts": [verdict.to_json() for verdict in verdicts],
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.write:
        rewrite(PAGE, machine()["processor"], generated(options, results, verdicts, timed.notes), report.BEGIN)
    return int(options.strict and any(verdict.met is False for verdict in verdicts if verdict.target.must))
