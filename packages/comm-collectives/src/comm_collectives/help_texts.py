"""The parts of docstrings that public functions have in common, written once.

A docstring in the source describes what is particular to a function. ``help()`` shows the arguments, results and errors
that are the same everywhere as well.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

__all__ = ["COLLECTIVE_ERRORS", "OBJECT_ERRORS", "WRONG_ARGUMENTS", "with_full_help"]

Function = TypeVar("Function", bound=Callable[..., Any])

_ARGUMENTS = {
    "allow_pickle": "True pickles objects without an encoding and unpickles those of other ranks, whose data can run "
    "code; None is what ``set_object_policy`` says.",
    "async_op": "True starts the operation and returns a handle at once.",
    "dst": "the global rank that receives.",
    "group": "a process group; None is the world group.",
    "group_dst": "``dst`` as a rank within the group, instead of it.",
    "group_src": "``src`` as a rank within the group, instead of it.",
    "src": "the global rank that sends.",
    "tag": "a message is received by the call with the same one; other than 0 only where the backend has tags (not "
    "NCCL).",
    "timeout": "seconds or a timedelta that the call may take; None is the timeout of the group.",
}
_HANDLE = "None; with ``async_op=True`` a :class:`Work`, whose ``wait()`` returns when the result may be used."

#: Errors of every function that checks the names and types of its arguments.
WRONG_ARGUMENTS = {
    "ArgumentError": "the value of an argument is wrong; the message names it. Nothing was sent.",
    "ArgumentTypeError": "the type of an argument is wrong; the message names it. Nothing was sent.",
}
#: Errors of every collective.
COLLECTIVE_ERRORS = {
    **WRONG_ARGUMENTS,
    "NotInitializedError": "nothing is initialised, or the group was destroyed.",
    "BrokenGroupError": "an earlier call on the group failed.",
    "PeerLostError": "another rank ended. The group is broken afterwards.",
    "CommTimeoutError": "another rank did not call in time. The group is broken afterwards.",
    "CollectiveMismatchError": "the ranks' calls differ, here or earlier. The group is broken afterwards.",
    "BackendUnavailableError": "the process lacks memory, threads or descriptors, or the package for the group.",
}
#: Errors of every exchange of Python objects.
OBJECT_ERRORS = {
    **COLLECTIVE_ERRORS,
    "ObjectExchangeError": "another rank cannot send its object, or does not accept one. No object was delivered.",
    "ObjectDecodeError": "this rank receives a pickle that it does not allow, or a damaged or too large message.",
}

_SECTIONS = ("Args", "Returns", "Raises")


def with_full_help(function: Function, errors: Mapping[str, str]) -> Function:
    """Add to the docstring of ``function`` the common arguments, results and errors that it does not describe.

    Args:
        errors: classes to their meaning, for ``Raises``.
    """
    if function.__doc__ is None:  # python -OO
        return function
    text, sections = _split(inspect.cleandoc(function.__doc__))
    names = list(inspect.signature(function).parameters)
    described = _described(sections, "Args")
    missing = [name for name in names if name in _ARGUMENTS and name not in described]
    _extend(sections, "Args", {name: _ARGUMENTS[name] for name in missing})
    if "async_op" in names and not re.search(r"\breturn", text + sections.get("Returns", ""), re.I):
        sections["Returns"] = f"    {_HANDLE}\n"
    known = _described(sections, "Raises")
    _extend(sections, "Raises", {name: why for name, why in errors.items() if name not in known})
    parts = [text, *(f"{name}:\n{sections[name].rstrip()}" for name in _SECTIONS if sections.get(name, "").strip())]
    function.__doc__ = "\n\n".join(parts) + "\n"
    return function


def _split(doc: str) -> tuple[str, dict[str, str]]:
    """Return what comes before the sections, and the sections without their titles."""
    text, *rest = re.split(rf"^({'|'.join(_SECTIONS)}):\n", doc, flags=re.M)
    return text.rstrip(), dict(zip(rest[::2], rest[1::2], strict=True))


def _described(sections: Mapping[str, str], title: str) -> set[str]:
    """Return the names of the entries of a section; one entry may have several."""
    return set(re.findall(r"\w+", " ".join(re.findall(r"^    ([\w*][\w, *]*):", sections.get(title, ""), re.M))))


def _extend(sections: dict[str, str], title: str, entries: Mapping[str, str]) -> None:
    wrapped = textwrap.TextWrapper(120, "    ", "        ", break_long_words=False, break_on_hyphens=False)
    lines = "".join(f"{wrapped.fill(f'{name}: {entry}')}\n" for name, entry in entries.items())
    sections[title] = f"{sections.get(title, '').rstrip()}\n{lines}".lstrip("\n")
