"""What makes inputs and gives them to a decoder for a while: atheris, or mutations of its corpus without it."""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import random
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fuzz.bounds import Decoder, Finding, check, limit_address_space, read_corpus
from fuzz.mutating import mutated

__all__ = ["Outcome", "run"]

MOST_INPUT_BYTES = 8192
_MEMORY_BYTES = 2 << 30
_HEAD_BYTES = 8
# What goes on in one input for so long is ended from outside, with the process.
_HANGS_S = 25
_UNITS = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_COVERAGE = re.compile(r"cov: (\d+)")


@dataclass(frozen=True)
class Outcome:
    """One run of a decoder.

    Attributes:
        covered: branches of our packages that were seen; None where the engine does not know.
        finding: what broke the bounds; empty for nothing.
        data: the input that did; None where there is none.
        made: the inputs that were worth keeping, as the engine sees it.
    """

    executions: int
    covered: int | None
    finding: str
    data: bytes | None
    made: Sequence[bytes] = ()


def run(decoder: Decoder, corpus: Path, seconds: float, seed: int, atheris: Any | None) -> Outcome:
    """Give inputs to ``decoder`` for ``seconds``, in a process of its own.

    Args:
        atheris: the module, which had instrumented the packages when they were imported; None for mutations alone.
    """
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        inputs = folder / "inputs"
        inputs.mkdir()
        for number, data in enumerate([*decoder.seeds(), *read_corpus(corpus, decoder)]):
            (inputs / f"seed{number}").write_bytes(data)
        status, log = _forked(lambda: _child(decoder, folder, seconds, seed, atheris), folder / "log", seconds)
        return _outcome(folder, status, log, atheris is not None)


def _forked(work: Callable[[], NoReturn], path: Path, seconds: float) -> tuple[int, str]:
    """Return how a forked child ended that did ``work``, and what it wrote."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            output = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            work()
        traceback.print_exc()
        os._exit(70)
    end = time.monotonic() + 2 * seconds + 60
    try:
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status), path.read_text(errors="replace")
            if time.monotonic() > end:
                return 124, path.read_text(errors="replace")
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, 9)
            os.waitpid(child, 0)


def _child(decoder: Decoder, folder: Path, seconds: float, seed: int, atheris: Any | None) -> NoReturn:
    logging.disable(logging.CRITICAL)  # a warning an input

    def one(data: bytes) -> None:
        try:
            check(decoder, data)
        except Finding as finding:
            (folder / "crash-finding").write_bytes(data)
            (folder / "finding").write_text(f"{finding}\n{_place(finding)}", errors="replace")
            os._exit(77)

    inputs = [path.read_bytes() for path in sorted((folder / "inputs").iterdir())]
    with contextlib.suppress(Exception):
        # Not measured: a first use takes the memory of the modules that it imports, and of pages of libraries.
        decoder.decode(inputs[0])
    for data in inputs:
        one(data)
    limit_address_space(_MEMORY_BYTES)
    if atheris is not None:
        _atheris(atheris, decoder, one, folder, seconds, seed)
    _mutations(decoder, one, folder, seconds, seed)


def _place(finding: Finding) -> str:
    cause = finding.__cause__
    return "".join(traceback.format_exception(cause)[-6:]) if cause is not None else ""


def _atheris(
    atheris: Any, decoder: Decoder, one: Callable[[bytes], None], folder: Path, seconds: float, seed: int
) -> NoReturn:
    seeds = [path.read_bytes() for path in sorted((folder / "inputs").iterdir())]

    def mutate(data: bytes, most_bytes: int, chance_seed: int) -> bytes:
        chance = random.Random(chance_seed)
        if chance.random() < (0.7 if decoder.kind in ("json", "lines") else 0.3):
            return mutated(data, seeds, decoder.kind, chance, most_bytes)
        return bytes(atheris.Mutate(data, most_bytes))

    options = [
        f"-max_total_time={max(1, round(seconds))}",
        f"-max_len={MOST_INPUT_BYTES}",
        f"-timeout={_HANGS_S}",
        f"-seed={seed}",
        f"-artifact_prefix={folder}/crash-",
        "-print_final_stats=1",
        "-rss_limit_mb=0",  # of the process; the address space is limited
        "-detect_leaks=0",
    ]
    atheris.Setup(["fuzz", *options, str(folder / "inputs")], one, custom_mutator=mutate)
    atheris.Fuzz()
    os._exit(0)


def _mutations(decoder: Decoder, one: Callable[[bytes], None], folder: Path, seconds: float, seed: int) -> NoReturn:
    chance = random.Random(seed)
    seeds = [path.read_bytes() for path in sorted((folder / "inputs").iterdir())]
    # In a file's pages: they are there as well where the process is ended.
    current = folder / "current"
    current.write_bytes(bytes(_HEAD_BYTES + MOST_INPUT_BYTES))
    with current.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        data = mutated(chance.choice(seeds), seeds, decoder.kind, chance, MOST_INPUT_BYTES)
        memory[: _HEAD_BYTES + len(data)] = len(data).to_bytes(_HEAD_BYTES, "little") + data
        one(data)
        count += 1
    (folder / "count").write_text(json.dumps(count))
    os._exit(0)


def _outcome(folder: Path, status: int, log: str, covered: bool) -> Outcome:
    executions = 0
    if units := _UNITS.findall(log):
        executions = int(units[-1])
    elif (folder / "count").exists():
        executions = json.loads((folder / "count").read_text())
    coverage = int(found[-1]) if covered and (found := _COVERAGE.findall(log)) else None
    made = [path.read_bytes() for path in sorted((folder / "inputs").glob("*")) if not path.name.startswith("seed")]
    if status == 0:
        return Outcome(executions, coverage, "", None, made)
    crashes = [path.read_bytes() for path in sorted(folder.glob("crash-*"), reverse=True)]
    if not crashes and (folder / "current").exists():
        current = (folder / "current").read_bytes()
        size = int.from_bytes(current[:_HEAD_BYTES], "little")
        crashes = [current[_HEAD_BYTES : _HEAD_BYTES + size]]
    finding = folder / "finding"
    what = finding.read_text() if finding.exists() else f"the process ended with {status}:\n{log[-2000:]}"
    return Outcome(executions, coverage, what, crashes[0] if crashes else None, made)
