"""``COMM_*`` variables: how values are spelt, which are unknown, and DeepSpeed's timeout."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_config import CommConfig, ConfigError, load_config, sources_of
from comm_config.environment import environment_variables
from comm_config.keys import leaves, sections


def load(**environ: str) -> CommConfig:
    return load_config(environ=environ)


def problem(**environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**environ)
    return str(caught.value)


def test_every_setting_and_section_has_a_variable() -> None:
    paths = {*(path for path, _ in leaves(CommConfig)), *sections(CommConfig)}
    assert set(environment_variables().values()) == paths
    assert environment_variables()["COMM_NETWORK__NCCL__DEBUG"] == ("network", "nccl", "debug")
    assert environment_variables()["COMM_COMMUNICATION_DATA_TYPE"] == ("communication_data_type",)


@pytest.mark.parametrize(
    ("spellings", "value"),
    [(["1", "true", "True", "YES", "on", " on "], True), (["0", "false", "FALSE", "no", "off"], False)],
)
def test_flags(spellings: list[str], value: bool) -> None:
    for text in spellings:
        assert load(COMM_COMMS_LOGGER__ENABLED=text).comms_logger.enabled is value
        assert load(COMM_NETWORK__NCCL__IB_DISABLE=text).network.nccl.ib_disable is value


@pytest.mark.parametrize(("text", "value"), [("90", 90.0), ("0.5", 0.5), ("1e3", 1000.0)])
def test_numbers(text: str, value: float) -> None:
    assert load(COMM_TIMEOUTS__COLLECTIVE_S=text).timeouts.collective_s == value


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("all_reduce", ["all_reduce"]),
        (" all_reduce , broadcast,", ["all_reduce", "broadcast"]),
        ('["all_reduce", "a,b"]', ["all_reduce", "a,b"]),
        ("[]", []),
    ],
)
def test_lists(text: str, items: list[str]) -> None:
    assert load(COMM_COMMS_LOGGER__PROF_OPS=text).comms_logger.prof_ops == items


def test_objects() -> None:
    config = load(
        COMM_LAUNCH='{"master_port": 1, "master_addr": "node1"}',
        COMM_NETWORK__CCL__VARIABLES='{"CCL_CHUNK_SIZE": 16777216}',
    )
    assert (config.launch.master_port, config.launch.master_addr) == (1, "node1")
    assert config.network.ccl.variables == {"CCL_CHUNK_SIZE": "16777216"}


def test_the_variable_of_a_key_beats_that_of_its_section() -> None:
    config = load(
        COMM_NETWORK__NCCL__DEBUG="WARN",
        COMM_NETWORK='{"nccl": {"debug": "INFO", "algo": "Ring", "proto": "LL"}}',
        COMM_NETWORK__NCCL='{"debug": "TRACE", "proto": "Simple"}',
    )
    nccl = config.network.nccl
    assert (nccl.debug, nccl.algo, nccl.proto) == ("WARN", "Ring", "Simple")
    assert sources_of(config)["network.nccl.proto"] == "environment variable COMM_NETWORK__NCCL"


def test_text_that_looks_like_json_stays_text() -> None:
    assert load(COMM_LAUNCH__MASTER_ADDR="{1}").launch.master_addr == "{1}"
    assert load(COMM_NETWORK__NCCL__VARIABLES='{"NCCL_X": "[1]"}').network.nccl.variables == {"NCCL_X": "[1]"}


def test_null_undoes_what_a_file_set() -> None:
    file = {"process_group": {"backend": "gloo"}, "launch": {"master_port": 1}}
    config = load_config(file, environ={"COMM_PROCESS_GROUP__BACKEND": "null"})
    assert config.process_group.backend is None
    with pytest.raises(
        ConfigError, match=r"COMM_LAUNCH__MASTER_PORT: launch\.master_port: got 'null', expected a whole"
    ):
        load_config(file, environ={"COMM_LAUNCH__MASTER_PORT": "null"})


def test_an_empty_variable_counts_as_absent() -> None:
    config = load_config(
        {"launch": {"master_port": 1}},
        environ={"COMM_LAUNCH__MASTER_PORT": " ", "COMM_LAUNCH": "", "DEEPSPEED_TIMEOUT": ""},
    )
    assert config == load_config({"launch": {"master_port": 1}}, environ={})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("COMM_COMMS_LOGGER__ENABLED", "maybe", "comms_logger.enabled: got 'maybe', expected true or false"),
        ("COMM_LAUNCH__MASTER_PORT", "x", "launch.master_port: got 'x', expected a whole number"),
        ("COMM_TIMEOUTS__INIT_S", "0", "timeouts.init_s: got '0', expected a number greater than or equal to 0.001"),
        (
            "COMM_NETWORK__NCCL__DEBUG",
            "INF",
            "network.nccl.debug: got 'INF', expected 'VERSION', 'WARN', 'INFO', 'ABORT' or",
        ),
        ("COMM_LAUNCH", "x", "launch: is not valid JSON: Expecting value (line 1, column 1)"),
        ("COMM_LAUNCH", "[]", "launch: expected a JSON object at the top, got list"),
        ("COMM_LAUNCH", '{"master_port": 1, "master_port": 2}', "launch.master_port: is given twice"),
        ("COMM_LAUNCH", '{"master_prt": 1}', "launch.master_prt: unknown key; did you mean 'master_port'?"),
        ("COMM_COMMS_LOGGER__PROF_OPS", "[1", "comms_logger.prof_ops: got '[1', which is not valid JSON: "),
        ("COMM_COMMS_LOGGER__PROF_OPS", "[1]", "comms_logger.prof_ops[0]: got 1, expected a string"),
        ("COMM_NETWORK__NCCL__VARIABLES", "NCCL_X=1", "network.nccl.variables: got 'NCCL_X=1', expected an object"),
        ("COMM_COMPRESS_COMMUNICATION", "{", "compress_communication: is not valid JSON: "),
        ("COMM_COMMUNICATION_DATA_TYPE", "fp61", "communication_data_type: got 'fp61', expected 'fp32', "),
    ],
)
def test_a_wrong_value_names_the_variable(name: str, text: str, message: str) -> None:
    assert problem(**{name: text}).startswith(f"environment variable {name}: {message}")


def test_unknown_variables_are_logged_once_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"COMM_NETWORK__NCL__DEBUG": "INFO", "COMM_ZZZ": "secret", "comm_foo": "1", "COMMA": "1", "OTHER": "1"}
    with caplog.at_level(logging.WARNING, logger="comm"):
        assert load_config(environ=environ) == CommConfig()
        assert load_config(environ=environ) == CommConfig()
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "comm",
            "WARNING",
            "environment variable COMM_NETWORK__NCL__DEBUG is not a setting and is ignored; "
            "did you mean COMM_NETWORK__NCCL__DEBUG?",
        ),
        ("comm", "WARNING", "environment variable COMM_ZZZ is not a setting and is ignored"),
    ]


def test_a_single_underscore_is_recognised(caplog: pytest.LogCaptureFixture) -> None:
    load(COMM_PROCESS_GROUP_BACKEND="gloo")
    assert "did you mean COMM_PROCESS_GROUP__BACKEND?" in caplog.text


def test_known_variables_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    load(COMM_LAUNCH__MASTER_PORT="1", COMM_CONFIG="", DEEPSPEED_TIMEOUT="1")
    assert caplog.records == []


@given(st.dictionaries(st.text("ABC_", max_size=8).map(lambda tail: f"COMM_X{tail}"), st.text(max_size=5)))
def test_unknown_variables_never_fail(environ: dict[str, str]) -> None:
    assert load_config(environ=environ) == CommConfig()


@given(st.sampled_from(sorted(environment_variables())), st.text(max_size=12))
def test_any_text_is_a_value_or_a_config_error(name: str, text: str) -> None:
    source = f"environment variable {name}"
    try:
        config = load_config(environ={name: text})
    except ConfigError as error:
        assert error.source == source  # noqa: PT017
    else:
        assert {origin for origin in sources_of(config).values() if origin != "default"} <= {source}


class TestDeepspeedTimeout:
    def test_it_is_minutes(self) -> None:
        config = load(DEEPSPEED_TIMEOUT="20")
        assert config.timeouts.collective_s == 1200
        assert config.timeouts.init_s is None
        assert sources_of(config)["timeouts.collective_s"] == "environment variable DEEPSPEED_TIMEOUT"

    def test_it_beats_the_file(self) -> None:
        assert (
            load_config({"timeouts": {"collective_s": 1}}, environ={"DEEPSPEED_TIMEOUT": "2"}).timeouts.collective_s
            == 120
        )

    @pytest.mark.parametrize(
        "environ", [{"COMM_TIMEOUTS__COLLECTIVE_S": "5"}, {"COMM_TIMEOUTS": '{"collective_s": 5}'}]
    )
    def test_variables_of_ours_beat_it(self, environ: dict[str, str]) -> None:
        assert load_config(environ={**environ, "DEEPSPEED_TIMEOUT": "2"}).timeouts.collective_s == 5

    def test_an_argument_beats_it(self) -> None:
        overrides: dict[str, Any] = {"timeouts.collective_s": 5}
        assert load_config(environ={"DEEPSPEED_TIMEOUT": "2"}, overrides=overrides).timeouts.collective_s == 5

    @pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf", "1e300", "16666667"])
    def test_a_wrong_value(self, text: str) -> None:
        assert problem(DEEPSPEED_TIMEOUT=text) == (
            f"environment variable DEEPSPEED_TIMEOUT: got {text!r}, "
            "expected a positive number of minutes of at most 16666666"
        )
