"""What the flight recorder notes of a fast path does not depend on the call that uses it first."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from comm_utils.flight_recorder.reduce_op import reducing
from comm_utils.testing.ring import Ring
from comm_utils.torch_support import recorded_calls
from comm_utils.torch_support.recorded_calls import KindsByDtype


@pytest.mark.parametrize(
    ("operation", "own", "made_within", "used_within", "expected"),
    [
        ("all_to_all_single", "", "max", "", "max"),  # the exchange of a reduce_scatter
        ("all_to_all_single", "", "", "max", ""),
        ("all_reduce", "sum", "avg", "", "avg"),
        ("all_reduce", "sum", "", "avg", "sum"),
    ],
)
def test_the_op_is_that_of_the_call_for_which_it_was_made(
    monkeypatch: pytest.MonkeyPatch, operation: str, own: str, made_within: str, used_within: str, expected: str
) -> None:
    ring = Ring()
    monkeypatch.setattr(recorded_calls, "RECORDER", ring.recorder)
    with reducing(made_within) if made_within else nullcontext():
        kinds = KindsByDtype(ring.group(), (0, 1), operation, operation, op=own)
    with reducing(used_within) if used_within else nullcontext():
        kinds[torch.float32].end(kinds[torch.float32].begin(1, 0))
    (call,) = ring.reader.calls(0)
    assert call.op == expected
