"""`resolve`: the settings in force as plain values, without pydantic where nothing was configured.

Building the models takes a tenth of a second, which every rank of every job would pay at its start.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from comm_config.models import CommConfig

__all__ = ["DEFAULTS", "Settings", "resolve"]

#: What `CommConfig()` says in the sections that matter where nothing was configured.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "process_group": {"backend": None, "init_method": None},
    "timeouts": {"init_s": None, "collective_s": None},
    "launch": {"auto_mpi_discovery": True, "master_addr": None, "master_port": 29500},
    "comms_logger": {
        "enabled": False,
        "verbose": False,
        "prof_all": True,
        "debug": False,
        "prof_ops": [],
        "ranges": False,
        "trace": None,
    },
    "objects": {"allow_pickle": False, "max_bytes": 1 << 30},
    "hierarchical": {"enabled": True, "min_size_bytes": None},
    "reductions": {"deterministic": False, "compensated": False},
    "flight_recorder": {"enabled": True, "directory": None, "records": 8192, "keep": 4, "keep_clean": False},
    "checks": {"enabled": True, "mismatch": "auto", "warn_after_s": 30.0, "signals": True},
    "training": {
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "sparse_gradients": True,
        "stage": 0,
        "reduce_bucket_size": None,
        "allgather_bucket_size": None,
        "overlap_comm": True,
        "model_parallel_plan": {},
    },
}
_VARIABLES = ("COMM_", "DEEPSPEED_TIMEOUT")
_BACKEND = re.compile(r"(?!auto$)[a-z][a-z0-9_]*")  # "auto" is another name for None
_PLAIN: Mapping[str, Callable[[Any], bool]] = {
    "process_group.backend": lambda value: isinstance(value, str) and bool(_BACKEND.fullmatch(value)),
    "timeouts.collective_s": lambda value: type(value) in (int, float) and 0.001 <= value < 1e9,
    "launch.master_port": lambda value: type(value) is int and 0 <= value <= 65535,
}


@dataclass(frozen=True)
class Settings:
    """Settings in force: one attribute for each section, such as ``settings.timeouts.init_s``.

    :param sections: values by section and key
    :param sources: where each was read, by dotted key, as `sources_of` says it
    :param variables: to set for the communication libraries, as `network_environment` says it
    :param compression: the arguments of `comm_collectives.Compression`; None for no compression
    :param seq_parallel_compression: the same for what is compressed under the name "seq_parallel"
    :param network_values: what was set in the section ``network``, by dotted key
    """

    sections: Mapping[str, SimpleNamespace]
    sources: Mapping[str, str]
    variables: Mapping[str, str]
    compression: Mapping[str, Any] | None = None
    seq_parallel_compression: Mapping[str, Any] | None = None
    network_values: Mapping[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.sections:
            raise AttributeError(name)
        return self.sections[name]

    def value(self, key: str) -> Any:
        """Return the value of a dotted key; of one of compression, the compression that these settings stand for."""
        section, _, name = key.partition(".")
        if section in self.sections:
            return getattr(self.sections[section], name)
        if section == "network":
            return self.network_values.get(key)
        return self.seq_parallel_compression if key.startswith("seq_parallel") else self.compression

    def changes(self, applied: Settings) -> list[str]:
        """Return the dotted keys that a document or file sets to another value than that in ``applied``."""
        return [
            key
            for key, source in self.sources.items()
            if not source.startswith(("default", "argument", "environment variable"))
            and self.value(key) != applied.value(key)
        ]


def resolve(
    source: Mapping[str, Any] | str | os.PathLike[str] | CommConfig | Settings | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """Load the same settings as `load_config`, with their sources and the variables that were read.

    :param source: settings that this function returned are taken as they are, but for `overrides`
    :raises ConfigError: as `load_config`
    """
    environ = os.environ if environ is None else environ
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    if isinstance(source, Settings):
        return _with_overrides(source, resolve(environ={}, overrides=given), given)
    configured = source is not None or any(name.startswith(_VARIABLES) for name in environ)
    if configured or not all(key in _PLAIN and _PLAIN[key](value) for key, value in given.items()):
        return _loaded(source, environ, given)
    values = {section: dict(keys) for section, keys in DEFAULTS.items()}
    sources = {f"{section}.{key}": "default" for section, keys in DEFAULTS.items() for key in keys}
    for key, value in given.items():
        section, _, name = key.partition(".")
        values[section][name] = float(value) if key.startswith("timeouts.") else value
        sources[key] = "argument"
    return Settings({section: SimpleNamespace(**keys) for section, keys in values.items()}, sources, {})


def _with_overrides(settings: Settings, checked: Settings, overrides: Mapping[str, Any]) -> Settings:
    sections = {name: SimpleNamespace(**vars(section)) for name, section in settings.sections.items()}
    for key in overrides:
        section, _, name = key.partition(".")
        setattr(sections[section], name, checked.value(key))
    return replace(settings, sections=sections, sources={**settings.sources, **dict.fromkeys(overrides, "argument")})


def _loaded(source: Any, environ: Mapping[str, str], overrides: Mapping[str, Any]) -> Settings:
    from comm_config.keys import dotted, set_values
    from comm_config.library_environment import network_environment
    from comm_config.loading import load_config, sources_of

    config = load_config(source, environ=environ, overrides=overrides)
    values = {section: SimpleNamespace(**config.model_dump()[section]) for section in DEFAULTS}
    return Settings(
        values,
        sources_of(config),
        network_environment(config, environ),
        config.compression(),
        config.seq_parallel_compression(),
        {dotted(path): value for path, value in set_values(config) if path[0] == "network"},
    )
