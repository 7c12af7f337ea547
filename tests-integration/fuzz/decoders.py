"""The table of decoders: every function of the packages that reads what another process wrote.

Left out: what a test runner's parent and its ranks, or a command and the ranks that it starts, say to each other, as
either could run any code in the other anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fuzz import file_decoders, object_decoders, rendezvous_decoders, ring_decoders
from fuzz.bounds import Decoder

__all__ = ["CORPUS", "DECODERS"]

#: Inputs that once failed, or reach what others do not; a folder for each decoder.
CORPUS = Path(__file__).parent / "corpus"
DECODERS: Mapping[str, Decoder] = {
    one.name: one
    for module in (object_decoders, rendezvous_decoders, file_decoders, ring_decoders)
    for one in module.DECODERS
}
