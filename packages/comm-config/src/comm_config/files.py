"""JSON files: read whole, or refused with the place of the mistake."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comm_config.errors import ConfigError

__all__ = ["FILE_VARIABLE", "parse_object", "read_object"]

FILE_VARIABLE = "COMM_CONFIG"
"""Names the configuration file where none was given."""

# Far more than any configuration has; a pipe or a device never ends.
_MOST_CHARACTERS = 1 << 24


class _Object(dict[str, Any]):
    """A JSON object that remembers which keys it had twice."""

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        seen: set[str] = set()
        self.repeated = [key for key, _ in pairs if key in seen or seen.add(key)]  # type: ignore[func-returns-value]


def read_object(path: str, source: str) -> dict[str, Any]:
    """Return the JSON object in the file at ``path`` (UTF-8, with or without a byte order mark).

    :raises ConfigError: it cannot be read, is not JSON, is no object, or has a key twice
    """
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            text = file.read(_MOST_CHARACTERS + 1)
    except FileNotFoundError:
        raise ConfigError.at(source, "", "there is no such file; expected a JSON file") from None
    except IsADirectoryError:
        raise ConfigError.at(source, "", "is a directory; expected a JSON file") from None
    except UnicodeDecodeError as error:
        raise ConfigError.at(source, "", f"is not UTF-8 (byte {error.start}); expected a JSON file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError.at(source, "", f"cannot be read: {reason}") from None
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError.at(source, "", f"has more than {_MOST_CHARACTERS} characters; expected a configuration")
    return parse_object(text, source)


def parse_object(text: str, source: str, key: str = "") -> dict[str, Any]:
    """Return the JSON object that ``text`` holds.

    :raises ConfigError: it is not JSON, is no object, or has a key twice
    """
    try:
        document = json.loads(text, object_pairs_hook=_Object)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError.at(source, key, f"is not valid JSON: {error.msg} ({where})") from None
    except (RecursionError, ValueError) as error:
        raise ConfigError.at(source, key, f"is not usable JSON: {error}") from None
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise ConfigError.at(source, key, f"expected a JSON object at the top, got {kind}")
    _refuse_repeated_keys(document, source, key)
    return document


def _refuse_repeated_keys(document: dict[str, Any], source: str, prefix: str) -> None:
    pending: list[tuple[str, Any]] = [(prefix, document)]
    while pending:
        key, value = pending.pop()
        if isinstance(value, _Object):
            if value.repeated:
                raise ConfigError.at(source, _join(key, value.repeated[0]), "is given twice in the same object")
            pending.extend((_join(key, name), inner) for name, inner in value.items())
        elif isinstance(value, list):
            pending.extend((f"{key}[{index}]", inner) for index, inner in enumerate(value))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
