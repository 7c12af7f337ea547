"""Compression: understood, and refused by name while nothing serves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from comm_config import CommConfig, CompressionConfig, ConfigError, load_config


@pytest.mark.parametrize("value", [None, "fp32", "FP32", "float32", "float", "torch.float32", "auto"])
def test_no_compression_by_data_type(value: str | None) -> None:
    assert load_config({"communication_data_type": value}, environ={}).communication_data_type in (None, "fp32")


@pytest.mark.parametrize("value", [False, 0, "false", "auto"])
def test_no_compression_by_flag(value: object) -> None:
    assert load_config({"compress_communication": value}, environ={}).compress_communication is False


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("fp16", "fp16"),
        ("half", "fp16"),
        ("torch.bfloat16", "bf16"),
        ("BF16", "bf16"),
        ("int8", "int8"),
        ("fp8", "fp8"),
    ],
)
def test_data_types_that_compress_are_refused(value: str, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"communication_data_type": value}, environ={})
    assert caught.value.key == "communication_data_type"
    assert str(caught.value) == (
        f"configuration dict: communication_data_type: got {name!r}, but compressed communication is not served yet; "
        'remove the key or set it to "fp32"'
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (True, "True"),
        (1, "True"),
        ({}, "{}"),
        ({"method": "topk", "error_feedback": True}, "{'method': 'topk', 'error_feedback': True}"),
        ({"method": "1-bit"}, "{'method': 'onebit'}"),
        (CompressionConfig(method="powersgd"), "{'method': 'powersgd'}"),
    ],
)
def test_compression_is_refused(value: Any, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"compress_communication": value}, environ={})
    assert caught.value.key == "compress_communication"
    assert str(caught.value) == (
        f"configuration dict: compress_communication: got {shown}, but compressed communication is not served yet; "
        "remove the key or set it to false"
    )


def test_it_is_refused_wherever_it_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 1, "communication_data_type": "fp16", "compress_communication": true}')
    with pytest.raises(ConfigError, match=r"ds_config\.json: communication_data_type: got 'fp16'"):
        load_config(path, environ={})
    with pytest.raises(ConfigError, match=r"^environment variable COMM_COMPRESS_COMMUNICATION: compress_communication"):
        load_config(environ={"COMM_COMPRESS_COMMUNICATION": "yes"})
    with pytest.raises(ConfigError, match=r"^argument: compress_communication"):
        load_config(environ={}, overrides={"compress_communication": True})
    with pytest.raises(ConfigError, match=r"^configuration object: communication_data_type"):
        load_config(CommConfig(communication_data_type="bf16"), environ={})


def test_a_stronger_source_can_turn_it_off() -> None:
    document = {"communication_data_type": "fp16", "compress_communication": {"method": "topk"}}
    environ = {"COMM_COMMUNICATION_DATA_TYPE": "fp32", "COMM_COMPRESS_COMMUNICATION": "0"}
    config = load_config(document, environ=environ)
    assert (config.communication_data_type, config.compress_communication) == ("fp32", False)
    overrides = {"communication_data_type": "fp32", "compress_communication": False}
    assert load_config(document, environ={}, overrides=overrides) == config


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"communication_data_type": "fp61"}, "communication_data_type: got 'fp61', expected 'fp32', 'fp16', "),
        ({"communication_data_type": 16}, "communication_data_type: got 16, expected 'fp32', 'fp16', "),
        ({"compress_communication": "often"}, "compress_communication: got 'often', expected true or false"),
        ({"compress_communication": {"method": "tpk"}}, "compress_communication.method: got 'tpk', expected 'fp16', "),
        (
            {"compress_communication": {"error_feedback": "x"}},
            "compress_communication.error_feedback: got 'x', expected true or false",
        ),
        (
            {"compress_communication": {"methods": "topk"}},
            "compress_communication.methods: unknown key; did you mean 'method'? (known here: method, error_feedback)",
        ),
    ],
)
def test_wrong_values(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(document, environ={})
    assert str(caught.value).startswith(f"configuration dict: {message}")


@pytest.mark.parametrize(("name", "guess"), [("b_f16", "bf16"), ("fp_32", "fp32"), ("int_8", "int8")])
def test_the_nearest_data_type_is_named(name: str, guess: str) -> None:
    with pytest.raises(ConfigError, match=rf"; did you mean '{guess}'\?$"):
        load_config({"communication_data_type": name}, environ={})
