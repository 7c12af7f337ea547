"""The compression keys: understood, and refused by name while nothing serves them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from comm_config.errors import ConfigError
from comm_config.fields import Section, lower_case

__all__ = ["UNION_TAGS", "CompressionConfig", "CompressionSetting", "DataType", "refuse_unserved"]

_DATA_TYPE_ALIASES = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8": "fp8",
}
_METHOD_ALIASES = {"1-bit": "onebit", "1bit": "onebit", "top-k": "topk", "top_k": "topk"}


def _data_type_name(value: object) -> object:
    value = lower_case(value)
    return _DATA_TYPE_ALIASES.get(value.removeprefix("torch."), value) if isinstance(value, str) else value


def _method_name(value: object) -> object:
    value = lower_case(value)
    return _METHOD_ALIASES.get(value, value) if isinstance(value, str) else value


DataType = Annotated[Literal["fp32", "fp16", "bf16", "fp8", "int8", "int4"], BeforeValidator(_data_type_name)]


class CompressionConfig(Section):
    """Settings of compression. Not served yet: a configuration that asks for it is refused."""

    method: Annotated[
        Literal["fp16", "bf16", "fp8", "int8", "int4", "onebit", "topk", "powersgd"] | None,
        BeforeValidator(_method_name),
    ] = Field(default=None, description="Codec; null leaves the choice to the library.")
    error_feedback: bool = Field(
        default=False, description="Add what one exchange lost to the gradients of the next one."
    )


UNION_TAGS = frozenset({"boolean", "object"})
"""Labels that pydantic puts into the location of an error inside `CompressionSetting`."""


def _union_tag(value: object) -> str:
    return "object" if isinstance(value, (Mapping, BaseModel)) else "boolean"


CompressionSetting = Annotated[
    Annotated[bool, Tag("boolean")] | Annotated[CompressionConfig, Tag("object")], Discriminator(_union_tag)
]


def refuse_unserved(settings: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Raise for a setting that asks for compression.

    :param settings: the top-level settings in effect, by key
    :param sources: where each of them was read, by key
    :raises ConfigError: one of them asks for compression
    """
    for key, off in (("communication_data_type", "fp32"), ("compress_communication", False)):
        value = settings.get(key)
        if value is None or value == off:
            continue
        got = value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        spelled = '"fp32"' if off == "fp32" else "false"
        raise ConfigError.at(
            sources.get(key, ""),
            key,
            f"got {got!r}, but compressed communication is not served yet; remove the key or set it to {spelled}",
        )
