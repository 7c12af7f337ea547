"""Checks the models of the flag protocol with spin: what has to hold, and that each planted fault is found.

    python packages/comm-backend-ccl/native/model/check.py [WORD ...]

Of all checks, only those whose model or switches contain a given word. Needs spin and a C compiler.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MODELS = Path(__file__).resolve().parent


class Check(NamedTuple):
    model: str
    switches: str = ""
    holds: bool = True


CHECKS = (
    Check("waking", "-DDATA -DOPERATIONS=2"),
    Check("waking", "-DSPURIOUS -DOPERATIONS=3"),
    Check("waking", "-DSECOND=1 -DOPERATIONS=2"),
    Check("waking", "-DSECOND=1 -DOPERATIONS=2 -DKEEP_AWAITED"),
    Check("waking", "-DSECOND=2 -DOPERATIONS=1"),
    Check("waking", "-DSECOND=3 -DOPERATIONS=1"),
    Check("waking", "-DRANKS=3 -DOPERATIONS=1"),
    Check("waking", "-DWEAK -DDATA -DOPERATIONS=2"),
    Check("waking", "-DWEAK -DSPURIOUS -DOPERATIONS=2"),
    Check("waking", "-DWEAK -DOPERATIONS=2 -DNO_FENCE", holds=False),
    Check("waking", "-DOPERATIONS=2 -DNO_RECHECK", holds=False),
    Check("waking", "-DOPERATIONS=2 -DPLAIN_STORE", holds=False),
    Check("waking", "-DOPERATIONS=2 -DLATE_RINGS", holds=False),
    Check("waking", "-DSECOND=1 -DOPERATIONS=2 -DNO_LOCAL_WAKE", holds=False),
    Check("waking", "-DSECOND=1 -DOPERATIONS=2 -DCLEAR_BIT", holds=False),
    Check("waking", "-DSECOND=1 -DOPERATIONS=2 -DAWAIT_OWN", holds=False),
    Check("waking", "-DSECOND=3 -DOPERATIONS=1 -DFILTER_MESSAGES", holds=False),
    Check("slots"),
    Check("slots", "-DSLOTS=5"),
    Check("slots", "-DRANKS=3 -DROOTS=1"),
    Check("slots", "-DWINDOW=2 -DWITHOUT_THREE_STAGES"),
    Check("slots", "-DWINDOW=1 -DWITHOUT_THREE_STAGES", holds=False),
    Check("slots", "-DWINDOW=2", holds=False),
    Check("slots", "-DLATE_WINDOW", holds=False),
    Check("calls"),
    Check("calls", "-DOPERATIONS=1 -DLOOKS"),
    Check("calls", "-DRANKS=3 -DOPERATIONS=1 -DFEW"),
    Check("calls", "-DOPERATIONS=1 -DLATE_RECORD", holds=False),
    Check("ordering"),
    Check("ordering", "-DSTREAMED"),
    Check("ordering", "-DGIVE_UP"),
    Check("ordering", "-DNO_RELEASE", holds=False),
    Check("ordering", "-DONLY_STORES", holds=False),
    Check("ordering", "-DNO_ACQUIRE", holds=False),
    Check("ordering", "-DSTREAMED -DNO_SFENCE", holds=False),
    Check("ordering", "-DGIVE_UP -DNO_FENCE_AFTER_FAILURE", holds=False),
    Check("ordering", "-DGIVE_UP -DNO_FENCE_BEFORE_FAILURE", holds=False),
)


def run(check: Check, compiler: str) -> tuple[bool, str]:
    """Whether no error is possible, and how many states that took; raises where neither was found out."""
    with tempfile.TemporaryDirectory() as folder:

        def output(*command: str) -> str:
            done = subprocess.run(
                command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
            )
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
            return done.stdout

        output("spin", "-a", *check.switches.split(), str(MODELS / f"{check.model}.pml"))
        # Where an error is expected, few states are visited, and to optimize would take most of the time.
        level = "-O1" if check.holds else "-O0"
        output(compiler, "-w", level, "-DSAFETY", "-DNOCLAIM", "-DCOLLAPSE", "-DMEMLIM=4000", "-o", "pan", "pan.c")
        text = output("./pan", "-m2000000", "-w24")
    errors = re.search(r"errors: (\d+)", text)
    states = re.search(r"(\d+) states, stored", text)
    incomplete = re.search(r"(?m)^error: .*|.*(max search depth too small|out of memory|Search not completed).*", text)
    if errors is None or states is None or (errors[1] == "0" and incomplete):
        raise RuntimeError(f"{check} was not decided:\n{text}")
    # What is wrong has to be what the model asserts or that nothing goes on, not a slip of the model.
    if errors[1] != "0" and not re.search(r"assertion violated|invalid end state", text):
        raise RuntimeError(f"{check} has an error of its own:\n{text}")
    return errors[1] == "0", states[1]


def main(words: Sequence[str]) -> int:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or shutil.which("spin") is None:
        print("needs spin and a C compiler", file=sys.stderr)
        return 2
    wrong = 0
    for check in CHECKS:
        name = f"{check.model} {check.switches}".strip()
        if words and not any(word in name for word in words):
            continue
        begin = time.monotonic()
        holds, states = run(check, compiler)
        found = "holds" if holds else "error found"
        mark = "" if holds == check.holds else "  <-- NOT EXPECTED"
        print(f"{name:60} {found:12} {states:>9} states {time.monotonic() - begin:5.1f} s{mark}", flush=True)
        wrong += holds != check.holds
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
