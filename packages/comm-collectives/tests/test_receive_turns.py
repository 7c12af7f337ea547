"""The order of receives that are preceded by descriptions."""

from __future__ import annotations

from typing import Any

from comm_collectives.receive_turns import Turn, _turns, queue_up


class Group:
    """Stand for a process group."""


def test_a_turn_is_kept_until_it_is_over() -> None:
    group: Any = Group()
    first, second, other = (queue_up(Turn("recv", source, 5, 1.0), group) for source in (0, 0, 1))
    assert second.before == [first]
    assert not other.before
    first.end()
    with other.taken():
        assert _turns[group] == {5: [second, other]}
    with second.taken():
        assert _turns[group] == {5: [second]}
    for tag in range(100):
        with queue_up(Turn("recv", 0, tag, 1.0), group).taken():
            assert len(_turns[group]) == 1
    assert not _turns[group]
