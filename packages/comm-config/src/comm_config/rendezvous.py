"""`rendezvous_settings`: where the ranks meet, of a configuration that is wrong elsewhere."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from comm_config.errors import ConfigError
from comm_config.files import FILE_VARIABLE, parse_object, read_object
from comm_config.settings import Settings, resolve

__all__ = ["rendezvous_settings"]


def _text(value: Any) -> str:
    if not (isinstance(value, str) and value.strip()) or "\0" in value:
        raise ValueError(value)
    return value


def _url(value: Any) -> str:
    if "://" not in _text(value):
        raise ValueError(value)
    return str(value)


def _port(value: Any) -> int:
    port = int(value)
    if isinstance(value, bool) or not 0 <= port <= 65535:
        raise ValueError(value)
    return port


def _seconds(value: Any) -> float:
    seconds = float(value)
    if isinstance(value, bool) or not 0 < seconds < 1e9:
        raise ValueError(value)
    return seconds


_KEYS: Mapping[str, Callable[[Any], Any]] = {
    "process_group.init_method": _url,
    "launch.master_addr": _text,
    "launch.master_port": _port,
    "timeouts.init_s": _seconds,
}


def rendezvous_settings(source: object, environ: Mapping[str, str], overrides: Mapping[str, Any]) -> Settings:
    """Return the settings that say where and how long the ranks meet, and the defaults of all others.

    A rank that cannot read its configuration reports that to the other ranks, and so has to find them. Each setting is
    taken from the strongest source that has a valid one, as `load_config` would; what is wrong is skipped. pydantic is
    not imported, for which a process that reports a lack of memory has none.

    :param source: as of `load_config`
    :param overrides: as of `load_config`; keys of other settings are ignored
    """
    found = resolve(environ={})
    sources = dict(found.sources)
    document = _document(source, environ)
    for key, parse in _KEYS.items():
        section, _, name = key.partition(".")
        # The strongest comes last.
        for label, value in [
            ("configuration", _member(_member(document, section), name)),
            *_of_environment(section, name, environ),
            ("argument", overrides.get(key)),
        ]:
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                setattr(found.sections[section], name, parse(value))
                sources[key] = label
    return replace(found, sources=sources)


def _document(source: object, environ: Mapping[str, str]) -> object:
    path = environ.get(FILE_VARIABLE, "").strip() if source is None else source
    if isinstance(path, (str, os.PathLike)) and path:
        with contextlib.suppress(ConfigError):
            return read_object(os.fspath(path), "")
    return source


def _member(value: object, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _of_environment(section: str, name: str, environ: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield the values of the variable of a section and of that of the setting itself."""
    variable = f"COMM_{section}".upper()
    with contextlib.suppress(ConfigError):
        yield f"environment variable {variable}", parse_object(environ.get(variable, ""), "").get(name)
    variable = f"{variable}__{name}".upper()
    yield f"environment variable {variable}", environ.get(variable)
