"""``COMM_SECTION__KEY`` variables, and DeepSpeed's timeout."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from comm_config.errors import ConfigError, closest, shorten
from comm_config.fields import MAX_TIMEOUT_S
from comm_config.files import FILE_VARIABLE, parse_object
from comm_config.keys import Path, dotted, leaves, members, nested, sections
from comm_config.models import CommConfig
from comm_config.secret import SECRET_VARIABLE
from comm_config.validation import validate

__all__ = ["environment_settings", "environment_variables", "unknown_variables", "warn_unknown"]

_PREFIX = "COMM_"
# Read by comm_utils.testing, and by the build of comm-backend-ccl.
_NO_SETTINGS = ("COMM_TESTS_FORK", "COMM_TESTS_PATIENCE", "COMM_CCL_WITHOUT_NATIVE")
_DEEPSPEED_TIMEOUT = "DEEPSPEED_TIMEOUT"
_logger = logging.getLogger("comm")
_warned: set[str] = set()


@functools.cache
def environment_variables() -> Mapping[str, Path]:
    """Return every variable that is understood with the path it sets, sections before what they hold."""
    paths = [*sections(CommConfig), *(path for path, _ in leaves(CommConfig))]
    return {_PREFIX + "__".join(path).upper(): path for path in sorted(paths, key=len)}


def environment_settings(environ: Mapping[str, str]) -> Iterator[tuple[str, CommConfig]]:
    """Yield what each variable sets, with the variable as its source, later ones winning.

    An empty variable counts as absent.

    :raises ConfigError: a variable that is understood has a wrong value
    """
    minutes = environ.get(_DEEPSPEED_TIMEOUT, "").strip()
    if minutes:
        source = f"environment variable {_DEEPSPEED_TIMEOUT}"
        yield source, validate({"timeouts": {"collective_s": _seconds(minutes, source)}}, source)
    fields = dict(leaves(CommConfig))
    for name, path in environment_variables().items():
        text = environ.get(name, "").strip()
        if text:
            source = f"environment variable {name}"
            yield source, validate(nested({path: _parse(text, fields.get(path), source, dotted(path))}), source)


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return each ``COMM_*`` variable that nothing reads, with the one it is most likely a misspelling of."""
    known = [*environment_variables(), FILE_VARIABLE, SECRET_VARIABLE, *_NO_SETTINGS]
    names = sorted(name for name in environ if name.startswith(_PREFIX) and name not in known)
    return {name: closest(name, known, cutoff=0.8) for name in names}


def warn_unknown(environ: Mapping[str, str]) -> None:
    """Log each ``COMM_*`` variable that nothing reads, once in a process; it may be another program's."""
    for name, guess in unknown_variables(environ).items():
        if name not in _warned:
            _warned.add(name)
            hint = f"; did you mean {guess}?" if guess else ""
            _logger.warning("environment variable %s is not a setting and is ignored%s", name, hint)


def _parse(text: str, field: FieldInfo | None, source: str, key: str) -> Any:
    """Return the value that ``text`` spells for ``field``, or for a section where that is None."""
    if field is None:
        return parse_object(text, source, key)
    kinds = tuple(members(field.annotation))
    if text == "null" and type(None) in kinds:
        return None
    if list in kinds:
        return _parse_list(text, source, key)
    if text.startswith("{") and any(kind is dict or issubclass(kind, BaseModel) for kind in kinds):
        return parse_object(text, source, key)
    return text


def _parse_list(text: str, source: str, key: str) -> Any:
    if not text.startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    try:
        return json.loads(text)
    except (RecursionError, ValueError) as error:
        raise ConfigError.at(source, key, f"got {shorten(text)}, which is not valid JSON: {error}") from None


def _seconds(minutes: str, source: str) -> float:
    try:
        seconds = float(minutes) * 60
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise ConfigError(
            f"{source}: got {shorten(minutes)}, expected a positive number of minutes of at most "
            f"{MAX_TIMEOUT_S // 60:.0f}",
            source=source,
            key="timeouts.collective_s",
        )
    return seconds
