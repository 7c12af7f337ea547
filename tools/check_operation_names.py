"""Check that what is known of an operation stands in the table of operations alone.

    python tools/check_operation_names.py

Outside the table, the façade, the wrappers and the implementations, no dict, set, list, tuple, comparison or match of a
package names an operation, as a string, a word of a string that is split, or an attribute that is compared; nor does
an assignment to an entry of a table. They ask ``comm_utils.operations``, so that a new row is enough. ``EXCEPTIONS``
has the few places that may, with the reason. Lists in ``__all__`` name functions and do not count. ``PROBE``, in any
use, stands in at most ``MOST_FILES`` files beside those that have to name each operation.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

__all__ = [
    "ALLOWED",
    "EXCEPTIONS",
    "MOST_EXCEPTIONS",
    "MOST_FILES",
    "PROBE",
    "UNCOUNTED",
    "check",
    "check_places",
    "main",
    "names_in",
]

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "packages" / "comm-utils" / "src"))

#: Folders and files, below ``packages/*/src``, that say what an operation is, offer it or carry it out.
ALLOWED: Mapping[str, str] = {
    "comm_utils/operations": "the table",
    "comm_utils/backend.py": "the contract, whose methods are the operations",
    "comm_orchestrator/facade": "the façade",
    "comm_backend_ccl/arguments.py": "an implementation",
    "comm_backend_ccl/backend.py": "an implementation",
    "comm_backend_ccl/fast_path": "an implementation",
    "comm_backend_ccl/process_group.py": "an implementation",
    "comm_backend_torch/collectives.py": "an implementation",
    "comm_backend_torch/fast_path.py": "an implementation",
    "comm_backend_torch/starts.py": "an implementation",
    "comm_collectives/all_to_all.py": "an implementation",
    "comm_collectives/derived_fast_path.py": "an implementation",
    "comm_collectives/point_to_point.py": "an implementation",
    "comm_collectives/reduction": "an implementation",
    "comm_collectives/traced.py": "what torch can trace of its own",
    "comm_collectives/recorded": "a wrapper",
    "comm_collectives/wrapping.py": "the base of wrappers",
}

#: (file, operation) -> why it may be named there.
EXCEPTIONS: Mapping[tuple[str, str], str] = {
    ("comm_backend_torch/capabilities.py", "reduce_scatter_tensor"): "gloo has it in name only, as the comment says",
    ("comm_backend_torch/point_to_point.py", "isend"): "torch's function, by which the entries of a batch tell sends",
    ("comm_collectives/checked.py", "isend"): "torch's function, by which the entries of a batch tell sends",
    ("comm_collectives/objects/agreement.py", "broadcast_object_list"): "its error names the length of the list",
    ("comm_collectives/objects/agreement.py", "send_object_list"): "its error names the length of the list",
    ("comm_collectives/objects/agreement.py", "reduce_object"): "its error names the op",
    ("comm_utils/testing/conformance_collectives.py", "all_reduce"): "its fast path is tested with every op and dtype",
    ("comm_utils/testing/conformance_collectives.py", "reduce_scatter_tensor"): "a backend need not have it",
    ("comm_utils/testing/conformance_fast_path.py", "all_reduce"): "the key that stands for any fast path of a group",
    ("comm_utils/testing/conformance_ranks.py", "all_reduce"): "the key that stands for any fast path of a group",
}
MOST_EXCEPTIONS = 10

#: This operation stands in no more than so many files outside ``UNCOUNTED``.
PROBE = "all_to_all_single"
MOST_FILES = 12

#: The table, the façade, the wrappers and the implementations, which cannot do without the names of operations.
UNCOUNTED = (
    "comm_backend_ccl",
    "comm_backend_torch",
    "comm_collectives/__init__.py",
    "comm_collectives/all_to_all.py",
    "comm_collectives/recorded",
    "comm_collectives/traced.py",
    "comm_collectives/wrapping.py",
    "comm_orchestrator/facade",
    "comm_utils/operations",
)


def main() -> None:
    from comm_utils import operations

    problems = check(ROOT / "packages", {row.name for row in operations.rows()}) + check_places(ROOT / "packages")
    if problems:
        sys.exit("\n".join(problems))


def check(
    packages: Path, operations: Collection[str], exceptions: Mapping[tuple[str, str], str] = EXCEPTIONS
) -> list[str]:
    """Return what is wrong with the sources of ``packages/*/src``, a line each."""
    problems, unused, probed = [], set(exceptions), []
    for path in sorted(packages.glob("*/src/**/*.py")):
        relative = path.relative_to(packages)
        module = "/".join(relative.parts[2:])
        text = path.read_text(encoding="utf-8")
        if PROBE in text and not _is_in(module, UNCOUNTED):
            probed.append(module)
        if _is_in(module, ALLOWED):
            continue
        for line, name, where in names_in(ast.parse(text), operations):
            if (module, name) in exceptions:
                unused.discard((module, name))
            else:
                problems.append(
                    f"packages/{relative}:{line}: {where} names the operation {name!r}: ask comm_utils.operations, or "
                    "list it in EXCEPTIONS with its reason"
                )
    problems += [f"EXCEPTIONS: {module} does not name {name!r}; remove the line" for module, name in sorted(unused)]
    if len(exceptions) > MOST_EXCEPTIONS:
        problems.append(f"EXCEPTIONS: got {len(exceptions)}; expected at most {MOST_EXCEPTIONS}")
    if len(probed) > MOST_FILES:
        problems.append(f"{PROBE} stands in {len(probed)} files; expected at most {MOST_FILES}: {', '.join(probed)}")
    return problems


