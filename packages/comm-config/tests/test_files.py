"""JSON files: what is wrong with them, and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_config import ConfigError, load_config
from comm_config.files import parse_object


def problem(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={})
    text = str(caught.value)
    assert text.startswith(f"file {path}: ")
    assert caught.value.source == f"file {path}"
    return text.removeprefix(f"file {path}: ")


def test_a_missing_file(tmp_path: Path) -> None:
    assert problem(tmp_path / "none.json") == "there is no such file; expected a JSON file"


def test_a_directory(tmp_path: Path) -> None:
    assert problem(tmp_path) == "is a directory; expected a JSON file"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    # A loop of links is unreadable for everyone, root included.
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    assert problem(loop) == "cannot be read: Too many levels of symbolic links"


def test_a_name_that_no_file_can_have() -> None:
    with pytest.raises(ConfigError, match="cannot be read: embedded null byte"):
        load_config("a\0b", environ={})


def test_bytes_that_are_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "latin.json"
    path.write_bytes('{"launch": {"master_addr": "zürich"}}'.encode("latin-1"))
    assert problem(path) == "is not UTF-8 (byte 29); expected a JSON file"


def test_a_byte_order_mark_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "bom.json"
    path.write_text('{"launch": {"master_port": 1}}', encoding="utf-8-sig")
    assert load_config(path, environ={}).launch.master_port == 1


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{\n  "launch": {"master_port": 1,}\n}', "line 2, column 31"),
        ("", "line 1, column 1"),
        ("{} {}", "line 1, column 4"),
        ('{\n// a comment\n"launch": {}}', "line 2, column 1"),
    ],
)
def test_invalid_json_names_line_and_column(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "comm.json"
    path.write_text(text)
    said = problem(path)
    assert said.startswith("is not valid JSON: ")
    # Python 3.13 places a trailing comma at the comma, earlier releases behind it.
    assert where in said or where.replace("31", "30") in said


@pytest.mark.parametrize(("text", "kind"), [("[]", "list"), ("3", "int"), ("null", "NoneType"), ('"x"', "str")])
def test_the_top_is_an_object(tmp_path: Path, text: str, kind: str) -> None:
    path = tmp_path / "comm.json"
    path.write_text(text)
    assert problem(path) == f"expected a JSON object at the top, got {kind}"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"launch": {}, "launch": {}}', "launch"),
        ('{"network": {"nccl": {"debug": "INFO", "debug": "WARN"}}}', "network.nccl.debug"),
        ('{"bf16": {}, "scheduler": {"steps": [1, {"a": 1, "a": 1}]}}', "scheduler.steps[1].a"),
    ],
)
def test_a_repeated_key_is_named(tmp_path: Path, text: str, key: str) -> None:
    path = tmp_path / "comm.json"
    path.write_text(text)
    assert problem(path) == f"{key}: is given twice in the same object"


@pytest.mark.parametrize("text", ['{"a":' * 200_000, '{"a": ' + "9" * 10_000 + "}"], ids=["depth", "digits"])
def test_json_beyond_the_parsers_limits(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^file x: is not (usable|valid) JSON: "):
        parse_object(text, "file x")


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner) | st.lists(inner)
    )
)
def test_objects_without_repeated_keys_are_read_as_they_are(value: object) -> None:
    document = {"top": value}
    assert parse_object(json.dumps(document), "file x") == document
