"""In a rank: find the target again."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from comm_utils.testing.messages import Ancestor, TargetRef

__all__ = ["load_function"]


@cache
def load_function(target: TargetRef) -> Callable[..., Any]:
    """Return the function that ``target`` names, its module loaded once and under the name it has in the runner.

    The same name on both sides is what lets instances of a test module's classes travel in both directions.

    Raises:
        ImportError: the module cannot be loaded.
        AttributeError: it has no such function.
    """
    found: Any = _load_module(target)
    for part in target.qualname.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _load_module(target: TargetRef) -> ModuleType:
    # A program's own module must not run its `if __name__ == "__main__"` part again; multiprocessing's name for it
    # is known in the runner too.
    name = "__mp_main__" if target.module == "__main__" else target.module
    known = sys.modules.get(name)
    if known is not None and (target.file is None or _is_from(getattr(known, "__file__", None), target.file)):
        return known
    if target.file is None or (not target.rewrite and _leads_to(name, target.file)):
        return importlib.import_module(name)
    for ancestor in target.ancestors:
        _load_ancestor(ancestor)
    return _load_file(name, target)


def _load_file(name: str, target: TargetRef) -> ModuleType:
    assert target.file is not None
    spec = importlib.util.spec_from_file_location(name, target.file)
    if spec is None:
        raise ImportError(f"{target.file} is not a Python source file")
    module = _register(spec)
    if target.module == "__main__":
        module.__package__ = target.package
        sys.modules["__main__"] = module
    try:
        if target.rewrite:
            exec(_rewritten_code(target.file), module.__dict__)
        elif spec.loader is not None:
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _leads_to(name: str, file: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and _is_from(spec.origin, file)


def _is_from(found: str | None, file: str) -> bool:
    return found is not None and os.path.realpath(found) == file


def _load_ancestor(ancestor: Ancestor) -> None:
    if ancestor.name in sys.modules:
        return
    if ancestor.file is not None and _leads_to(ancestor.name, os.path.realpath(ancestor.file)):
        importlib.import_module(ancestor.name)
        return
    if ancestor.file is None:
        spec = ModuleSpec(ancestor.name, None, is_package=True)
        spec.submodule_search_locations = list(ancestor.search_path)
        _register(spec)
        return
    found = importlib.util.spec_from_file_location(
        ancestor.name, ancestor.file, submodule_search_locations=list(ancestor.search_path)
    )
    if found is not None and found.loader is not None:
        found.loader.exec_module(_register(found))


def _register(spec: ModuleSpec) -> ModuleType:
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    parent, _, child = spec.name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)
    return module


def _rewritten_code(file: str) -> CodeType:
    """Compile with pytest's assertions, so that a failing ``assert`` in a rank shows the values too."""
    source = Path(file).read_bytes()
    tree = ast.parse(source, filename=file)
    try:
        from _pytest.assertion.rewrite import rewrite_asserts  # not public: without it, plain asserts

        rewrite_asserts(tree, source, file)
    except (ImportError, TypeError):
        tree = ast.parse(source, filename=file)
    return compile(tree, file, "exec", dont_inherit=True)
