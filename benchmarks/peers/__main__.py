"""What every real peer on one node takes for the same: ``nox -s bench-peers``; see docs/performance-peers.md.

python benchmarks/peers [--quick] [--rounds N] [--sizes BYTES ...] [--only PEER ...] [--json FILE] [--write]
"""

from __future__ import annotations

import sys
from pathlib import Path

# The folder of `measuring` and `peers`, in place of this one.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        from peers.rank import Rank, serve

        serve(sys.argv[2], Rank)
    else:
        from peers.cli import main

        sys.exit(main())
