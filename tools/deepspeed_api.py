"""Write down the public API of the installed ``deepspeed.comm``, for tools/compatibility.py and its test.

python tools/deepspeed_api.py > tools/deepspeed_comm.json
"""

from __future__ import annotations

import inspect
import json
from typing import Any

__all__ = ["public_api"]


def public_api() -> dict[str, Any]:
    """``{"version": ..., "names": {name: parameters of a function, or what else it is}}``.

    A parameter is ``[name, default]`` with the default as text, or ``[name]`` where it is required.
    """
    import deepspeed
    import deepspeed.comm.constants
    from deepspeed import comm

    names: dict[str, Any] = {}
    for name in sorted(dir(comm)):
        value = getattr(comm, name)
        home = getattr(value, "__module__", "")
        if name.startswith("_") or inspect.ismodule(value):
            continue
        if inspect.isfunction(value) and home.startswith(("deepspeed.comm", "deepspeed.utils")):
            names[name] = _parameters(value)
        elif inspect.isclass(value):
            if home.startswith(("deepspeed.comm", "deepspeed.utils", "torch")):
                names[name] = "class"
        elif hasattr(deepspeed.comm.constants, name):
            names[name] = "constant"
        elif not inspect.isroutine(value) and (home == "" or home.startswith("deepspeed")):  # that of its class
            names[name] = "value"
    return {"version": deepspeed.__version__, "names": names}


def _parameters(function: Any) -> list[list[str]]:
    # DeepSpeed's wrapper for timing hides the signature, and keeps the function in its closure.
    for cell in getattr(function, "__closure__", None) or ():
        if inspect.isfunction(cell.cell_contents):
            function = cell.cell_contents
    found = []
    for parameter in inspect.signature(function).parameters.values():
        text = [parameter.name]
        if parameter.default is not parameter.empty:
            text.append(
                "..." if parameter.name == "debug" and function.__name__ != "configure" else repr(parameter.default)
            )
        found.append(text)
    return found


if __name__ == "__main__":
    print(json.dumps(public_api(), indent=1))
