"""Compression: what the two keys stand for, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from comm_config import CommConfig, CompressionConfig, ConfigError, load_config, resolve


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
def test_data_types_that_compress(value: str, name: str) -> None:
    config = load_config({"communication_data_type": value}, environ={})
    assert config.compression() == {"method": name, "min_size_bytes": 65536}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("auto", None),
        ("fp32", None),
        ("bfloat16", {"method": "bf16", "min_size_bytes": 65536}),
        ("fp16", {"method": "fp16", "min_size_bytes": 65536}),
    ],
)
def test_data_type_of_sequence_parallelism(value: str | None, expected: dict[str, Any] | None) -> None:
    document = {"train_batch_size": 1, "communication_data_type": "int8", "seq_parallel_communication_data_type": value}
    assert load_config(document, environ={}).seq_parallel_compression() == expected
    assert resolve(document, environ={}).seq_parallel_compression == expected
    assert resolve(document, environ={}).compression == {"method": "int8", "min_size_bytes": 65536}
    del document["communication_data_type"]
    assert resolve(document, environ={}).compression is None


REST = {
    "block_size": None,
    "error_feedback": None,
    "min_size_bytes": 65536,
    "ratio": None,
    "rank": None,
    "between_hosts": False,
}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, None),
        ({"compress_communication": False}, None),
        ({"communication_data_type": "fp32"}, None),
        ({"compress_communication": True}, {"method": "fp16", "min_size_bytes": 65536}),
        ({"compress_communication": 1, "communication_data_type": "bf16"}, {"method": "bf16", "min_size_bytes": 65536}),
        ({"compress_communication": {}}, {**REST, "method": "fp16"}),
        (
            {"compress_communication": {"method": "int8", "min_size_bytes": "auto"}},
            {**REST, "method": "int8", "min_size_bytes": "auto"},
        ),
        ({"compress_communication": {}, "communication_data_type": "int8"}, {**REST, "method": "int8"}),
        ({"compress_communication": {"method": "none"}}, None),
        ({"compress_communication": {"method": "none"}, "communication_data_type": "int8"}, None),
        ({"compress_communication": {"method": "1-bit"}}, {**REST, "method": "onebit"}),
        (
            {
                "compress_communication": {
                    "method": "int4",
                    "block_size": 64,
                    "error_feedback": True,
                    "min_size_bytes": 0,
                }
            },
            {**REST, "method": "int4", "block_size": 64, "error_feedback": True, "min_size_bytes": 0},
        ),
        (
            {"compress_communication": CompressionConfig(method="powersgd", rank=2)},
            {**REST, "method": "powersgd", "rank": 2},
        ),
        ({"compress_communication": {"method": "topk", "ratio": 0.1}}, {**REST, "method": "topk", "ratio": 0.1}),
    ],
)
def test_arguments_of_a_compression(document: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert load_config(document, environ={}).compression() == expected
    assert resolve(document, environ={}).compression == expected


def test_it_comes_from_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 1, "communication_data_type": "bf16", "compress_communication": true}')
    fp16, bf16 = ({"method": method, "min_size_bytes": 65536} for method in ("fp16", "bf16"))
    assert load_config(path, environ={}).compression() == bf16
    assert load_config(environ={"COMM_COMPRESS_COMMUNICATION": "true"}).compression() == fp16
    assert load_config(environ={}, overrides={"compress_communication": True}).compression() == fp16
    assert load_config(CommConfig(communication_data_type="bf16"), environ={}).compression() == bf16


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
        ({"seq_parallel_communication_data_type": "fp61"}, "seq_parallel_communication_data_type: got 'fp61', "),
        ({"compress_communication": "yes"}, "compress_communication: got 'yes', expected true or false"),
        ({"compress_communication": "often"}, "compress_communication: got 'often', expected true or false"),
        ({"compress_communication": {"method": "tpk"}}, "compress_communication.method: got 'tpk', expected 'fp16', "),
        (
            {"compress_communication": {"error_feedback": "x"}},
            "compress_communication.error_feedback: got 'x', expected true or false",
        ),
        (
            {"compress_communication": {"methods": "topk"}},
            "compress_communication.methods: unknown key; did you mean 'method'? (known here: method, block_size, "
            "error_feedback, min_size_bytes, ratio, rank, between_hosts)",
        ),
        (
            {"compress_communication": {"block_size": 24}},
            "compress_communication.block_size: got 24, expected a multiple",
        ),
        ({"compress_communication": {"ratio": True}}, "compress_communication.ratio: got True, expected a number"),
        (
            {"compress_communication": {"method": "fp16", "block_size": 64}},
            "compress_communication: got {'method': 'fp16', 'block_size': 64}, but block_size is not for 'fp16'",
        ),
        (
            {"compress_communication": {"rank": 2}, "communication_data_type": "int8"},
            "compress_communication: got {'rank': 2}, but rank is not for 'int8', but for 'powersgd'",
        ),
        (
            {"compress_communication": {"method": "powersgd", "min_size_bytes": "auto"}},
            "compress_communication: got {'method': 'powersgd', 'min_size_bytes': 'auto'}, but min_size_bytes cannot ",
        ),
        (
            {"compress_communication": {"method": "powersgd", "between_hosts": True}},
            "compress_communication: got {'method': 'powersgd', 'between_hosts': True}, but between_hosts is not for ",
        ),
        (
            {"compress_communication": {"min_size_bytes": -1}},
            "compress_communication.min_size_bytes: got -1, ",
        ),
        (
            {"compress_communication": {"min_size_bytes": "often"}},
            "compress_communication.min_size_bytes: got 'often', expected 'auto'",
        ),
        (
            {"compress_communication": {"method": "topk", "error_feedback": False}},
            "compress_communication: got {'method': 'topk', 'error_feedback': False}, but error_feedback cannot be off",
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
