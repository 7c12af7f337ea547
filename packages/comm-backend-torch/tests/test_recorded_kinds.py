"""What the flight recorder notes of a fast path does not depend on the call that uses it first."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from comm_utils.flight_recorder.reduce_op import reducing
from comm_utils.testing.ring import Ring
from comm_utils.torch_support import recorded_calls
from comm_utils.torch_support.passed_tensors import passed, passing_as, passing_bytes, passing_joined
from comm_utils.torch_support.recorded_calls import KindsByDtype, kind_of_call


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


def test_what_was_passed_is_recorded_in_place_of_what_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring()
    monkeypatch.setattr(recorded_calls, "RECORDER", ring.recorder)
    ones = torch.ones(4, dtype=torch.complex64)

    def recorded() -> str:
        kind = kind_of_call(ring.group(), (0, 1), "all_to_all_single", "all_to_all", torch.uint8)
        kind.end(kind.begin(32, 0, [8, 24], [24, 8]))
        return str(ring.reader.calls(0)[-1])

    expected = "all_to_all(4 elements of complex64, parts [1, 3] sent, [3, 1] received)"
    with passing_as(ones, ones.view(torch.uint8)):
        assert recorded() == expected
    with passing_bytes([ones]):
        assert recorded() == expected
    assert recorded() == "all_to_all(32 elements of uint8, parts [8, 24] sent, [24, 8] received)"


def test_joined_tensors_differ_in_their_sizes_or_dtypes() -> None:
    def joined(*tensors: torch.Tensor) -> int:
        with passing_joined(tensors):
            return passed().joined

    a, b, c = torch.ones(2), torch.ones(6), torch.ones(2, dtype=torch.int32)
    assert joined(a) == 0
    assert joined(a, b) == joined(a.clone(), b.view(2, 3))
    assert len({joined(a, b), joined(b, a), joined(c, b), joined(a, a, b)}) == 4
    assert joined(a, b) >> 48 == 2
    with passing_joined([a, b]), passing_bytes([a]):
        assert passed().joined == joined(a, b)
        assert passed().per_element == 4
    assert not passed().joined
