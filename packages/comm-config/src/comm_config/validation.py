"""From a document to a `CommConfig`, and from pydantic's errors to ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from comm_config.compression import UNION_TAGS
from comm_config.errors import MOST_KEY, ConfigError, closest, shorten, shorten_key
from comm_config.keys import Path, dotted, leaves, model_at, sections
from comm_config.models import CommConfig

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = ["validate"]

_EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "invalid_key": "keys that are strings",
    "list_type": "a list",
    "string_pattern_mismatch": "a string that is not blank and holds no NUL character",
    "string_type": "a string",
}
# What one error names, in how many characters.
_MOST_NAMED = 20
_LONGEST = 3000
_REWORDED = (
    ("Value error, ", ""),
    ("Input should be greater", "expected a number greater"),
    ("Input should be less", "expected a number less"),
    ("Input should be", "expected"),
)


def validate(document: Mapping[str, Any], source: str, written: Callable[[str], str] = str) -> CommConfig:
    """Return the settings of ``document``, which may hold any part of them.

    :param written: returns the key that the user wrote for one of ours
    :raises ConfigError: an unknown key or a wrong value; all of them are named, or the first ones of many
    """
    try:
        return CommConfig.model_validate(document)
    except ValidationError as error:
        found = error.errors(include_url=False)
        problems = [(written(key), text) for key, text in map(_problem, found[:_MOST_NAMED])]
    lines: list[str] = []
    length = 0
    for key, text in problems:
        line = ": ".join(filter(None, (source, shorten_key(key), text)))
        length += len(line)
        if lines and length > _LONGEST:
            break
        lines.append(line)
    if len(found) > len(lines):
        lines.append(f"{source}: and {len(found) - len(lines)} more like these")
    raise ConfigError("\n".join(lines), source=source, key=problems[0][0])


def _problem(details: ErrorDetails) -> tuple[str, str]:
    parts = details["loc"]
    # The last part of an unknown key is the key, which may be called as a tag is.
    keys = len(parts) - 1 if details["type"] == "extra_forbidden" else len(parts)
    path = (*(part for part in parts[:keys] if part not in UNION_TAGS), *parts[keys:])
    names = tuple(str(part) for part in path)
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    if details["type"] == "extra_forbidden":
        return key, _unknown(names)
    got = shorten(details["input"])
    if details["type"] in ("model_type", "model_attributes_type"):
        return key, f"got {got}, expected an object with {_listed(model_at(CommConfig, names).model_fields)}"
    return key, f"got {got}, {_expected(details)}{_meant(details)}"


def _expected(details: ErrorDetails) -> str:
    if details["type"] in _EXPECTED:
        return f"expected {_EXPECTED[details['type']]}"
    text = details["msg"]
    for theirs, ours in _REWORDED:
        text = text.replace(theirs, ours)
    return text


def _meant(details: ErrorDetails) -> str:
    if details["type"] != "literal_error":
        return ""
    choices = details["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
    guess = closest(str(details["input"])[:MOST_KEY], choices)
    return f"; did you mean {guess!r}?" if guess else ""


def _unknown(path: Path) -> str:
    *parent, name = path
    known = model_at(CommConfig, tuple(parent)).model_fields
    guess = closest(name[:MOST_KEY], known) or _elsewhere(name)
    hint = f"; did you mean {guess!r}?" if guess else ""
    return f"unknown key{hint} (known here: {', '.join(known)})"


def _elsewhere(name: str) -> str | None:
    """Return the full key of a section or setting that has this name in another place."""
    paths = [*sections(CommConfig), *(path for path, _ in leaves(CommConfig))]
    return next((dotted(path) for path in paths if path[-1] == name), None)


def _listed(names: Iterable[str]) -> str:
    shown = [repr(name) for name in names]
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")
