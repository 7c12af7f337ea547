"""The error of this package, the guess at what a user meant, and how a value is shown."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["MOST_KEY", "ConfigError", "closest", "shorten", "shorten_key"]

# No key of a configuration is so long.
MOST_KEY = 120
# Of a value, so many characters are shown.
_MOST_VALUE = 80


class ConfigError(ValueError):
    """A setting is wrong; the message names where it was read, its key, what was got and what was expected.

    What no terminal prints (half of a surrogate pair, which JSON may hold in a key) is written as an escape.

    :ivar source: where the setting was read, such as ``file ds_config.json``
    :ivar key: dotted key of the first setting at fault, empty where the source as a whole is
    """

    def __init__(self, message: str, *, source: str = "", key: str = "") -> None:
        super().__init__(message.encode("utf-8", "backslashreplace").decode())
        self.source = source
        self.key = key

    @classmethod
    def at(cls, source: str, key: str, problem: str) -> ConfigError:
        """Return the error for one setting."""
        return cls(": ".join(filter(None, (source, shorten_key(key), problem))), source=source, key=key)


def closest(name: str, known: Iterable[str], *, cutoff: float = 0.7) -> str | None:
    """Return the member of ``known`` that ``name`` most likely stands for; case, ``-`` and ``_`` do not count."""
    plain = {_plain(candidate): candidate for candidate in known}
    matches = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=cutoff)
    return plain[matches[0]] if matches else None


def shorten(value: object) -> str:
    """Return the representation of ``value``, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _MOST_VALUE else f"{text[: _MOST_VALUE - 3]}..."


def shorten_key(key: str) -> str:
    """Return ``key``, cut where no key is so long."""
    return key if len(key) <= MOST_KEY else f"{key[:MOST_KEY]}..."


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
