"""`load_config`: who wins, where it came from, and what it accepts."""

from __future__ import annotations

import copy
import json
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_config import CommConfig, CommsLoggerConfig, ConfigError, LaunchConfig, load_config, sources_of
from comm_config.keys import leaves

# One setting of each kind, with a different value for every source: default, file, environment, argument.
SETTINGS: dict[str, tuple[Any, Any, tuple[str, Any], Any]] = {
    "process_group.backend": (None, "gloo", ("nccl", "nccl"), "ccl"),
    "timeouts.collective_s": (None, 1.0, ("2.5", 2.5), 3.0),
    "launch.auto_mpi_discovery": (True, False, ("yes", True), False),
    "launch.master_port": (29500, 1, ("2", 2), 3),
    "comms_logger.prof_ops": ([], ["a"], ("b,c", ["b", "c"]), ["d"]),
    "network.nccl.ib_disable": (None, False, ("1", True), False),
    "network.nccl.variables": ({}, {"NCCL_A": "1"}, ('{"NCCL_B": 2}', {"NCCL_B": "2"}), {"NCCL_C": "3"}),
    "communication_data_type": (None, "fp32", ("float32", "fp32"), "fp32"),
}


def value_of(config: CommConfig, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def nest(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value  # type: ignore[no-any-return]


def variable(key: str) -> str:
    return "COMM_" + key.upper().replace(".", "__")


@given(
    key=st.sampled_from(sorted(SETTINGS)), in_file=st.booleans(), in_environment=st.booleans(), in_call=st.booleans()
)
def test_argument_beats_environment_beats_file_beats_default(
    key: str, in_file: bool, in_environment: bool, in_call: bool
) -> None:
    default, file, (text, environment), argument = SETTINGS[key]
    config = load_config(
        nest(key, file) if in_file else {},
        environ={variable(key): text} if in_environment else {},
        overrides={key: argument} if in_call else None,
    )
    expected, source = default, "default"
    if in_file:
        expected, source = file, "configuration dict"
    if in_environment:
        expected, source = environment, f"environment variable {variable(key)}"
    if in_call:
        expected, source = argument, "argument"
    assert value_of(config, key) == expected
    assert sources_of(config)[key] == source


def test_each_setting_is_decided_on_its_own() -> None:
    config = load_config(
        {"launch": {"master_addr": "node1", "master_port": 1}},
        environ={"COMM_LAUNCH__MASTER_PORT": "2"},
        overrides={"launch.auto_mpi_discovery": False},
    )
    assert config.launch == LaunchConfig(master_addr="node1", master_port=2, auto_mpi_discovery=False)


def test_nothing_given_is_the_defaults() -> None:
    config = load_config(environ={})
    assert config == CommConfig()
    assert set(sources_of(config).values()) == {"default"}
    assert list(sources_of(config)) == [".".join(path) for path, _ in leaves(CommConfig)]


def test_the_environment_of_the_process_is_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config().process_group.backend is None
    monkeypatch.setenv("COMM_PROCESS_GROUP__BACKEND", "gloo")
    assert load_config().process_group.backend == "gloo"
    assert load_config(environ={}).process_group.backend is None


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "comm.json"
    path.write_text('{"launch": {"master_port": 7}}')
    for source in (path, str(path)):
        config = load_config(source, environ={})
        assert config.launch.master_port == 7
        assert sources_of(config)["launch.master_port"] == f"file {path}"


def test_comm_config_names_the_file_where_none_is_given(tmp_path: Path) -> None:
    path = tmp_path / "comm.json"
    path.write_text('{"launch": {"master_port": 7}}')
    environ = {"COMM_CONFIG": str(path)}
    config = load_config(environ=environ)
    assert config.launch.master_port == 7
    assert sources_of(config)["launch.master_port"] == f"file {path} (named by COMM_CONFIG)"
    assert load_config({}, environ=environ).launch.master_port == 29500
    assert load_config(environ={"COMM_CONFIG": " "}) == CommConfig()


def test_a_missing_file_that_comm_config_names() -> None:
    with pytest.raises(ConfigError, match=r"^file /no/such\.json \(named by COMM_CONFIG\): there is no such file"):
        load_config(environ={"COMM_CONFIG": "/no/such.json"})


@pytest.mark.parametrize(
    ("source", "got"),
    [
        (3, "of type int"),
        ([], "of type list"),
        ("", "''"),
        (" ", "' '"),
        ('{"launch": {}}', "'{\"launch\": {}}'"),
        (b"x.json", "of type bytes"),
    ],
)
def test_what_is_no_configuration(source: Any, got: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(source, environ={})
    assert got in str(caught.value)
    assert "expected" in str(caught.value)


@pytest.mark.parametrize("kind", [dict, OrderedDict, MappingProxyType])
def test_any_mapping_is_a_document_and_stays_as_it_is(kind: Callable[[Any], Mapping[str, Any]]) -> None:
    document = {"comms_logger": kind({"enabled": True, "prof_ops": ["all_reduce"]}), "$schema": "x"}
    before = repr(document)
    config = load_config(kind(document), environ={})
    assert config.comms_logger == CommsLoggerConfig(enabled=True, prof_ops=["all_reduce"])
    config.comms_logger.prof_ops.append("broadcast")
    assert repr(document) == before


def test_overrides_that_are_none_are_skipped() -> None:
    config = load_config(
        {"launch": {"master_addr": "node1"}},
        environ={},
        overrides={"launch.master_addr": None, "launch.master_port": 1, "no.such.key": None},
    )
    assert config.launch.master_addr == "node1"
    assert config.launch.master_port == 1


def test_a_section_may_be_overridden_and_a_key_of_it_wins() -> None:
    config = load_config(
        {"launch": {"master_addr": "node1"}},
        environ={},
        overrides={"launch.master_port": 2, "launch": {"master_port": 1, "auto_mpi_discovery": False}},
    )
    assert config.launch == LaunchConfig(master_addr="node1", master_port=2, auto_mpi_discovery=False)


def test_a_section_object_may_be_given() -> None:
    config = load_config({"launch": LaunchConfig(master_port=1)}, environ={"COMM_LAUNCH__MASTER_ADDR": "node1"})
    assert config.launch == LaunchConfig(master_addr="node1", master_port=1)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("process_group.backnd", "gloo", "argument: process_group.backnd: unknown key; did you mean 'backend'?"),
        ("no", 1, "argument: no: unknown key"),
        ("object", [], "argument: object: unknown key; did you mean 'objects'?"),  # also the tag of a union
        ("compress_communication.boolean", 1, "argument: compress_communication.boolean: unknown key"),
        ("launch.master_port", "x", "argument: launch.master_port: got 'x', expected a whole number"),
        ("launch.master_port.x", 1, "argument: launch.master_port: got {'x': 1}, expected a whole number"),
        ("launch", 1, "argument: launch: got 1, expected an object"),
        ("train_batch_size", 1, "argument: train_batch_size: unknown key"),
        ("", 1, "argument: unknown key"),
    ],
)
def test_wrong_overrides(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ={}, overrides={key: value})
    assert str(caught.value).startswith(message)


def test_a_wrong_value_is_an_error_even_where_it_would_be_replaced() -> None:
    with pytest.raises(ConfigError, match=r"^configuration dict: launch\.master_port"):
        load_config({"launch": {"master_port": "x"}}, environ={}, overrides={"launch.master_port": 1})


def test_an_object_made_by_the_program_ranks_as_a_file() -> None:
    made = CommConfig(launch=LaunchConfig(master_port=1), comms_logger=CommsLoggerConfig(enabled=True))
    assert sources_of(made)["launch.master_port"] == "configuration object"
    assert sources_of(made)["launch.master_addr"] == "default"
    config = load_config(made, environ={"COMM_LAUNCH__MASTER_PORT": "2"})
    assert (config.launch.master_port, config.comms_logger.enabled) == (2, True)
    assert sources_of(config)["launch.master_port"] == "environment variable COMM_LAUNCH__MASTER_PORT"
    assert sources_of(config)["comms_logger.enabled"] == "configuration object"
    assert made.launch.master_port == 1


def test_what_was_loaded_may_be_loaded_again() -> None:
    environ = {"COMM_LAUNCH__MASTER_PORT": "2", "COMM_LAUNCH__MASTER_ADDR": "node1"}
    first = load_config({"comms_logger": {"enabled": True}}, environ=environ, overrides={"launch.master_port": 3})
    again = load_config(first, environ=environ)
    assert again == first
    assert sources_of(again) == sources_of(first)
    # An argument stays one; the environment still wins over the rest, and a new argument over all.
    later = load_config(first, environ={**environ, "COMM_LAUNCH__MASTER_ADDR": "node2"})
    assert later.launch == LaunchConfig(master_addr="node2", master_port=3)
    assert load_config(first, environ=environ, overrides={"launch.master_port": 4}).launch.master_port == 4


def test_copies_keep_values_and_sources() -> None:
    config = load_config({"launch": {"master_port": 1}}, environ={})
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), config.model_copy()):
        assert other == config
        assert sources_of(other) == sources_of(config)


