"""Python objects as bytes, without pickle unless it is allowed.

The encoding is typed, versioned and bounded in size. What has none is refused where it is sent, and decoding runs no
code that a message chooses. ``docs/objects.md`` lists what can be sent.
"""

from comm_collectives.object_codec.errors import HOW_TO_ALLOW_PICKLE, ObjectDecodeError, ObjectExchangeError
from comm_collectives.object_codec.message import HEADER_BYTES, decode_object, encode_object, is_pickled
from comm_collectives.object_codec.policy import (
    ObjectPolicy,
    object_policy,
    resolve_allow_pickle,
    set_object_policy,
)
from comm_collectives.object_codec.registry import register_object_type

__all__ = [
    "HEADER_BYTES",
    "HOW_TO_ALLOW_PICKLE",
    "ObjectDecodeError",
    "ObjectExchangeError",
    "ObjectPolicy",
    "decode_object",
    "encode_object",
    "is_pickled",
    "object_policy",
    "register_object_type",
    "resolve_allow_pickle",
    "set_object_policy",
]
