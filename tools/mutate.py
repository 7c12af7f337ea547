"""Plant faults into the sources, one at a time, and check that the tests beside each catch it.

    python tools/mutate.py [NAME...]
    python tools/mutate.py --tenth SEED

The faults are in ``tools/mutations.toml``. The tests of a fault run without it first, and have to pass. The sources are
restored after each fault, also when this is interrupted or terminated; run it in a checkout without other work. Tests
run with the Python that runs this; those of the native engine are built with CMake and Ninja into the folder that
``MUTATIONS_BUILD`` names.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import nox.project

__all__ = ["FAULTS", "Fault", "fail_without_a_fault", "is_caught", "main", "read"]

ROOT = Path(__file__).resolve().parent.parent
FAULTS = ROOT / "tools" / "mutations.toml"
NATIVE_TESTS = ROOT / "packages" / "comm-backend-ccl" / "native" / "tests"
NATIVE = "native:"
# Enough operations for the tests that do many of them.
NATIVE_OPTIONS = ("--operations=20000", "--limit=100", "--patience=20")
# Names of native tests by what a fault is about.
NATIVE_GROUPS = {
    "copies": ("kernels_copy",),
    "kernels": ("kernels_reduce", "kernels_keep_every_16_bit_float", "kernels_round_16_bit_floats"),
    "codecs": ("codecs_reduce_in_one_pass_as_in_several",),
    "exchanges": ("exchanges_of_2", "exchanges_of_changing_sizes_of_2", "exchanges_of_changing_sizes_of_3"),
    "learner": (
        "copies_around_the_caches_are_chosen",
        "learner_finds_what_has_become_fast_in_a_pause",
        "learner_leaves_what_has_become_slow",
        "learner_looks_after_pauses",
        "learner_starts_from_what_is_known",
        "learner_warms_up_what_is_slow_at_first",
        "learners_of_operations_that_take_turns_settle",
    ),
    "rings": (
        "a_fixed_transfer_is_the_first_candidate_that_has_it",
        "near_and_small_operations_of_2",
        "near_and_small_operations_of_3",
        "ranks_cut_alike_whoever_is_oversubscribed",
        "the_wide_ring_has_to_be_faster_by_a_fifth",
    ),
    "segments": ("calls_in_segments_of_2",),
    "waiting": ("ranks_on_one_core_take_turns",),
    "stress": ("stress", "cached_operations_of_3", "streamed_operations_of_3", "wide_operations_of_3"),
}
LIMIT_S = 900
# The exit status of the native tests where a name is wrong.
WRONG_USAGE = 2


@dataclass(frozen=True)
class Fault:
    """A change of one place of the sources that has to make ``tests`` fail."""

    name: str
    file: str
    before: str
    after: str
    tests: str


def read(path: Path = FAULTS) -> list[Fault]:
    """Return all faults of a file."""
    return [Fault(**one) for one in nox.project.load_toml(path)["fault"]]


def is_caught(fault: Fault) -> bool:
    """Plant ``fault``, run its tests and restore the source.

    Tests that do not end within ``LIMIT_S`` with the fault have caught it.

    Raises:
        ValueError: the place is not there, or there more than once; the tests fail without the fault; they ended
            otherwise than by failing, or what they need does not compile.
    """
    path = ROOT / fault.file
    source = path.read_text()
    if source.count(fault.before) != 1:
        raise ValueError(f"{fault.name}: got {source.count(fault.before)} places in {fault.file}; expected 1")
    if fail_without_a_fault(fault.tests):
        raise ValueError(
            f"{fault.name}: {fault.tests} fails without the fault, or takes {LIMIT_S} s; expected it to pass"
        )
    with _restored(path, source):
        path.write_text(source.replace(fault.before, fault.after))
        return _fails(fault.tests)


@functools.cache
def fail_without_a_fault(tests: str) -> bool:
    """Return whether ``tests`` fail as the sources are, and do so again: on a busy machine one may fail once."""
    return _fails(tests, shown=True) and _fails(tests, shown=True)


@contextlib.contextmanager
def _restored(path: Path, source: str) -> Iterator[None]:
    """Write ``source`` back at the end, also where SIGTERM ends this process."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        path.write_text(source)
        signal.signal(signal.SIGTERM, before)


def _fails(tests: str, shown: bool = False) -> bool:
    if tests.startswith(NATIVE):
        return _native_fails(NATIVE_GROUPS[tests.removeprefix(NATIVE)])
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    done = _run(command)
    if done is None:
        return True
    if done.returncode not in (0, 1):
        raise ValueError(f"pytest {tests}: exit status {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")
    if shown and done.returncode == 1:
        print(done.stdout[-3000:], file=sys.stderr, flush=True)
    return done.returncode == 1


def _native_fails(names: Sequence[str]) -> bool:
    build = Path(os.environ.get("MUTATIONS_BUILD") or tempfile.gettempdir()) / "mutations"
    configure = ["cmake", "-G", "Ninja", "-DSANITIZE=", "-S", str(NATIVE_TESTS), "-B", str(build)]
    for command in (configure, ["cmake", "--build", str(build)]):
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            # Ninja writes the compiler's messages to its output.
            raise ValueError(
                f"{' '.join(command)}: exit status {made.returncode}: {(made.stdout + made.stderr)[-2000:]}"
            )
    done = _run([str(build / "native_tests"), *NATIVE_OPTIONS, *names])
    if done is None:
        return True
    if done.returncode == WRONG_USAGE:
        raise ValueError(f"native_tests {' '.join(names)}: {done.stderr[-500:]}")
    return done.returncode != 0


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """Run tests; return None, after all their processes were ended, where they take longer than ``LIMIT_S``."""
    # A source that is written twice in a second at the same size would be taken for its bytecode.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    # Files, which unlike pipes do not wait for processes that the tests have left.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        tests = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=err, start_new_session=True)
        try:
            status = tests.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(tests.pid, signal.SIGKILL)
            tests.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(list(command), status, out.read(), err.read())


def main(arguments: Sequence[str]) -> int:
    """Try the faults of these names, a tenth, or all; return how many were not caught, or not tried."""
    parser = argparse.ArgumentParser(prog="tools/mutate.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tenth", type=int, metavar="SEED", help="every tenth fault; ten seeds in a row are all")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a fault of tools/mutations.toml")
    options = parser.parse_args(arguments)
    names = options.names
    faults = read()
    if options.tenth is not None:
        faults = faults[options.tenth % 10 :: 10]
    if unknown := sorted(set(names) - {fault.name for fault in faults}):
        near = {one for name in unknown for one in difflib.get_close_matches(name, [fault.name for fault in faults])}
        hint = f"; did you mean {', '.join(sorted(near))}?" if near else ""
        print(
            f"mutate.py: got the unknown names {', '.join(unknown)}; expected names of tools/mutations.toml{hint}",
            file=sys.stderr,
        )
        return len(unknown)
    missed = 0
    for fault in faults:
        if not names or fault.name in names:
            try:
                found = "caught" if is_caught(fault) else "MISSED"
            except ValueError as error:
                found = f"ERROR ({error})"
            missed += found != "caught"
            print(f"{found}  {fault.name}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
