"""A JSON Schema for editors."""

from __future__ import annotations

from typing import Any

from comm_config.deepspeed import DEEPSPEED_KEYS
from comm_config.models import CommConfig, CommsLoggerConfig, TrainingConfig
from comm_config.network import CclConfig, GlooConfig, NcclConfig

__all__ = ["json_schema"]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ID = "urn:comm-config:schema"


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a configuration file.

    Unknown keys are errors in every section, and at the top as well unless the document has a key that only
    DeepSpeed knows.
    """
    schema = CommConfig.model_json_schema()
    definitions = schema.pop("$defs")
    for model in (schema, *definitions.values()):
        for field in model["properties"].values():
            # pydantic derives these from the names: noise in an editor's tooltip.
            field.pop("title", None)
    for library in (NcclConfig, GlooConfig, CclConfig):
        variables = definitions[library.__name__]["properties"]["variables"]
        variables["propertyNames"] = {"pattern": library.variable_pattern()}
    deepspeeds = [definitions[section.__name__]["properties"] for section in (CommsLoggerConfig, TrainingConfig)]
    top = schema["properties"]
    own = [(section, list(section)) for section in deepspeeds]
    for fields, keys in (*own, (top, ["communication_data_type", "compress_communication"])):
        for key in keys:
            fields[key] = _or_auto(fields[key])
    top["$schema"] = {"type": "string", "description": "The schema that an editor checks this file against."}
    del schema["additionalProperties"]
    return {
        "$schema": _DIALECT,
        "$id": _ID,
        **schema,
        "title": "Communication configuration",
        "if": {"anyOf": [{"required": [key]} for key in sorted(DEEPSPEED_KEYS)]},
        "else": {"propertyNames": {"enum": list(top)}},
        "$defs": definitions,
    }


def _or_auto(field: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of ``field`` that admits Hugging Face's "auto" too."""
    outer: dict[str, Any] = {key: field.pop(key) for key in ("description", "default") if key in field}
    return {"anyOf": [*field.get("anyOf", [field]), {"const": "auto"}], **outer}
