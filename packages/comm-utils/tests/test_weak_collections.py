from __future__ import annotations

import threading
from weakref import WeakSet

from comm_utils.weak_collections import members_of


class _Member:
    pass


def test_members_are_listed_while_another_thread_adds_some() -> None:
    kept = [_Member() for _ in range(100)]
    found, stop = WeakSet(kept), threading.Event()

    def add() -> None:
        while not stop.is_set():
            more = [_Member() for _ in range(100)]
            for one in more:
                found.add(one)

    thread = threading.Thread(target=add)
    thread.start()
    try:
        for _ in range(3000):
            assert set(kept).issubset(members_of(found))
    finally:
        stop.set()
        thread.join()
    assert set(members_of(found)) == set(kept)
