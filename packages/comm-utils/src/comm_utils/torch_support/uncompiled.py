"""Code that ``torch.compile`` leaves alone where it meets a call of it outside of its graphs.

Below a compiled function, Dynamo evaluates every call that is in no graph: the methods of a process group, which C++
calls, and whatever a function calls that it gave up. It would trace these calls one by one, and fail: on the attributes
of a process group, for example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, TypeVar

import torch

__all__ = ["uncompiled"]

T = TypeVar("T", bound=Callable[..., Any])


def uncompiled(target: T) -> T:
    """Have Dynamo run a function, or every method of a class, and all that these call, without compiling anything.

    Calls that Dynamo traces into the graph of their caller are traced as before. Marks the code, so that calls cost
    what they did, and does not import Dynamo.
    """
    for function in _functions(target):
        _mark(function.__code__)
    return target


def _functions(target: Any) -> Iterator[FunctionType]:
    if not isinstance(target, type):
        yield target
        return
    for found in vars(target).values():
        for one in (found, getattr(found, "fget", None), getattr(found, "__func__", None)):
            if isinstance(one, FunctionType):
                yield one


def _make_mark() -> Callable[[Any], None]:
    compiler: Any = getattr(torch._C, "_dynamo", None)
    module: Any = getattr(compiler, "eval_frame", None)
    try:
        skip = module._FrameAction.SKIP
        strategy, set_strategy = module._FrameExecStrategy(skip, skip), module.set_code_exec_strategy
    except AttributeError:  # torch 2.6, or one without Dynamo
        skip_one: Callable[[Any], None] = getattr(module, "skip_code", lambda code: None)
        return skip_one
    return lambda code: set_strategy(code, strategy)


_mark = _make_mark()
