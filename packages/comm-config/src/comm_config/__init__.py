"""Communication Configuration Manager: typed, checked settings for distributed communication."""

import importlib
from typing import TYPE_CHECKING, Any

from comm_config.errors import ConfigError
from comm_config.settings import Settings, resolve

if TYPE_CHECKING:
    from comm_config.compression import CompressionConfig
    from comm_config.environment import unknown_variables
    from comm_config.library_environment import network_environment
    from comm_config.loading import load_config, sources_of
    from comm_config.models import (
        ChecksConfig,
        CommConfig,
        CommsLoggerConfig,
        FlightRecorderConfig,
        HierarchicalConfig,
        LaunchConfig,
        ObjectsConfig,
        ProcessGroupConfig,
        ReductionsConfig,
        TimeoutsConfig,
        TrainingConfig,
    )
    from comm_config.network import CclConfig, GlooConfig, NcclConfig, NetworkConfig
    from comm_config.schema import json_schema

__all__ = [
    "CclConfig",
    "ChecksConfig",
    "CommConfig",
    "CommsLoggerConfig",
    "CompressionConfig",
    "ConfigError",
    "FlightRecorderConfig",
    "GlooConfig",
    "HierarchicalConfig",
    "LaunchConfig",
    "NcclConfig",
    "NetworkConfig",
    "ObjectsConfig",
    "ProcessGroupConfig",
    "ReductionsConfig",
    "Settings",
    "TimeoutsConfig",
    "TrainingConfig",
    "json_schema",
    "load_config",
    "network_environment",
    "resolve",
    "sources_of",
    "unknown_variables",
]

# What needs pydantic is imported when it is first asked for.
_MODULES = {
    "compression": ("CompressionConfig",),
    "environment": ("unknown_variables",),
    "library_environment": ("network_environment",),
    "loading": ("load_config", "sources_of"),
    "models": (
        "ChecksConfig",
        "CommConfig",
        "CommsLoggerConfig",
        "FlightRecorderConfig",
        "HierarchicalConfig",
        "LaunchConfig",
        "ObjectsConfig",
        "ProcessGroupConfig",
        "ReductionsConfig",
        "TimeoutsConfig",
        "TrainingConfig",
    ),
    "network": ("CclConfig", "GlooConfig", "NcclConfig", "NetworkConfig"),
    "schema": ("json_schema",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
