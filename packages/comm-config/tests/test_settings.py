"""`resolve` says what `load_config` says, whether pydantic had to be asked or not."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import comm_config
from comm_config import CommConfig, ConfigError, load_config, network_environment, resolve, sources_of
from comm_config.settings import DEFAULTS


def test_defaults_are_those_of_the_models() -> None:
    config = CommConfig()
    sections = {name: value for name, value in config.model_dump().items() if isinstance(value, dict)}
    del sections["network"]
    assert sections == {name: dict(keys) for name, keys in DEFAULTS.items()}
    assert network_environment(config, {}) == {}


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"process_group.backend": "gloo"},
        {"process_group.backend": " CPU:gloo "},
        {"process_group.backend": None},
        {"process_group.backend": "auto"},
        {"process_group.backend": " AUTO "},
        {"process_group.backend": "automatic"},
        {"timeouts.collective_s": 3},
        {"timeouts.collective_s": 0.5, "launch.master_port": 0},
        {"launch.auto_mpi_discovery": False},
        {"process_group.init_method": "tcp://a:1"},
    ],
)
@pytest.mark.parametrize(
    ("source", "environ"),
    [
        (None, {}),
        (None, {"PATH": "/bin", "RANK": "0"}),
        ({"timeouts": {"init_s": 7}, "network": {"interface": "eth0"}}, {}),
        (None, {"COMM_LAUNCH__MASTER_PORT": "12", "DEEPSPEED_TIMEOUT": "2"}),
    ],
)
def test_the_same_as_load_config(overrides: dict[str, Any], source: Any, environ: dict[str, str]) -> None:
    settings = resolve(source, environ=environ, overrides=overrides)
    config = load_config(source, environ=environ, overrides=overrides)
    for section in DEFAULTS:
        assert vars(getattr(settings, section)) == config.model_dump()[section]
    sources = sources_of(config)
    assert all(sources[key] == source for key, source in settings.sources.items())
    assert {f"{section}.{key}" for section, keys in DEFAULTS.items() for key in keys} <= set(settings.sources)
    assert settings.variables == network_environment(config, environ)
    assert settings.value("launch.master_port") == config.launch.master_port


@pytest.mark.parametrize(
    "overrides",
    [
        {"timeouts.collective_s": 0},
        {"timeouts.collective_s": True},
        {"timeouts.collective_s": float("nan")},
        {"launch.master_port": 70000},
        {"launch.master_port": True},
        {"process_group.backend": "two-words"},
        {"process_group.backend": 3},
        {"no.such_key": 1},
    ],
)
def test_errors_are_those_of_load_config(overrides: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as expected:
        load_config(environ={}, overrides=overrides)
    with pytest.raises(ConfigError) as found:
        resolve(environ={}, overrides=overrides)
    assert str(found.value) == str(expected.value)


def test_pydantic_is_imported_only_where_something_is_configured() -> None:
    code = (
        "import sys, comm_config\n"
        "comm_config.resolve(environ={}, overrides={'process_group.backend': 'gloo', 'timeouts.collective_s': 30})\n"
        "assert 'pydantic' not in sys.modules\n"
        "assert comm_config.resolve({'timeouts': {'init_s': 3}}).timeouts.init_s == 3\n"
        "assert 'pydantic' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_can_be_had() -> None:
    for name in comm_config.__all__:
        assert getattr(comm_config, name) is not None
    assert set(comm_config.__all__) <= set(dir(comm_config))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        comm_config.nothing  # noqa: B018


def test_a_section_that_is_not_there() -> None:
    with pytest.raises(AttributeError):
        resolve(environ={}).network  # noqa: B018


def test_settings_are_a_source_too() -> None:
    first = resolve({"timeouts": {"init_s": 7}, "network": {"interface": "eth0"}}, environ={})
    second = resolve(first, environ={"COMM_TIMEOUTS__INIT_S": "9"}, overrides={"process_group.backend": " GLOO"})
    assert (second.timeouts.init_s, second.process_group.backend) == (7, "gloo")
    assert second.sources["process_group.backend"] == "argument"
    assert second.variables == first.variables != {}
    assert first.process_group.backend is None
    with pytest.raises(ConfigError):
        resolve(first, overrides={"timeouts.init_s": -1})


def test_what_a_document_changes() -> None:
    applied = resolve(environ={"COMM_TIMEOUTS__INIT_S": "9"}, overrides={"timeouts.collective_s": 5})
    assert applied.changes(applied) == []
    same = {"timeouts": {"init_s": 9, "collective_s": 5}, "reductions": {"deterministic": False}}
    assert resolve(same, environ={}).changes(applied) == []
    environ, overrides = {"COMM_TIMEOUTS__INIT_S": "8"}, {"process_group.backend": "gloo"}
    assert resolve({}, environ=environ, overrides=overrides).changes(applied) == []
    other = {"timeouts": {"init_s": 7}, "network": {"interface": "eth0"}, "communication_data_type": "bf16"}
    changes = resolve(other, environ={}).changes(applied)
    assert changes == ["timeouts.init_s", "network.interface", "communication_data_type"]
    assert resolve(other, environ={}).changes(resolve(other, environ={})) == []
    assert resolve({"communication_data_type": "fp32"}, environ={}).changes(resolve(other, environ={})) == [
        "communication_data_type"
    ]
