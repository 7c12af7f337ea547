"""In the runner: turn a target into something that a rank can find."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from comm_utils.testing.messages import Ancestor, TargetRef

__all__ = ["Target", "locate"]

Target: TypeAlias = "Callable[..., Any] | str | os.PathLike[str]"


def locate(target: Target) -> TargetRef:
    """Return where a rank finds ``target``.

    Raises:
        TypeError: the target is not at the top level of a module (lambda, nested function, bound method, partial),
            or of one that no file has, such as a notebook.
        FileNotFoundError: the script does not exist.
    """
    if isinstance(target, os.PathLike) or (isinstance(target, str) and target.endswith(".py")):
        script = Path(target).resolve()
        if not script.is_file():
            raise FileNotFoundError(f"the script {script} does not exist")
        return TargetRef(file=str(script))
    if isinstance(target, str):
        module, colon, qualname = target.partition(":")
        if not (module and colon and qualname):
            raise TypeError(f"got the target {target!r}; write 'package.module:function' or the path of a .py file")
        return TargetRef(file=None, module=module, qualname=qualname)
    return _locate_function(target)


def _locate_function(function: Callable[..., Any]) -> TargetRef:
    qualname = getattr(function, "__qualname__", None)
    name = getattr(function, "__module__", None)
    owner = getattr(function, "__self__", None)
    if qualname is None or name is None or "<" in qualname or not (owner is None or isinstance(owner, ModuleType)):
        raise TypeError(
            f"a rank cannot find {function!r} again; the target must be a function at the top level of a module "
            "(no lambda, nested function, bound method or partial): pass what varies as arguments"
        )
    module = sys.modules.get(name)
    if module is not None and _resolve(module, qualname) is not function:
        raise TypeError(
            f"{name}.{qualname} is not the function that was passed, so a rank would run something else; "
            "pass the function that the module has under that name"
        )
    file = getattr(module, "__file__", None) or _source_of(function)
    # A notebook, the prompt and `python -c` have no file, or the name of one that does not exist.
    if name == "__main__" and not (file and os.path.isfile(file)):
        raise TypeError(
            f"a rank cannot find {qualname}() again, which a notebook, the prompt or `python -c` defines; put it into "
            "a module, such as a .py file beside the notebook, import it and pass that function"
        )
    return TargetRef(
        file=os.path.realpath(file) if file else None,
        module=name,
        qualname=qualname,
        package=getattr(module, "__package__", None),
        ancestors=_ancestors(name),
        rewrite=_is_rewritten(module),
    )


def _resolve(module: ModuleType, qualname: str) -> Any:
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _source_of(function: Callable[..., Any]) -> str | None:
    try:
        return inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # built in
        return None


def _ancestors(name: str) -> tuple[Ancestor, ...]:
    parts = name.split(".")[:-1]
    found = []
    for depth in range(1, len(parts) + 1):
        module = sys.modules.get(".".join(parts[:depth]))
        if module is not None:
            path = tuple(str(entry) for entry in getattr(module, "__path__", ()))
            found.append(Ancestor(module.__name__, getattr(module, "__file__", None), path))
    return tuple(found)


def _is_rewritten(module: ModuleType | None) -> bool:
    spec = getattr(module, "__spec__", None)
    return type(getattr(spec, "loader", None)).__module__ == "_pytest.assertion.rewrite"
