"""Memory that is kept for later calls."""

from __future__ import annotations

import pytest
import torch

from comm_collectives import buffers
from comm_collectives.buffers import Buffers

META = torch.device("meta")


def test_what_another_stream_reads_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    current, recorded = ["launching"], []
    monkeypatch.setattr(buffers, "current_stream", lambda _: current[0])
    monkeypatch.setattr(buffers, "used_here", lambda memory: recorded.append((id(memory), current[0])))
    monkeypatch.setattr(buffers, "_kept", {})

    def kept_after(finishing: str) -> tuple[int, int]:
        """Take memory, have the call finished in a stream, and return which memory it was and which is next."""
        found = []
        for stream in (finishing, "launching"):
            current[0] = "launching"
            made = Buffers(META)
            found.append(id(made.take(100)._base))
            current[0] = stream
            with made:
                pass
        return found[0], found[1]

    first, again = kept_after("launching")
    assert first == again
    assert not recorded
    first, again = kept_after("another")
    assert first != again
    assert recorded == [(first, "another")]
