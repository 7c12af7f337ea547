"""What modules of the packages take from one another is in ``__all__`` of where it stands."""

from __future__ import annotations

import ast

from workspace import ROOT

TREES = {
    ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
    for source in ROOT.glob("packages/*/src")
    for path in source.rglob("*.py")
}


def exported(tree: ast.Module) -> set[str] | None:
    """Return ``__all__``; None where there is none, or it is computed."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value)) if isinstance(node.value, ast.List) else None
    return None


def defined(tree: ast.Module) -> set[str]:
    """Return the public names that a module gives itself; what it imports is another module's."""
    found = set()
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name))
    return {name for name in found if not name.startswith("_")}


def taken(tree: ast.Module) -> set[tuple[str, str]]:
    """Return modules, and the names that are imported from them or read as their attributes."""
    nodes = list(ast.walk(tree))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    names = [(str(node.module), one) for node in imports if node.module in TREES for one in node.names]
    found = {(module, one.name) for module, one in names}
    modules = {one.asname or one.name: f"{module}.{one.name}" for module, one in names}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            found.add((modules[node.value.id], node.attr))
    return found


def test_names_that_other_modules_take_are_exported() -> None:
    public = {module: (exported(tree), defined(tree)) for module, tree in TREES.items()}
    hidden = {
        f"{module}.{name}"
        for user, tree in TREES.items()
        for module, name in taken(tree)
        if module != user and module in public
        for names, own in [public[module]]
        if names is not None and name in own - names
    }
    assert not hidden
