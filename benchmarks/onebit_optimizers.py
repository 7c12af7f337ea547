"""Loss curves of DeepSpeed's 1-bit optimizers on this API, beside DeepSpeed's own transport and Adam.

    nox -s ecosystem --install-only
    .nox/ecosystem/bin/python benchmarks/onebit_optimizers.py [--steps 40] [--results FOLDER] [--write]

Two ranks train the model of ``tests-integration/ecosystem/onebit_training.py``, which says what DeepSpeed's own
transport is given where it does not run on CPUs. ``--results`` keeps what they wrote down, in folders named after the
transports, and takes what an earlier run has left there. ``--write`` puts the table into docs/compression.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import put_between

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests-integration" / "ecosystem" / "onebit_training.py"
PAGE = ROOT / "docs" / "compression.md"
BEGIN, END = "<!-- begin: benchmarks/onebit_optimizers.py --write -->", "<!-- end of 1-bit optimizers -->"
TRANSPORTS = {"replaced": "this API", "replaced-own": "DeepSpeed's own"}
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
# Steps whose losses are averaged.
WINDOW = 5


def losses(kind: str, steps: int, results: Path) -> dict[str, list[float]]:
    """Return the loss of every step, averaged over both ranks, by optimizer."""
    out = results / kind
    out.mkdir(parents=True, exist_ok=True)
    file = out / "rank0.json"
    if not file.exists():
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, *launcher, str(SCRIPT), kind, str(out), str(steps)]
        subprocess.run(command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.DEVNULL, check=True)
    found = {name: outcome["losses"] for name, outcome in json.loads(file.read_text())["optimizers"].items()}
    if any(len(curve) != steps for curve in found.values()):
        raise SystemExit(f"{file} is of another number of steps than {steps}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--results", type=Path, help="a folder for what the ranks write down; by default a new one")
    parser.add_argument("--write", action="store_true", help="put the table into docs/compression.md")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        results = given.results or Path(temporary)
        curves = {kind: losses(kind, given.steps, results) for kind in TRANSPORTS}
    ends = [given.steps * part // 8 for part in (1, 2, 3, 4, 6, 8)]
    lines = [
        f"| optimizer | transport | {' | '.join(f'step {end}' for end in ends)} | largest difference of a step |",
        f"|---|---|{'---:|' * (len(ends) + 1)}",
    ]
    for name, own in curves["replaced-own"].items():
        for kind, transport in TRANSPORTS.items():
            if name == "Adam" and kind == "replaced-own":
                continue
            curve = curves[kind][name]
            cells = [f"{statistics.mean(curve[max(0, end - WINDOW) : end]):.3f}" for end in ends]
            largest = max(abs(one - other) for one, other in zip(curve, own, strict=True))
            difference = (f"{largest:.1e}" if largest else "0") if name != "Adam" and kind == "replaced" else ""
            lines.append(f"| {name} | {'-' if name == 'Adam' else transport} | {' | '.join(cells)} | {difference} |")
    print("\n".join(lines))
    if given.write:
        put_between(PAGE, BEGIN, END, lambda _: "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
