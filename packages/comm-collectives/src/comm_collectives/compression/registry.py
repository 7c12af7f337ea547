"""The codecs that are installed, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from comm_collectives.compression.block_codecs import Float8, Integer, OneBit
from comm_collectives.compression.cast_codecs import BFloat16, Float16, Uncompressed
from comm_collectives.compression.codec import Codec
from comm_collectives.compression.top_k import TopK
from comm_utils.errors import ArgumentError
from comm_utils.log import logger
from comm_utils.plugins import call, entry_points, load

__all__ = ["ENTRY_POINT_GROUP", "codec_names", "make_codec"]

#: Entry points of this group name a function or class that returns a :class:`Codec` for the options that it is given.
ENTRY_POINT_GROUP = "comm_utils.codecs"
# Names that compression= takes beside those of codecs.
_RESERVED = ("powersgd", "seq_parallel")


def _built_in() -> dict[str, Callable[..., Codec]]:
    return {
        "none": Uncompressed,
        "fp16": Float16,
        "bf16": BFloat16,
        "fp8": functools.partial(Float8, torch.float8_e4m3fn),
        "fp8_e4m3": functools.partial(Float8, torch.float8_e4m3fn),
        "fp8_e5m2": functools.partial(Float8, torch.float8_e5m2),
        "int8": functools.partial(Integer, 8),
        "int4": functools.partial(Integer, 4),
        "onebit": OneBit,
        "topk": TopK,
    }


@functools.cache
def _codecs() -> dict[str, Callable[..., Codec]]:
    found = _built_in()
    owners = dict.fromkeys((*found, *_RESERVED), "this library")
    for entry in entry_points(ENTRY_POINT_GROUP):
        if entry.name in owners:
            logger.warning(
                "compression: the codec %r of %s is ignored, as that of %s has the name; uninstall its package, or "
                "rename its entry point",
                entry.name,
                entry.value,
                owners[entry.name],
            )
        else:
            owners[entry.name] = entry.value
            found[entry.name] = functools.partial(_load, entry.name)
    return found


def _load(name: str, **options: object) -> Codec:
    for entry in entry_points(ENTRY_POINT_GROUP):
        if entry.name == name:
            try:
                made = call(entry, load(entry), **options)
            except Exception as error:
                raise ArgumentError(
                    f"compression: the codec {name!r} of {entry.value} cannot be used: {error}"
                ) from error
            if isinstance(made, Codec):
                _check_interface(made, name, entry.value)
                return made
            raise ArgumentError(f"compression: {entry.value} returned {type(made).__name__}; expected a Codec")
    raise ArgumentError(f"compression: the codec {name!r} is no longer installed")


def _check_interface(codec: Codec, name: str, value: str) -> None:
    """Check what every call asks of a codec, before ranks depend on it."""
    what = f"compression: the codec {name!r} of {value} cannot be used:"
    if not isinstance(getattr(codec, "name", None), str):
        raise ArgumentError(f"{what} it has no name; expected the class attribute name = {name!r}")
    count = 256
    try:
        size = codec.encoded_bytes(count)
    except Exception as error:
        raise ArgumentError(f"{what} encoded_bytes({count}) raised {type(error).__name__}: {error}") from error
    if type(size) is not int or size < 1:
        raise ArgumentError(f"{what} encoded_bytes({count}) returned {size!r}; expected an int of 1 or more")


def codec_names() -> list[str]:
    """Return the names of all codecs."""
    return sorted(_codecs())


def make_codec(name: str, **options: object) -> Codec:
    """Return the codec ``name``.

    Args:
        options: of the codec, such as ``block_size``; those that are None are left to it.

    Raises:
        ArgumentError: there is no such codec, or it has no such option.
    """
    known = _codecs()
    if name not in known:
        raise ArgumentError(f"compression: got {name!r}; expected one of {', '.join(sorted([*known, 'powersgd']))}")
    given = {key: value for key, value in options.items() if value is not None}
    try:
        return known[name](**given)
    except TypeError:
        refused = ", ".join(sorted(given))
        raise ArgumentError(f"compression: {name} does not take all of: {refused}") from None