def test_a_configuration_written_out_reads_back_the_same(values_of: Any, schema: Any, tmp_path: Path) -> None:
    path = tmp_path / "comm.json"
    # Options that a method does not have are refused.
    refused = {"$schema", "compress_communication"}
    served = {key: node for key, node in schema["properties"].items() if key not in refused}

    @given(values_of({**schema, "properties": served, "type": "object"}))
    def check(document: dict[str, Any]) -> None:
        if document.get("communication_data_type") not in (None, "fp32"):
            document.pop("reductions", None)  # refused together
        config = load_config(document, environ={})
        path.write_text(config.model_dump_json())
        assert load_config(path, environ={}) == config
        path.write_text(json.dumps(config.model_dump(exclude_unset=True)))
        assert load_config(path, environ={}) == config

    check()


def test_a_key_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"train_batch_size": {}, "commu\\ud800nication_data_type": "0"}')
    with pytest.raises(ConfigError, match="expected a valid string"):
        load_config(path, environ={})


@pytest.mark.parametrize(
    "text",
    [
        '{"commu\\ud800nion": 1, "commu\\ud800nion": 2}',
        '{"commu\\ud800nion": {"x": 1, "x": 2}}',
        json.dumps({"k" * 10_000: 1})[:-1] + f', "{"k" * 10_000}": 2}}',
    ],
)
def test_a_key_given_twice_is_named_so_that_it_can_be_printed(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is given twice") as raised:
        load_config(path, environ={})
    assert len(str(raised.value).encode()) < 1000


def test_a_long_value_is_cut() -> None:
    with pytest.raises(ConfigError, match=r"got '9x{70,80}\.\.\., expected a positive number of minutes"):
        load_config(None, environ={"DEEPSPEED_TIMEOUT": "9" + "x" * 10_000})


def test_many_mistakes_are_named_in_part(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"comms_logger": {"prof_ops": list(range(3000))}}))
    with pytest.raises(ConfigError, match=r"and 29[89]\d more like these") as caught:
        load_config(path, environ={})
    assert len(str(caught.value).replace(str(path), "")) < 4000
    path.write_text(json.dumps({"x" * 5000: 1}))
    with pytest.raises(ConfigError, match=r"x{120}\.\.\.: ") as caught:
        load_config(path, environ={})
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("value", ["Strict", " STRICT"])
def test_a_choice_in_capital_letters(value: str) -> None:
    assert load_config({"checks": {"mismatch": value}}, environ={}).checks.mismatch == "strict"


@pytest.mark.parametrize(("value", "hint"), [("always", ""), ("on", ""), ("stict", "; did you mean 'strict'?")])
def test_a_choice_is_suggested_only_where_it_is_close(value: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"checks": {"mismatch": value}}, environ={})
    assert str(caught.value).endswith(f"or 'strict'{hint}")
