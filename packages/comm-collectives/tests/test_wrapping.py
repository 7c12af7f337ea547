"""Wrappers of backends and their views, which threads make at the same time."""

from __future__ import annotations

from typing import Any

from comm_collectives.wrapping import BackendWrapper


class Inner:
    """Stand in for a backend, or its view in the course of a call."""

    fast_paths = None

    def __init__(self, call: str = "") -> None:
        self.call = call

    def during(self, call: str) -> Inner:
        return Inner(call)

    def named(self) -> str:
        return self.call


def test_a_view_that_is_made_during_a_look_up_has_methods_of_its_own_call() -> None:
    inner: Any = Inner()
    wrapper = BackendWrapper(inner)
    views: list[Any] = []

    class OtherThread(list[str]):
        def append(self, name: str) -> None:
            views.append(wrapper.during("all_reduce"))
            super().append(name)

    wrapper._passed_on = OtherThread()
    assert wrapper.named() == ""
    assert [view.named() for view in views] == ["all_reduce"]
