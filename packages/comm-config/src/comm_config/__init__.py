"""Communication Configuration Manager: typed, checked settings for distributed communication."""

from comm_config.compression import CompressionConfig
from comm_config.errors import ConfigError
from comm_config.library_environment import network_environment
from comm_config.loading import load_config, sources_of
from comm_config.models import (
    CommConfig,
    CommsLoggerConfig,
    LaunchConfig,
    ObjectsConfig,
    ProcessGroupConfig,
    TimeoutsConfig,
)
from comm_config.network import CclConfig, GlooConfig, NcclConfig, NetworkConfig
from comm_config.schema import json_schema

__all__ = [
    "CclConfig",
    "CommConfig",
    "CommsLoggerConfig",
    "CompressionConfig",
    "ConfigError",
    "GlooConfig",
    "LaunchConfig",
    "NcclConfig",
    "NetworkConfig",
    "ObjectsConfig",
    "ProcessGroupConfig",
    "TimeoutsConfig",
    "json_schema",
    "load_config",
    "network_environment",
    "sources_of",
]
