"""Rank 1 has no memory or no descriptor left, or the file system of the rings has no space."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import comm_orchestrator as dist
from faults.expected import LIMIT_S
from faults.scene import Scene
from faults.scenes.rings import RING_FOLDER, ring_of

__all__ = ["descriptors", "disk", "memory"]

_MIB = 1 << 20


@contextlib.contextmanager
def _limited(which: int, limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


def _mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _opened() -> int:
    return len(os.listdir("/proc/self/fd")) - 1


def memory(scene: Scene) -> None:
    """The address space may grow by 1 MiB only."""
    if scene.moment == "before":
        _start_with(scene, resource.RLIMIT_AS, lambda: _mapped() + _MIB)
        return
    scene.start()
    scene.warm()
    tensor = torch.full((16 * _MIB,), float(scene.rank + 1))
    expected = torch.full((16 * _MIB,), 6.0)

    def add() -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)

    def reach() -> None:
        scene.fault()
        resource.setrlimit(resource.RLIMIT_AS, (_mapped() + _MIB, hard))

    if scene.is_culprit:
        if scene.moment == "during":
            threading.Timer(0.3, reach).start()
        else:
            reach()
    elif scene.moment == "after" or scene.rank == 2:
        scene.wait_for("fault")
        time.sleep(0.1)
    right = scene.attempt("all_reduce", add, expected)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    if right:
        scene.keep_calling(5)
    scene.meet("end")
    scene.end()


def descriptors(scene: Scene) -> None:
    """No file can be opened."""
    if scene.moment == "before":
        _start_with(scene, resource.RLIMIT_NOFILE, lambda: _opened() + 1)
        return
    scene.start()
    scene.warm()
    if scene.moment == "after":
        if scene.is_culprit:
            scene.tell("prepared")
            with _limited(resource.RLIMIT_NOFILE, _opened()):
                scene.note("fault")
                _make_a_group(scene)
        else:
            scene.wait_for("prepared")
            _make_a_group(scene)
        scene.meet("made")
        scene.keep_calling(5)
    elif scene.is_culprit:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = _opened()

        def reach() -> None:
            scene.fault()
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))

        threading.Timer(0.3, reach).start()
        scene.keep_calling(15)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    else:
        if scene.rank == 2:
            scene.wait_for("fault")
        scene.keep_calling(15)
    scene.meet("end")
    scene.end()


def _make_a_group(scene: Scene) -> None:
    scene.attempt("new_group", lambda: dist.new_group(list(range(scene.world_size))) and None)


def _start_with(scene: Scene, which: int, limit: Callable[[], int]) -> None:
    scene.meet("ready")
    scene.note("ready")
    if scene.is_culprit:
        scene.fault()
        with _limited(which, limit()):
            right = scene.start(1, LIMIT_S)
    else:
        right = scene.start(1, LIMIT_S)
    if right:
        scene.keep_calling(5)
    scene.meet("end")
    scene.end()


def disk(scene: Scene) -> None:
    """Every byte of the file system in which rings lie is taken."""
    if scene.moment == "before":
        scene.meet("ready")
        scene.note("ready")
        if scene.is_culprit:
            _fill(scene)
        scene.wait_for("fault")
        right = scene.start(1)
    else:
        right = scene.start()
        scene.note("ring", path=ring_of(os.getpid()))
        scene.warm()
        if scene.moment == "after" or scene.rank == 2:
            if scene.rank == 2:
                time.sleep(0.3)
                _fill(scene)
            scene.wait_for("fault")
    if right:
        # More calls than a page of records holds.
        for _ in range(300):
            if not scene.add():
                break
    scene.meet("end")
    if scene.rank == 0:
        (RING_FOLDER / "filler").unlink()
    scene.meet("room")
    scene.end()


def _fill(scene: Scene) -> None:
    with open(RING_FOLDER / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (_MIB, 4096):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
    scene.fault()
