"""`load_config`: one configuration from arguments, environment, file and defaults."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

from comm_config.compression import check_options
from comm_config.deepspeed import log_training, our_part, written_key
from comm_config.environment import environment_settings, warn_unknown
from comm_config.errors import ConfigError, shorten
from comm_config.files import FILE_VARIABLE, read_object
from comm_config.keys import Path, dotted, leaves, nested, set_values
from comm_config.models import CommConfig
from comm_config.validation import validate

__all__ = ["load_config", "sources_of"]

_ARGUMENT = "argument"
_DEFAULT = "default"
_DICT = "configuration dict"
_OBJECT = "configuration object"

Layer: TypeAlias = dict[Path, tuple[Any, str]]
"""Settings that one source has, each with the name of that source."""


def load_config(
    source: Mapping[str, Any] | str | os.PathLike[str] | CommConfig | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> CommConfig:
    """Return the settings in effect: ``overrides``, then the environment, then ``source``, then defaults.

    Lists, ``variables`` and ``compress_communication`` are replaced as a whole; nothing is merged into them.

    :param source: a document, the path of a JSON file, or a configuration; DeepSpeed's documents may be given as
        they are. None reads the file that ``COMM_CONFIG`` names, if any. Of a configuration that this function
        returned, what came from ``overrides`` stays above the environment.
    :param environ: the environment; None means that of the process, now
    :param overrides: values by dotted key, such as ``{"process_group.backend": "gloo"}``; None values are skipped
    :raises ConfigError: a file that cannot be read, an unknown key, a wrong value, or a setting that is not served
    """
    environ = os.environ if environ is None else environ
    effective: Layer = {}
    for layer in _layers(source, environ, overrides or {}):
        effective.update(layer)
    sources = {dotted(path): label for path, (_, label) in effective.items()}
    check_options({path[0]: value for path, (value, _) in effective.items() if len(path) == 1}, sources)
    config = CommConfig.model_validate(nested({path: value for path, (value, _) in effective.items()}))
    _check_reductions(config, sources)
    config._sources = sources
    return config


def _check_reductions(config: CommConfig, sources: Mapping[str, str]) -> None:
    """Raise where results are to depend on the ranks' elements alone, and on a compression."""
    asked = [key for key, value in config.reductions if value]
    if asked and config.compression() is not None:
        key = f"reductions.{asked[0]}"
        text = "got True together with compress_communication or communication_data_type, whose results depend on "
        raise ConfigError.at(sources.get(key, ""), key, f"{text}where an element lies; leave one of them out")


def sources_of(config: CommConfig) -> dict[str, str]:
    """Return where each setting was read, by dotted key, settings in the order of definition.

    ``default``, ``argument``, ``environment variable NAME``, ``file PATH``, ``configuration dict`` or
    ``configuration object`` (a `CommConfig` that the program made itself).
    """
    given = {dotted(path): label for path, (_, label) in _layer(config, _OBJECT).items()}
    return {dotted(path): given.get(dotted(path), _DEFAULT) for path, _ in leaves(CommConfig)}


def _layer(config: CommConfig, label: str) -> Layer:
    """Return the settings of ``config``, with ``label`` as their source unless another was recorded."""
    recorded = config._sources or {}
    return {path: (value, recorded.get(dotted(path), label)) for path, value in set_values(config)}


def _layers(source: object, environ: Mapping[str, str], overrides: Mapping[str, Any]) -> Iterator[Layer]:
    """Yield what each source sets, the weakest first."""
    given = _layer(source, _OBJECT) if isinstance(source, CommConfig) else _document(source, environ)
    # What an earlier call of load_config was given as an argument stays above the environment.
    arguments = {path: setting for path, setting in given.items() if setting[1] == _ARGUMENT}
    yield given
    warn_unknown(environ)
    for label, config in environment_settings(environ):
        yield _layer(config, label)
    yield arguments
    yield from _overrides(overrides)


def _document(source: object, environ: Mapping[str, str]) -> Layer:
    if source is None:
        path = environ.get(FILE_VARIABLE, "").strip()
        return _file(path, f"file {path} (named by {FILE_VARIABLE})") if path else {}
    if isinstance(source, Mapping):
        return _of_document(source, _DICT)
    if not isinstance(source, (str, os.PathLike)):
        kind = type(source).__name__
        raise ConfigError(f"got a configuration of type {kind}, expected a dict, a path, a CommConfig or None")
    path = os.fspath(source)
    if not isinstance(path, str) or not path.strip() or path.lstrip().startswith("{"):
        raise ConfigError(f"got {shorten(path)}, expected the path of a JSON file (text: pass json.loads(text))")
    return _file(path, f"file {path}")


def _file(path: str, label: str) -> Layer:
    return _of_document(read_object(path, label), label)


def _of_document(document: Mapping[str, Any], label: str) -> Layer:
    log_training(document, label)
    return _layer(validate(our_part(document), label, partial(written_key, document)), label)


def _overrides(overrides: Mapping[str, Any]) -> Iterator[Layer]:
    given = {tuple(str(key).split(".")): value for key, value in overrides.items() if value is not None}
    for path in sorted(given, key=len):
        yield _layer(validate(nested({path: given[path]}), _ARGUMENT), _ARGUMENT)