def check_places(packages: Path) -> list[str]:
    """Return the entries of ``ALLOWED`` and ``UNCOUNTED`` whose file or folder is gone, a line each."""
    return [
        f"{table}: {place} is not there; remove the line"
        for table, places in (("ALLOWED", ALLOWED), ("UNCOUNTED", UNCOUNTED))
        for place in places
        if not any(packages.glob(f"*/src/{place}"))
    ]


def _is_in(module: str, places: Iterable[str]) -> bool:
    return any(module == one or module.startswith(f"{one}/") for one in places)


def names_in(tree: ast.AST, operations: Collection[str]) -> Iterator[tuple[int, str, str]]:
    """Return the operations that dicts, sets, lists, tuples, comparisons and matches name: line, name, where."""
    exported = {id(one) for node in ast.walk(tree) if _is_export(node) for one in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in exported:
            continue
        for where, values in _named_by(node):
            for one in values:
                if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value in operations:
                    yield one.lineno, one.value, where
                elif isinstance(one, ast.Attribute) and one.attr in operations and where in _OF_ATTRIBUTES:
                    yield one.lineno, one.attr, where
        for line, word in _split_words(node):
            if word in operations:
                yield line, word, "a string that is split"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
            for keyword in node.keywords:
                if keyword.arg in operations:
                    yield keyword.value.lineno, str(keyword.arg), "a dict"


#: Where an attribute tells operations apart; in a table it may be the implementation of one.
_OF_ATTRIBUTES = ("a comparison", "a match")


def _split_words(node: ast.AST) -> list[tuple[int, str]]:
    """Return the words of ``"a b".split()``, each with its line."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split"):
        return []
    text = node.func.value
    separators = [one.value for one in node.args[:1] if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    if not (isinstance(text, ast.Constant) and isinstance(text.value, str)):
        return []
    return [(node.lineno, word.strip()) for word in text.value.split(separators[0] if separators else None)]


def _is_export(node: ast.AST) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(one, ast.Name) and one.id == "__all__" for one in targets)


def _named_by(node: ast.AST) -> Iterator[tuple[str, Iterable[ast.AST | None]]]:
    if isinstance(node, ast.Dict):
        yield "a dict", [*node.keys, *node.values]
    elif isinstance(node, ast.Set):
        yield "a set", node.elts
    elif isinstance(node, ast.List):
        yield "a list", node.elts
    elif isinstance(node, ast.Tuple):
        yield "a tuple", node.elts
    elif isinstance(node, ast.Compare):
        yield "a comparison", [node.left, *node.comparators]
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        yield "an entry of a table", [node.slice]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setdefault":
        yield "an entry of a table", node.args[:1]
    elif isinstance(node, ast.MatchValue):
        yield "a match", [node.value]


if __name__ == "__main__":
    main()
