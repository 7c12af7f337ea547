"""The JSON Schema: valid itself, and of one mind with `load_config`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from comm_config import CommConfig, CommsLoggerConfig, ConfigError, json_schema, load_config
from comm_config.keys import leaves

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")


@pytest.fixture(scope="module")
def validator(schema: dict[str, Any]) -> Any:
    return jsonschema.Draft202012Validator(schema)


def properties(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in node or "allOf" in node:
        reference = node.get("$ref") or node["allOf"][0]["$ref"]
        node = schema["$defs"][reference.rsplit("/", 1)[1]]
    return node["properties"]  # type: ignore[no-any-return]


def test_it_is_a_schema_of_the_draft_it_names(schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$schema"]
    assert schema["$id"] == "urn:comm-config:schema"
    assert schema["title"] == "Communication configuration"
    assert json.loads(json.dumps(schema)) == schema


def test_it_is_made_anew_at_each_call(schema: dict[str, Any]) -> None:
    changed = json_schema()
    changed["properties"].clear()
    changed["$defs"].clear()
    assert json_schema() == schema


def test_pydantic_left_no_names_of_its_own(schema: dict[str, Any]) -> None:
    # "ge" beside "minimum" would be ignored by every editor.
    assert not {'"ge":', '"gt":', '"le":', '"lt":', '"multiple_of":'} & set(json.dumps(schema).split())


def test_every_setting_is_described(schema: dict[str, Any]) -> None:
    for path, field in leaves(CommConfig):
        node = schema
        for name in path[:-1]:
            node = properties(schema, node)[name]
        shown = properties(schema, node)[path[-1]]
        assert shown["description"] == field.description
        assert "title" not in shown
        if field.default_factory is None:
            assert shown["default"] == field.default


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"$schema": "./comm.schema.json", "comms_logger": {"enabled": False}},
        {"train_batch_size": 1, "somebody_elses": 1, "communication_data_type": "auto"},
        {"comms_logger": {"enabled": "auto", "prof_ops": "auto"}},
        {"process_group": {"backend": "cpu:gloo,cuda:nccl"}},
        {"process_group": {"backend": "auto", "init_method": None}},
        {"network": {"interface": "eth0", "nccl": {"variables": {"NCCL_X": 1, "TORCH_NCCL_Y": "a"}}}},
        CommConfig().model_dump(),
        CommConfig(comms_logger=CommsLoggerConfig(enabled=True)).model_dump(exclude_unset=True),
    ],
)
def test_what_loads_is_valid(validator: Any, document: dict[str, Any]) -> None:
    load_config(document, environ={})
    assert list(validator.iter_errors(document)) == []


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"somebody_elses": 1},
        {"comm_logger": {}},
        {"comms_logger": {"enable": True}},
        {"comms_logger": {"enable": "auto"}},
        {"comms_logger": None},
        {"launch": {"master_port": 65536}},
        {"timeouts": {"collective_s": 0}},
        {"objects": {"max_bytes": 0}},
        {"process_group": {"backend": "cpu:"}},
        {"process_group": {"init_method": "node1"}},
        {"network": {"interface": "^lo"}},
        {"network": {"nccl": {"socket_nthreads": 17}}},
        {"network": {"nccl": {"nthreads": 33}}},
        {"network": {"nccl": {"debug_file": " "}}},
        {"network": {"nccl": {"variables": {"CCL_X": "1"}}}},
        {"network": {"gloo": {"variables": {"GLOO_X": ""}}}},
        {"network": {"nccl": {"variables": {"NCCL_X": "a\0b"}}}},
        {"communication_data_type": "fp61"},
        {"compress_communication": {"methd": "topk"}},
        {"train_batch_size": 1, "comms_logger": {"enable": True}},
    ],
)
def test_what_does_not_load_is_not_valid(validator: Any, document: Any) -> None:
    assert list(validator.iter_errors(document))
    with pytest.raises(ConfigError):
        load_config(document, environ={})


def test_whatever_is_valid_loads(values_of: Any, schema: dict[str, Any], validator: Any, tmp_path: Path) -> None:
    path = tmp_path / "comm.json"

    @settings(max_examples=200)
    @given(values_of(schema))
    def check(document: dict[str, Any]) -> None:
        path.write_text(json.dumps(document))
        assert list(validator.iter_errors(document)) == []
        try:
            load_config(path, environ={})
        except ConfigError as error:
            # Of an option that its method does not have, or of a compression that excludes another setting.
            assert error.key == "compress_communication" or error.key.startswith("reductions.")  # noqa: PT017

    check()
