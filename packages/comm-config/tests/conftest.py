"""Settings of the person who runs the tests stay out of them; values that a JSON Schema admits, for Hypothesis."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from comm_config import environment, json_schema

Schema = dict[str, Any]

# A busy machine is no reason to fail.
settings.register_profile("comm-config", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("comm-config")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("COMM_") or name == "DEEPSPEED_TIMEOUT":
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _forget_warnings() -> Iterator[None]:
    environment._warned.clear()
    yield
    environment._warned.clear()


@pytest.fixture(scope="session")
def schema() -> Schema:
    return json_schema()


@pytest.fixture(scope="session")
def values_of(schema: Schema) -> Callable[[Schema], st.SearchStrategy[Any]]:
    """Return a function from a part of the schema to a strategy for the values that it admits."""
    definitions = schema["$defs"]

    def alternatives(node: Schema) -> st.SearchStrategy[Any]:
        return st.one_of([values(inner) for inner in node.get("anyOf") or node.get("oneOf") or node["allOf"]])

    def values(node: Schema) -> st.SearchStrategy[Any]:
        if "$ref" in node:
            return values(definitions[node["$ref"].rsplit("/", 1)[1]])
        if {"anyOf", "oneOf", "allOf"} & node.keys():
            return alternatives(node)
        if "const" in node:
            return st.just(node["const"])
        if "enum" in node:
            return st.sampled_from(node["enum"])
        if isinstance(node["type"], list):
            return st.one_of([values({**node, "type": one}) for one in node["type"]])
        return _OF_TYPE[node["type"]](node, values)

    return values


def _object(node: Schema, values: Callable[[Schema], st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    if "propertyNames" in node:
        names = st.from_regex(node["propertyNames"]["pattern"], fullmatch=True)
        return st.dictionaries(names, values(node["additionalProperties"]), max_size=2)
    if "properties" not in node:
        return st.dictionaries(st.text(max_size=5), values(node["additionalProperties"]), max_size=2)
    return st.fixed_dictionaries({}, optional={key: values(inner) for key, inner in node["properties"].items()})


def _array(node: Schema, values: Callable[[Schema], st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    if "prefixItems" in node:
        return st.tuples(*map(values, node["prefixItems"])).map(list)
    return st.lists(values(node["items"]), max_size=3)


def _integer(node: Schema, _: Any) -> st.SearchStrategy[int]:
    step = node.get("multipleOf", 1)
    low, high = node.get("minimum", -(2**40)), node.get("maximum", 2**40)
    return st.integers(-(-low // step), high // step).map(lambda quotient: quotient * step)


def _number(node: Schema, _: Any) -> st.SearchStrategy[float]:
    low, excluded = node.get("exclusiveMinimum"), "exclusiveMinimum" in node
    return st.floats(low if excluded else node["minimum"], node.get("maximum", 1e9), exclude_min=excluded)


_OF_TYPE: dict[str, Callable[..., st.SearchStrategy[Any]]] = {
    "array": _array,
    "boolean": lambda *_: st.booleans(),
    "integer": _integer,
    "null": lambda *_: st.none(),
    "number": _number,
    "object": _object,
    "string": lambda node, _: st.from_regex(node["pattern"], fullmatch=True) if "pattern" in node else st.text(),
}
