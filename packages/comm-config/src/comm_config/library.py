"""Base of the sections of the communication libraries: keys that set environment variables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, field_validator

from comm_config.errors import shorten
from comm_config.fields import TEXT_PATTERN, Section, Text

__all__ = ["InterfaceName", "LibraryConfig", "variable_text"]

_SECTION_OF_PREFIX = {
    "NCCL_": "network.nccl",
    "TORCH_NCCL_": "network.nccl",
    "GLOO_": "network.gloo",
    "TORCH_GLOO_": "network.gloo",
    "CCL_": "network.ccl",
    "FI_": "network.ccl",
}
# Linux allows 15 characters; ^, = and commas are NCCL's list syntax, which gloo and oneCCL do not share.
_INTERFACE = r"^[^\s/,^=\x00]{1,15}$"


def variable_text(value: object) -> object:
    """Return a whole number or a flag as libraries spell it in a variable."""
    return str(int(value)) if isinstance(value, int) else value


def _interface_name(value: str) -> str:
    if not re.fullmatch(_INTERFACE, value):
        raise ValueError(
            "expected the exact name of one interface, such as 'eth0'; lists and patterns belong to "
            "network.nccl.socket_ifname, network.gloo.socket_ifname and network.ccl.kvs_iface"
        )
    return value


InterfaceName = Annotated[
    str, AfterValidator(_interface_name), WithJsonSchema({"type": "string", "pattern": _INTERFACE})
]
"""The exact name of one network interface."""

_VariableText = Annotated[
    Text,
    BeforeValidator(variable_text),
    WithJsonSchema({"type": ["string", "integer", "boolean"], "pattern": TEXT_PATTERN}),
]


class LibraryConfig(Section):
    """The variables of one library."""

    prefixes: ClassVar[tuple[str, ...]]

    variables: dict[str, _VariableText] = Field(
        default_factory=dict,
        description="Further variables of this library by their full names; a key of its own wins over them.",
    )

    @classmethod
    def variable_of(cls, key: str) -> str:
        """Return the variable that ``key`` stands for."""
        return cls.prefixes[0] + key.upper()

    @classmethod
    def variable_pattern(cls) -> str:
        """Return the regular expression of the names that ``variables`` may hold."""
        return f"^({'|'.join(cls.prefixes)})[A-Z0-9_]+$"

    def set_variables(self) -> Iterator[tuple[str, str]]:
        """Yield the name and value of each variable to set; keys come after ``variables``, which they override."""
        yield from self.variables.items()
        for key in type(self).model_fields:
            value = getattr(self, key)
            if key != "variables" and value is not None:
                yield self.variable_of(key), str(variable_text(value))

    @field_validator("variables", mode="after")
    @classmethod
    def _belong_here(cls, variables: dict[str, str]) -> dict[str, str]:
        for name in variables:
            if not re.fullmatch(cls.variable_pattern(), name):
                raise ValueError(f"{shorten(name)} {_where_it_belongs(name, cls.prefixes)}")
        return variables


def _where_it_belongs(name: str, prefixes: tuple[str, ...]) -> str:
    for prefix, section in _SECTION_OF_PREFIX.items():
        if name.startswith(prefix) and prefix not in prefixes:
            return f"does not belong here; expected under {section}.variables"
    expected = " or ".join(f"{prefix}NAME" for prefix in prefixes)
    return f"is no variable of this library; expected the full name, {expected}"
