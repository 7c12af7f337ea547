"""The interface of a codec, and the codecs that are installed."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch

from comm_utils.errors import ArgumentError
from comm_utils.plugins import entry_points

__all__ = ["ENTRY_POINT_GROUP", "Codec", "codec_names", "make_codec"]

#: Entry points of this group name a function or class that returns a :class:`Codec` for the options that it is given.
ENTRY_POINT_GROUP = "comm_utils.codecs"


class Codec(ABC):
    """A format of float32 elements on the wire.

    Ranks encode pieces of tensors and decode those of others; sums are made in float32 in between. A subclass has no
    state: what an encoding loses is kept by its caller, for error feedback.

    Attributes:
        name: the name under which users ask for it.
        granularity: pieces of a tensor begin at multiples of so many elements.
        needs_feedback: results are useless without error feedback, which is therefore always on.
        gathers: it serves collectives that only move data; the others need error feedback.
    """

    name: ClassVar[str]
    granularity: int = 1
    needs_feedback: ClassVar[bool] = False
    gathers: ClassVar[bool] = True

    @abstractmethod
    def encoded_bytes(self, count: int) -> int:
        """Return the bytes on the wire for ``count`` elements."""

    @abstractmethod
    def encode(self, source: torch.Tensor, wire: torch.Tensor, error: torch.Tensor | None = None) -> None:
        """Overwrite ``wire`` with ``source``.

        Args:
            source: float32, (n,), contiguous; only read.
            wire: uint8, (encoded_bytes(n),), contiguous, aligned to 16 bytes.
            error: float32, (n,): added to ``source`` before it is encoded, and overwritten with what the encoding
                loses, 0 where that is not finite. None encodes ``source`` alone.
        """

    @abstractmethod
    def decode(self, wire: torch.Tensor, target: torch.Tensor, add: bool = False) -> None:
        """Overwrite ``target``, float32, (n,), with what ``wire`` holds, or add it to ``target``."""

    @abstractmethod
    def bound(self, source: torch.Tensor) -> torch.Tensor:
        """Return the largest error of each element of ``source``, float32, (n,), finite, after encoding and decoding.

        Where an element may become infinite, because it is too large for the format, its bound is.
        """

    def __repr__(self) -> str:
        """Return what ranks have to agree on: the name and all options."""
        return self.name


def _built_in() -> dict[str, Callable[..., Codec]]:
    # Not before they are needed.
    from comm_collectives.compression.block_codecs import Float8, Integer, OneBit
    from comm_collectives.compression.cast_codecs import BFloat16, Float16, Uncompressed
    from comm_collectives.compression.top_k import TopK

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
    for entry in entry_points(ENTRY_POINT_GROUP):
        found.setdefault(entry.name, functools.partial(_load, entry.name))
    return found


def _load(name: str, **options: object) -> Codec:
    for entry in entry_points(ENTRY_POINT_GROUP):
        if entry.name == name:
            try:
                made = entry.load()(**options)
            except Exception as error:
                raise ArgumentError(
                    f"compression: the codec {name!r} of {entry.value} cannot be used: {error}"
                ) from error
            if isinstance(made, Codec):
                return made
            raise ArgumentError(f"compression: {entry.value} returned {type(made).__name__}; expected a Codec")
    raise ArgumentError(f"compression: the codec {name!r} is no longer installed")


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
