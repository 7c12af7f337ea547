"""Tokens a second of tensor-parallel decoding on two ranks: ``nox -s bench-inference``; see docs/inference.md.

python benchmarks/inference [--quick] [--rounds N] [--parameters MILLIONS] [--only VARIANT ...] [--json FILE] [--write]
"""

from __future__ import annotations

import sys
from pathlib import Path

# The folder of `measuring`, `peers` and `inference`, in place of this one.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        from peers.rank import serve

        from inference.decoding import Decoder

        serve(sys.argv[2], Decoder)
    else:
        from inference.cli import main

        sys.exit(main())
