"""Checks that a virtual environment holds the packages of this repository that it should, and no others.

Runs inside the environment, on the standard library alone, under any Python that the packages support::

    python tools/check_environment.py --siblings comm-utils comm-config --without torch --import comm_config
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGES = Path(__file__).resolve().parent.parent / "packages"


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_siblings() -> set[str]:
    known = {path.parent.name for path in PACKAGES.glob("*/pyproject.toml")}
    return known & {normalize(dist.metadata["Name"]) for dist in importlib.metadata.distributions()}


def check_siblings(expected: Sequence[str]) -> list[str]:
    found = installed_siblings()
    return [f"{name} is installed, and nothing declares it" for name in sorted(found - set(expected))] + [
        f"{name} is declared, and is not installed" for name in sorted(set(expected) - found)
    ]


def check_absent(modules: Sequence[str]) -> list[str]:
    return [f"{name} is there, and nothing declares it" for name in modules if importlib.util.find_spec(name)]


def check_import(module: str, not_loading: Sequence[str]) -> list[str]:
    """Import ``module`` in a fresh process, and see which of ``not_loading`` that loads."""
    code = f"import sys, {module}; dir({module}); print(*sorted(set({list(not_loading)!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        return [f"import {module} fails:\n{done.stderr}"]
    return [f"import {module} loads {name}, which only an extra brings" for name in done.stdout.split()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--siblings", nargs="*", default=[], help="exactly the packages of this repository to find")
    parser.add_argument("--without", nargs="*", default=[], help="modules that must not be importable")
    parser.add_argument("--import", dest="module", help="a module that must import in a fresh process")
    parser.add_argument("--not-loading", nargs="*", default=[], help="modules that this import must not load")
    options = parser.parse_args(argv)

    problems = check_siblings(options.siblings) + check_absent(options.without)
    if options.module:
        problems += check_import(options.module, options.not_loading)
    for problem in problems:
        print(f"{sys.prefix}: {problem}", file=sys.stderr)
    if not problems:
        print("environment as declared:", *options.siblings)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
