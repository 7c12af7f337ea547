"""Checks that nothing is missing in a module of Python that was only linked.

    python tools/check_undefined.py [--nm PROGRAM] MODULE

A library may be linked without what Python itself defines, and the linker then accepts every other undefined name as
well. Names that a shared library defines have a version. For another architecture, PROGRAM is its compiler's nm.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

__all__ = ["main", "missing"]


def missing(listed: str) -> list[str]:
    """Return the undefined names that neither Python nor a library defines, of what ``nm`` lists."""
    symbols = [line.split() for line in listed.splitlines()]
    # Weak ones (w, v) may stay undefined.
    names = [fields[-1] for fields in symbols if "U" in fields[:-1]]
    return [name for name in names if "@" not in name and not name.startswith(("Py", "_Py"))]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module")
    parser.add_argument("--nm", default="nm")
    options = parser.parse_args(arguments)
    command = [options.nm, "--dynamic", "--undefined-only", options.module]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    if "Py" not in listed:
        print(f"{options.module} needs nothing of Python, so it is no module", file=sys.stderr)
        return 1
    if found := missing(listed):
        print(f"{options.module} is linked without a definition of: {', '.join(found)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
