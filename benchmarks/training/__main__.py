"""Time, memory and hidden communication of a training step: ``nox -s bench-training``; see docs/training.md.

python benchmarks/training [--quick] [--rounds N] [--parameters MILLIONS ...] [--only COMPARISON ...]
    [--memory RANKS ...] [--timeline FILE] [--json FILE] [--write]
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The folder of `measuring`, `peers` and `training`, in place of this one; then that of the examples' model.
sys.path[0] = str(ROOT / "benchmarks")
sys.path.append(str(ROOT / "docs" / "examples" / "training"))

if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        from peers.rank import serve

        from training.trainer import Trainer

        serve(sys.argv[2], Trainer)
    else:
        from training.cli import main

        sys.exit(main())
