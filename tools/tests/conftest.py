"""The tools and noxfile.py are scripts, not an installed package."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The benchmarks write pages with comm_utils, which is not installed for these tests and needs nothing else.
sys.path[:0] = [str(ROOT / "tools"), str(ROOT), str(ROOT / "packages" / "comm-utils" / "src")]
