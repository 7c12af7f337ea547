"""Compressed collectives: codecs, what users ask for, and how encoded pieces travel."""

from comm_collectives.compression.codec import Codec
from comm_collectives.compression.registry import ENTRY_POINT_GROUP, codec_names, make_codec
from comm_collectives.compression.settings import Compression

__all__ = ["ENTRY_POINT_GROUP", "Codec", "Compression", "codec_names", "make_codec"]
