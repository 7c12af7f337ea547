"""Sets the one version that all packages share, or checks that they are in step.

    python tools/bump_version.py 0.2.0
    python tools/bump_version.py --check

A bump writes the version of every package, the ``==`` pins between them, and a heading in CHANGELOG.md for what stood
under "Unreleased". Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r"(?P<numbers>\d+\.\d+\.\d+)((?P<stage>a|b|rc)(?P<number>\d+))?")
VERSION_LINE = re.compile(r'^version = "(?P<version>[^"]+)"$', re.MULTILINE)
UNRELEASED = re.compile(r"^## Unreleased$", re.MULTILINE)
RELEASED = re.compile(r"^## (?P<version>\d\S*)", re.MULTILINE)


def pyprojects(root: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in sorted(root.glob("packages/*/pyproject.toml"))}


def pins(names: Sequence[str]) -> re.Pattern[str]:
    """Return requirements on siblings, with or without extras, in a quoted string of TOML."""
    name = "|".join(map(re.escape, names))
    return re.compile(rf'(?P<head>"(?:{name})(?![\w-])(?:\[[\w,\- ]*\])?)(?P<specifier>[^";]*)(?=[";])')


def requirements_of(text: str) -> str:
    """Return the part of a ``pyproject.toml`` with requirements on siblings (its own name is above it)."""
    return text[text.index("dependencies = ") :]


def bump(root: Path, version: str, today: datetime.date) -> None:
    """Write ``version`` everywhere.

    Raises:
        ValueError: a version that is not of the form 1.2.3 or 1.2.3rc1, or not newer than the newest release of the
            changelog; or a changelog without "## Unreleased".
    """
    order(version)
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text()
    if not UNRELEASED.search(text):
        raise ValueError(f"{changelog} has no line '## Unreleased'; put one above what the new version brings")
    newest = RELEASED.search(text)
    if newest and order(version) <= order(newest["version"]):
        raise ValueError(
            f"got version {version}, expected one newer than {newest['version']}, the newest in {changelog}"
        )
    files = pyprojects(root)
    pin = pins([path.parent.name for path in files])
    for path, content in files.items():
        content = VERSION_LINE.sub(f'version = "{version}"', content, count=1)
        tail = requirements_of(content)
        path.write_text(content.replace(tail, pin.sub(rf"\g<head>=={version}", tail)))
    changelog.write_text(UNRELEASED.sub(f"## Unreleased\n\n## {version} ({today.isoformat()})", text, count=1))


def order(version: str) -> tuple[list[int], str, int]:
    """Return what sorts like ``version``: 1.2.3a1, 1.2.3b1, 1.2.3rc1, 1.2.3.

    Raises:
        ValueError: a version of another form.
    """
    parts = VERSION.fullmatch(version)
    if parts is None:
        raise ValueError(f"got version {version!r}, expected one like 1.2.3 or 1.2.3rc1")
    return (
        [int(number) for number in parts["numbers"].split(".")],
        parts["stage"] or "release",
        int(parts["number"] or 0),
    )


def problems(root: Path) -> Iterator[str]:
    """Say what is out of step."""
    files = pyprojects(root)
    pin = pins([path.parent.name for path in files])
    versions: dict[str, Path] = {}
    for path, content in files.items():
        found = VERSION_LINE.search(content)
        if not found:
            yield f"{path}: no line 'version = \"…\"'"
            continue
        versions.setdefault(found["version"], path)
    if len(versions) != 1:
        listed = ", ".join(f"{version} ({path.parent.name})" for version, path in versions.items())
        yield f"packages of one repository have one version, got {listed}"
        return
    (version,) = versions
    for path, content in files.items():
        for match in pin.finditer(requirements_of(content)):
            if match["specifier"] != f"=={version}":
                yield f"{path}: got {match['head'][1:]}{match['specifier']}, expected =={version}"
    changelog = root / "CHANGELOG.md"
    released = RELEASED.search(changelog.read_text())
    if released and released["version"] != version:
        yield f"{changelog}: the newest release is {released['version']}, the packages are {version}"


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("version", nargs="?", help="the new version, such as 0.2.0")
    what.add_argument("--check", action="store_true", help="change nothing, fail if something is out of step")
    options = parser.parse_args(argv)
    if not options.check:
        try:
            bump(root, options.version, datetime.date.today())
        except ValueError as error:
            parser.error(str(error))
    found = list(problems(root))
    print(*found or ["all packages and pins are in step"], sep="\n", file=sys.stderr if found else sys.stdout)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
