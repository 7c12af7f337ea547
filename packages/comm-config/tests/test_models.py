"""Sections: defaults, limits, and that nothing can be misspelt or changed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import comm_config
from comm_config import CommConfig, CommsLoggerConfig, ConfigError, load_config
from comm_config.fields import Section
from comm_config.keys import leaves, model_at, sections

SECTIONS = [(), *sections(CommConfig)]


def load(document: dict[str, Any]) -> CommConfig:
    return load_config(document, environ={})


def problem(document: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load(document)
    return str(caught.value)


def test_defaults() -> None:
    config = CommConfig()
    assert config.process_group.model_dump() == {"backend": None, "init_method": None}
    assert config.timeouts.model_dump() == {"init_s": None, "collective_s": None}
    assert config.launch.model_dump() == {"auto_mpi_discovery": True, "master_addr": None, "master_port": 29500}
    # DeepSpeed's keys and defaults.
    assert config.comms_logger.model_dump() == {
        "enabled": False,
        "verbose": False,
        "prof_all": True,
        "debug": False,
        "prof_ops": [],
        "ranges": False,
        "trace": None,
    }
    assert config.objects.model_dump() == {"allow_pickle": False, "max_bytes": 2**30}
    assert config.reductions.model_dump() == {"deterministic": False, "compensated": False}
    assert config.communication_data_type is None
    assert config.compress_communication is False
    unset = {None: 0}
    for library in (config.network.nccl, config.network.gloo, config.network.ccl):
        assert {value for key, value in library if key != "variables"} == set(unset)
        assert library.variables == {}
    assert config.network.interface is None


def test_styles_of_layers_may_have_a_number_of_parts() -> None:
    plan = {"*.qkv": ["column", 3], "*.output": "row"}
    expected = {"*.qkv": ("column", 3), "*.output": "row"}
    assert load({"training": {"model_parallel_plan": plan}}).training.model_parallel_plan == expected
    variable = {"COMM_TRAINING__MODEL_PARALLEL_PLAN": json.dumps(plan)}
    assert load_config(None, environ=variable).training.model_parallel_plan == expected
    for wrong in (["column"], ["column", 0], ["column", True], ["column", 1.5], [3, "column"], 3, None):
        message = problem({"training": {"model_parallel_plan": {"*.qkv": wrong}}})
        assert "training.model_parallel_plan.*.qkv: got " in message
        assert "expected a style such as 'column', or one with a number of parts such as ['column', 3]" in message


@pytest.mark.parametrize("path", SECTIONS, ids=".".join)
def test_every_section_is_frozen_and_refuses_unknown_keys(path: tuple[str, ...]) -> None:
    model = model_at(CommConfig, path)
    key = next(iter(model.model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(model(), key, None)
    with pytest.raises(ValidationError, match="no_such_key"):
        model(no_such_key=1)


def test_every_setting_and_section_is_described() -> None:
    def undescribed(model: type[BaseModel]) -> list[str]:
        return [name for name, field in model.model_fields.items() if not field.description]

    models = [model_at(CommConfig, path) for path in SECTIONS] + [comm_config.CompressionConfig]
    assert [undescribed(model) for model in models] == [[]] * len(models)
    assert all(model.__doc__ for model in models)


def test_all_settings_have_defaults() -> None:
    assert [path for path, field in leaves(CommConfig) if field.is_required()] == []


def test_configurations_are_equal_when_their_settings_are() -> None:
    assert load({"comms_logger": {"enabled": False}}) == CommConfig()
    assert load({"comms_logger": {"enabled": True}}) != CommConfig()
    assert load({"comms_logger": {"enabled": True}}) == CommConfig(comms_logger=CommsLoggerConfig(enabled=True))
    assert CommConfig() != {}
    with pytest.raises(TypeError, match="unhashable"):
        hash(CommConfig())


def test_a_logger_that_is_not_enabled_is_off() -> None:
    assert load({"comms_logger": {"enabled": False}}).comms_logger.enabled is False
    assert load({"comms_logger": {"verbose": True}}).comms_logger.enabled is False
    assert load({"comms_logger": {}}).comms_logger.enabled is False
    assert load({"comms_logger": {"enabled": True}}).comms_logger.enabled is True


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("gloo", "gloo"),
        ("NCCL", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("CPU:gloo, cuda:NCCL", "cpu:gloo,cuda:nccl"),
        ("auto", None),
        (None, None),
    ],
)
def test_backend(given: str | None, kept: str | None) -> None:
    assert load({"process_group": {"backend": given}}).process_group.backend == kept


@pytest.mark.parametrize("given", ["", " ", "cpu:", "gloo,nccl", "cpu:gloo,", "-x", "gloo;", "gloo\n"])
def test_what_is_no_backend(given: str) -> None:
    text = problem({"process_group": {"backend": given}})
    assert text.startswith(f"configuration dict: process_group.backend: got {given!r}, expected a backend such as")


@pytest.mark.parametrize("url", ["env://", "tcp://10.0.0.1:29500", "file:///shared/rendezvous"])
def test_init_method(url: str) -> None:
    assert load({"process_group": {"init_method": url}}).process_group.init_method == url


def test_an_init_method_is_a_url() -> None:
    assert "got '10.0.0.1:29500', expected a URL" in problem({"process_group": {"init_method": "10.0.0.1:29500"}})


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("timeouts.collective_s", 0, "expected a number greater than or equal to 0.001"),
        ("timeouts.collective_s", 0.0004, "expected a number greater than or equal to 0.001"),
        ("timeouts.collective_s", -1.5, "expected a number greater than or equal to 0.001"),
        ("timeouts.collective_s", 1e10, "expected a number less than or equal to 1000000000"),
        ("timeouts.collective_s", float("inf"), "expected a finite number"),
        ("timeouts.init_s", float("nan"), "expected a finite number"),
        ("timeouts.init_s", True, "expected a number"),
        ("timeouts.init_s", "soon", "expected a number"),
        ("timeouts.init_s", [1], "expected a number"),
        ("launch.master_port", -1, "expected a number greater than or equal to 0"),
        ("launch.master_port", 65536, "expected a number less than or equal to 65535"),
        ("launch.master_port", True, "expected a number"),
        ("launch.master_port", 1.5, "expected a whole number"),
        ("launch.master_port", None, "expected a whole number"),
        ("launch.master_addr", "", "expected a string that is not blank"),
        ("launch.master_addr", "a\0b", "expected a string that is not blank and holds no NUL"),
        ("launch.master_addr", 7, "expected a string"),
        ("launch.auto_mpi_discovery", "perhaps", "expected true or false"),
        ("launch.auto_mpi_discovery", None, "expected true or false"),
        ("comms_logger.prof_ops", "all_reduce", "expected a list"),
        ("objects.max_bytes", 0, "expected a number greater than or equal to 1"),
        ("objects.max_bytes", 2**63, "expected a number less than or equal to 9223372036854775807"),
        ("network.nccl.debug", 3, "expected 'VERSION', 'WARN', 'INFO', 'ABORT' or 'TRACE'"),
        ("network.nccl.nthreads", 100, "expected a multiple of 32"),
        ("network.nccl.variables", [], "expected an object"),
    ],
)
def test_wrong_values_say_what_was_got_and_what_was_expected(path: str, value: object, expected: str) -> None:
    *parents, key = path.split(".")
    document: dict[str, Any] = {key: value}
    for parent in reversed(parents):
        document = {parent: document}
    assert problem(document).startswith(f"configuration dict: {path}: got {value!r}, {expected}")


@pytest.mark.parametrize("port", [0, 1, 65535, "29500", 29500.0])
def test_ports(port: object) -> None:
    assert load({"launch": {"master_port": port}}).launch.master_port == int(port)  # type: ignore[call-overload]


@pytest.mark.parametrize("value", [None, 1, [], "x", True])
def test_a_section_is_an_object(value: object) -> None:
    text = problem({"launch": value})
    assert text == (
        f"configuration dict: launch: got {value!r}, "
        "expected an object with 'auto_mpi_discovery', 'master_addr', 'master_port'"
    )


def test_a_long_list_of_keys_is_cut() -> None:
    assert problem({"network": {"nccl": 1}}).endswith("'socket_nthreads', 'nsocks_perthread', ...")


def test_a_long_value_is_cut() -> None:
    text = problem({"process_group": {"backend": "!" * 1000}})
    assert "got '!!!" in text
    assert len(text) < 250


def test_items_of_a_list_are_named() -> None:
    assert problem({"comms_logger": {"prof_ops": ["all_reduce", 3]}}) == (
        "configuration dict: comms_logger.prof_ops[1]: got 3, expected a string"
    )


def test_every_mistake_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"timeouts": {"init_s": 0}, "objects": {"max_byte": 1}})
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        ["configuration dict", "timeouts.init_s"],
        ["configuration dict", "objects.max_byte"],
    ]
    assert (caught.value.source, caught.value.key) == ("configuration dict", "timeouts.init_s")


@pytest.mark.parametrize(
    ("document", "key", "guess"),
    [
        ({"comm_logger": {}}, "comm_logger", "comms_logger"),
        ({"Comms-Logger": {}}, "Comms-Logger", "comms_logger"),
        ({"comms_logger": {"enable": 1}}, "comms_logger.enable", "enabled"),
        ({"network": {"ncl": {}}}, "network.ncl", "nccl"),
        ({"network": {"nccl": {"bufsize": 1}}}, "network.nccl.bufsize", "buffsize"),
        ({"compress_communication": {"methd": "topk"}}, "compress_communication.methd", "method"),
        # In the wrong place: the full key is named.
        ({"backend": "gloo"}, "backend", "process_group.backend"),
        ({"nccl": {}}, "nccl", "network.nccl"),
    ],
)
def test_unknown_keys_name_the_nearest_known_one(document: dict[str, Any], key: str, guess: str) -> None:
    assert problem(document).startswith(
        f"configuration dict: {key}: unknown key; did you mean {guess!r}? (known here: "
    )


def test_unknown_keys_that_resemble_nothing_list_what_is_known() -> None:
    assert problem({"timeouts": {"zzz": 1}}) == (
        "configuration dict: timeouts.zzz: unknown key (known here: init_s, collective_s)"
    )


@pytest.mark.parametrize("key", ["deterministic", "compensated"])
@pytest.mark.parametrize("compression", [{"compress_communication": True}, {"communication_data_type": "bf16"}])
def test_deterministic_reductions_are_not_compressed(key: str, compression: dict[str, Any]) -> None:
    assert problem({"reductions": {key: True}, **compression}).startswith(
        f"configuration dict: reductions.{key}: got True together with compress_communication or"
    )
    assert load({"reductions": {key: False}, **compression}).compression()
    assert getattr(load({"reductions": {key: True}, "communication_data_type": "fp32"}).reductions, key)


def test_fields_may_begin_with_the_names_of_pydantics_methods() -> None:
    """pydantic before 2.10 warns of all that begin with ``model_``, later ones of some."""

    class Plan(Section):
        model_dump_folder: str = ""

    assert Plan().model_dump_folder == ""
