"""Gives a wheel with native code the manylinux tag of the oldest system that it runs on, by auditwheel.

    python tools/repair_wheel.py WHEEL

The tag is what auditwheel finds, ``manylinux_2_35_x86_64`` or another, and depends on the glibc and the compiler of the
machine that built the wheel. The wheel is replaced by the one with that tag. What is in it stays as it is: oneCCL is
linked in, and loads its libfabric by its path, so that neither is a dependency. If auditwheel would add or change a
library, the wheel keeps its tag, and the reason is printed. Needs auditwheel and patchelf.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["changes", "is_local", "main", "repair"]

# What says the tag, and the hashes of all files.
METADATA = re.compile(r"[^/]+\.dist-info/(WHEEL|RECORD|sboms/.*)")


def is_local(wheel: Path) -> bool:
    """Return whether ``wheel`` is for Linux as it is here, as pip builds it, and PyPI takes none."""
    return re.search(r"-linux_\w+\.whl$", wheel.name) is not None


def changes(before: Path, after: Path) -> list[str]:
    """Return the files that are not the same in two wheels, without the metadata that a tag changes."""
    with zipfile.ZipFile(before) as one, zipfile.ZipFile(after) as other:
        hashes = [{item.filename: item.CRC for item in wheel.infolist() if not item.is_dir()} for wheel in (one, other)]
    names = sorted(hashes[0].keys() | hashes[1].keys())
    return [name for name in names if hashes[0].get(name) != hashes[1].get(name) and not METADATA.fullmatch(name)]


def repair(wheel: Path) -> tuple[Path, str]:
    """Replace ``wheel``; return where it is now, and why it kept its tag, or "".

    Raises:
        SystemExit: auditwheel ended with an error.
    """
    with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:
        command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder, str(wheel)]
        # auditwheel starts patchelf, which is beside this Python where it is not on PATH.
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env={**os.environ, "PATH": path},
        )
        found = list(Path(folder).glob("*.whl"))
        if done.returncode or len(found) != 1:
            raise SystemExit(f"auditwheel could not repair {wheel.name}:\n{done.stdout}")
        if is_local(found[0]):
            return wheel, "auditwheel knows no manylinux tag for it"
        if changed := changes(wheel, found[0]):
            return wheel, f"auditwheel would add or change {', '.join(changed)}"
        target = wheel.with_name(found[0].name)
        found[0].replace(target)
    wheel.unlink()
    return target, ""


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    wheel = Path(arguments[0])
    if not is_local(wheel):
        print(f"{wheel.name} is not tagged for the machine that built it: nothing to do")
        return 0
    repaired, reason = repair(wheel)
    print(f"{wheel.name} keeps its tag: {reason}" if reason else f"{wheel.name} is now {repaired.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
