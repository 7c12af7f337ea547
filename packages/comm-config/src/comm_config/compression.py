"""The keys of compression: `communication_data_type`, `compress_communication`, and that of sequence parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from comm_config.errors import ConfigError
from comm_config.fields import Positive, Section, lower_case, not_a_flag

__all__ = [
    "UNION_TAGS",
    "CompressionConfig",
    "CompressionSetting",
    "DataType",
    "check_options",
    "compression_options",
]

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


_OWNERS = {
    "block_size": ("fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "onebit"),
    "ratio": ("topk",),
    "rank": ("powersgd",),
}
_WITH_FEEDBACK = ("onebit", "topk", "powersgd")


def _size_tag(value: object) -> str:
    return "choice" if isinstance(value, str) and not value.strip().lstrip("+-").isdecimal() else "number"


_Size = Annotated[
    Annotated[int, Field(ge=0), not_a_flag, Tag("number")] | Annotated[Literal["auto"], Tag("choice")],
    Discriminator(_size_tag),
]


class CompressionConfig(Section):
    """Settings of compression, on where the section is present."""

    method: Annotated[
        Literal["fp16", "bf16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "onebit", "topk", "powersgd", "none"]
        | None,
        BeforeValidator(_method_name),
    ] = Field(default=None, description='Codec; null for `communication_data_type`, else fp16; "none" is off.')
    block_size: Annotated[int, Field(ge=16, le=4096, multiple_of=16), not_a_flag] | None = Field(
        default=None, description="Elements that share a scale; null leaves it to the codec."
    )
    error_feedback: bool | None = Field(
        default=None, description="Add what one exchange lost to the next one; null where the codec needs it."
    )
    min_size_bytes: _Size = Field(
        default=65536,
        description='Smaller tensors travel as they are; "auto" for the size at which compressing is measured to pay.',
    )
    ratio: Annotated[float, Field(gt=0, le=1), not_a_flag] | None = Field(
        default=None, description="Share of the elements that topk sends; null for 0.01."
    )
    rank: Positive | None = Field(default=None, description="Rank of the matrices of powersgd; null for 4.")
    between_hosts: bool = Field(default=False, description="Compress only what travels between hosts.")


UNION_TAGS = frozenset({"boolean", "object", "number", "choice"})
"""Labels that pydantic puts into the location of an error inside `CompressionSetting`."""


def _union_tag(value: object) -> str:
    return "object" if isinstance(value, (Mapping, BaseModel)) else "boolean"


def _true_or_false(value: object) -> object:
    # Of all words that pydantic takes for a flag, "yes" might as well be meant for the name of a codec.
    if isinstance(value, str) and value.strip().lower() not in ("true", "false", "1", "0"):
        raise PydanticCustomError("bool_parsing", "expected true or false")
    return value


CompressionSetting = Annotated[
    Annotated[bool, BeforeValidator(_true_or_false), Tag("boolean")] | Annotated[CompressionConfig, Tag("object")],
    Discriminator(_union_tag),
]


def check_options(settings: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Raise for options of `compress_communication` that its method does not have.

    :param settings: the top-level settings in effect, by key
    :param sources: where each of them was read, by key
    :raises ConfigError: names the option and the methods that have it
    """
    given = settings.get("compress_communication")
    options = compression_options(settings.get("communication_data_type"), given if given is not None else False)
    if options is None or not isinstance(given, CompressionConfig):
        return
    method, wrong = options["method"], ""
    for option, owners in _OWNERS.items():
        if getattr(given, option) is not None and method not in owners:
            wrong = f"{option} is not for {method!r}, but for {', '.join(map(repr, owners))}"
    if given.error_feedback is False and method in _WITH_FEEDBACK:
        wrong = f"error_feedback cannot be off for {method!r}, whose results are of no use without it"
    if given.between_hosts and method == "powersgd":
        wrong = "between_hosts is not for 'powersgd', whose factors go through all_reduce as they are"
    if given.min_size_bytes == "auto" and method == "powersgd":
        wrong = "min_size_bytes cannot be 'auto' for 'powersgd', which depends on the shapes of tensors too"
    if wrong:
        key = "compress_communication"
        raise ConfigError.at(sources.get(key, ""), key, f"got {given.model_dump(exclude_unset=True)!r}, but {wrong}")


def compression_options(data_type: str | None, setting: bool | CompressionConfig) -> dict[str, Any] | None:
    """Return the arguments of `comm_collectives.Compression` for a configuration; None for no compression.

    :param data_type: `communication_data_type`
    :param setting: `compress_communication`
    """
    wanted = None if data_type in (None, "fp32") else data_type
    if isinstance(setting, CompressionConfig):
        if setting.method == "none":
            return None
        return {**setting.model_dump(), "method": setting.method or wanted or "fp16"}
    if not setting and wanted is None:
        return None
    return {"method": wanted or "fp16", "min_size_bytes": CompressionConfig().min_size_bytes}
