"""The tree of keys: sections inside, settings at the leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

__all__ = ["Path", "dotted", "leaves", "members", "model_at", "nested", "sections", "set_values"]

Path: TypeAlias = tuple[str, ...]


def dotted(path: Path) -> str:
    """Return ``path`` as users write it: ``("comms_logger", "enabled")`` is ``comms_logger.enabled``."""
    return ".".join(path)


def members(annotation: Any) -> Iterator[Any]:
    """Yield the types that a value of ``annotation`` may have, without ``Annotated``, ``Union`` and parameters."""
    origin = getattr(annotation, "__origin__", None)
    if isinstance(annotation, type) and origin is None:
        yield annotation
    elif isinstance(origin, type) and origin in (list, dict):
        yield origin
    else:
        for argument in get_args(annotation):
            yield from members(argument)


def _section(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    # On Python 3.10, list[str] is an instance of type as well.
    if isinstance(annotation, type) and get_origin(annotation) is None and issubclass(annotation, BaseModel):
        return annotation
    return None


def leaves(model: type[BaseModel], prefix: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    """Yield every setting with its path, in the order of definition."""
    for name, field in model.model_fields.items():
        path = (*prefix, name)
        section = _section(field)
        if section is None:
            yield path, field
        else:
            yield from leaves(section, path)


def sections(model: type[BaseModel], prefix: Path = ()) -> Iterator[Path]:
    """Yield the path of every section, outer ones first."""
    for name, field in model.model_fields.items():
        section = _section(field)
        if section is not None:
            yield (*prefix, name)
            yield from sections(section, (*prefix, name))


def model_at(model: type[BaseModel], path: Path) -> type[BaseModel]:
    """Return the model whose keys stand below ``path``, which leads to a section or to a setting that may be one."""
    for name in path:
        inner = members(model.model_fields[name].annotation)
        model = next(member for member in inner if issubclass(member, BaseModel))
    return model


def set_values(config: BaseModel, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the settings that were given to ``config`` rather than left to their defaults."""
    for name, field in type(config).model_fields.items():
        path, value = (*prefix, name), getattr(config, name)
        if _section(field) is not None:
            yield from set_values(value, path)
        elif name in config.model_fields_set:
            yield path, value


def nested(values: Mapping[Path, Any]) -> dict[str, Any]:
    """Return the document that has ``values`` at their paths; no path may lead through another one's value."""
    document: dict[str, Any] = {}
    for path, value in values.items():
        inner = document
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
    return document
