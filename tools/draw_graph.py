"""Draws docs/graph.svg: the layers of import-linter's contract, and the dependencies that the packages declare.

    python tools/draw_graph.py [--check]

Solid arrows are dependencies, a dashed one is an extra. With ``--check`` nothing is written; the exit code tells
whether the drawing is up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

import nox.project

from workspace import ROOT, Workspace

WIDTH, BOX_WIDTH, BOX_HEIGHT, LAYER_HEIGHT = 880, 220, 58, 140
COLOURS = {"box": "#f4f6fb", "line": "#33415c", "text": "#1b2333", "faint": "#5c677d"}


def layers(root: Path) -> list[list[str]]:
    """Rows of module names, the highest first, from the contract of type ``layers``."""
    contracts = nox.project.load_toml(root / "pyproject.toml")["tool"]["importlinter"]["contracts"]
    rows = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[name.strip() for name in row.split("|")] for row in rows]


def places(rows: list[list[str]]) -> dict[str, tuple[float, float]]:
    """Return the centre of every module's box."""
    return {
        name: (WIDTH * (2 * column + 1) / (2 * len(row)), 40 + BOX_HEIGHT / 2 + LAYER_HEIGHT * depth)
        for depth, row in enumerate(rows)
        for column, name in enumerate(row)
    }


def arrows(workspace: Workspace) -> list[tuple[str, str, bool]]:
    """(from, to, whether it is an extra) for every sibling that a package declares."""
    found = []
    for package in workspace.packages.values():
        direct = _siblings(workspace, package.requirements())
        found += [(package.module, other, False) for other in direct]
        optional = _siblings(workspace, package.requirements(package.extras))
        found += [(package.module, other, True) for other in optional if other not in direct]
    return found


def _siblings(workspace: Workspace, requirements: list[str]) -> list[str]:
    names = [text.split("==")[0].split("[")[0].strip() for text in requirements]
    return [workspace.packages[name].module for name in names if name in workspace.packages]


def draw(root: Path = ROOT) -> str:
    """Return the drawing as SVG."""
    workspace, rows = Workspace(root), layers(root)
    centres = places(rows)
    described = {package.module: package.pyproject["project"]["description"] for package in workspace.packages.values()}
    height = 40 + LAYER_HEIGHT * (len(rows) - 1) + BOX_HEIGHT + 40
    marker = 'markerWidth="9" markerHeight="9" refX="8" refY="4" orient="auto"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        "<title>Which package imports which</title>",
        f'<defs><marker id="head" {marker}><path d="M0,0 L8,4 L0,8 z" fill="{COLOURS["line"]}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for source, target, extra in arrows(workspace):
        (x1, y1), (x2, y2) = centres[source], centres[target]
        shift = (x2 - x1) * 0.25
        shift = max(-BOX_WIDTH * 0.4, min(BOX_WIDTH * 0.4, shift))
        ends = (
            f'x1="{x1 + shift:.0f}" y1="{y1 + BOX_HEIGHT / 2:.0f}" x2="{x2 - shift:.0f}" y2="{y2 - BOX_HEIGHT / 2:.0f}"'
        )
        dashes = ' stroke-dasharray="6 5"' if extra else ""
        parts.append(f'<line {ends} stroke="{COLOURS["line"]}" stroke-width="1.4"{dashes} marker-end="url(#head)"/>')
    for name, (x, y) in centres.items():
        left, top = x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2
        parts += [
            f"<g><title>{escape(described[name])}</title>",
            f'<rect x="{left:.0f}" y="{top:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="8" '
            f'fill="{COLOURS["box"]}" stroke="{COLOURS["line"]}"/>',
            f'<text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle" font-size="16" fill="{COLOURS["text"]}">'
            f"{name}</text></g>",
        ]
    note = "solid: declared dependency · dashed: extra · backends are found through entry points, never imported"
    parts.append(
        f'<text x="{WIDTH / 2}" y="{height - 12}" text-anchor="middle" font-size="12" '
        f'fill="{COLOURS["faint"]}">{note}</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


def main(arguments: list[str], root: Path = ROOT) -> int:
    target, drawing = root / "docs" / "graph.svg", draw(root)
    if "--check" in arguments:
        current = target.read_text() if target.exists() else ""
        if current != drawing:
            print(
                f"{target.relative_to(root)} is out of date; make it anew with: python tools/draw_graph.py",
                file=sys.stderr,
            )
            return 1
        return 0
    target.write_text(drawing)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
