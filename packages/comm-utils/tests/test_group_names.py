from __future__ import annotations

from collections.abc import Sequence

import pytest

from comm_utils.group_names import listed


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "[]"),
        ([2, 0, 1], "[2, 0, 1]"),
        (range(16), str(list(range(16)))),
        (range(17), "[0-16]"),
        ([rank for rank in range(1000) if rank != 500], "[0-499, 501-999]"),
        (range(0, 100, 2), "[0, 2, 4, 6, 8, 10, 12, 14 and 42 more]"),
    ],
    ids=str,
)
def test_listed(ranks: Sequence[int], text: str) -> None:
    assert listed(ranks) == text
