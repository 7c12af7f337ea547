"""Wrong calls of public functions: which argument is meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from comm_collectives.help_texts import WRONG_ARGUMENTS, with_full_help
from comm_utils.errors import ArgumentTypeError
from comm_utils.torch_support.uncompiled import uncompiled

__all__ = ["explain_call", "with_keyword_errors"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def explain_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    other_names: Sequence[str] = (),
) -> ArgumentTypeError | None:
    """Return the error in the arguments' names or number; None where ``function`` accepts them.

    To be asked after a TypeError only: reading a signature takes tens of microseconds.

    Args:
        function: whose real signature counts.
        args, kwargs: as given by the caller.
        other_names: of arguments that the caller may give beyond the signature's.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        reason = str(error)
    else:
        return None
    name = getattr(function, "__name__", repr(function))
    if name == "__init__":  # without self
        name, args = function.__qualname__.partition(".")[0], args[1:]
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    named = [one.name for one in signature.parameters.values() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    unknown = [] if takes_any else [given for given in kwargs if given not in named]
    if not unknown:
        return ArgumentTypeError(f"{name}: {reason}; expected {name}{signature_text(signature)}")
    free = [one for one in (*named[len(args) :], *other_names) if one not in kwargs]
    near = get_close_matches(unknown[0].lower(), free, 1, 0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of: {', '.join((*named, *other_names))}"
    return ArgumentTypeError(f"{name}: {unknown[0]}: got an argument of this name, which does not exist; {hint}")


def signature_text(signature: inspect.Signature) -> str:
    """Return the names and defaults of a signature, without annotations."""
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def with_keyword_errors(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return ``function`` with errors that name a misspelt argument.

    The usual call costs one more Python frame; where that is too much, catch TypeError at the caller and ask
    :func:`explain_call`.
    """

    @wraps(function)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            # With a frame of the function's own the call was well-formed, and the error comes from within.
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                explained = explain_call(function, args, kwargs)
                if explained is not None:
                    raise explained from None
            raise

    return with_full_help(uncompiled(checked), WRONG_ARGUMENTS)
