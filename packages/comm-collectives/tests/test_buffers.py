"""Memory that is kept for later calls."""

from __future__ import annotations

import pytest
import torch

from comm_collectives import buffers
from comm_collectives.buffers import Buffers

META = torch.device("meta")


def test_what_another_stream_reads_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    current = ["launching"]
    recorded: list[tuple[torch.Tensor, str]] = []
    monkeypatch.setattr(buffers, "current_stream", lambda _: current[0])
    monkeypatch.setattr(buffers, "used_here", lambda memory: recorded.append((memory, current[0])))
    monkeypatch.setattr(buffers, "_kept", {})
    monkeypatch.setattr(buffers, "_kept_bytes", 0)

    def kept_after(finishing: str) -> list[torch.Tensor]:
        """Take memory, have the call finished in a stream, and return which memory it was and which is next."""
        found: list[torch.Tensor] = []
        for stream in (finishing, "launching"):
            current[0] = "launching"
            made = Buffers(META)
            memory = made.take(100)._base
            assert memory is not None
            found.append(memory)
            current[0] = stream
            with made:
                pass
        return found

    first, again = kept_after("launching")
    assert first is again
    assert not recorded
    first, again = kept_after("another")
    assert first is not again
    ((memory, stream),) = recorded
    assert memory is first
    assert stream == "another"
