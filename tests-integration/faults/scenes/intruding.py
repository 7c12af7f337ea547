"""A forked child or a second thread calls in, a ring is overwritten, or the network is cut."""

from __future__ import annotations

import os
import signal
import threading
import time

import torch

import comm_orchestrator as dist
from faults.scene import Scene
from faults.scenes.rings import ring_of

__all__ = ["corrupted_ring", "forked_child", "link_down", "two_threads"]

_CHILD_S = 6.0
_ADDING = 10


def forked_child(scene: Scene) -> None:
    """A child of rank 1 calls what its parent may call."""
    scene.start()
    scene.warm()
    if scene.is_culprit:
        begun = scene.begin_to_add() if scene.moment == "during" else None
        scene.fault()
        _call_in_a_child(scene)
        if begun:
            scene.finish_adding(begun)
    else:
        scene.wait_for("fault")
        if scene.moment == "during":
            time.sleep(0.3 if scene.rank == 2 else 0)
            scene.finish_adding(scene.begin_to_add())
    scene.keep_calling(10)
    scene.meet("end")
    scene.end()


def _call_in_a_child(scene: Scene) -> None:
    pid = os.fork()
    if pid == 0:
        begin = time.monotonic()
        kinds, message = [], "no error"
        try:
            dist.all_reduce(torch.ones(16))
        except BaseException as error:
            kinds, message = [one.__name__ for one in type(error).__mro__], str(error)
        scene.note("child", kinds=kinds, message=message, seconds=time.monotonic() - begin)
        os._exit(0)
    end = time.monotonic() + _CHILD_S
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def two_threads(scene: Scene) -> None:
    """Two threads call at once: in another order than on the other ranks, or all the same."""
    scene.start()
    scene.warm()

    def add() -> None:
        scene.attempt("all_reduce", lambda: dist.all_reduce(torch.ones(1000)), None)

    def send() -> None:
        scene.attempt("broadcast", lambda: dist.broadcast(torch.ones(1000), 0), None)

    def add_many() -> None:
        for _ in range(_ADDING):
            tensor = torch.full((1000,), float(scene.rank))
            if not scene.attempt("all_reduce", lambda tensor=tensor: _summed(tensor), torch.full((1000,), 3.0)):
                return

    if scene.moment == "during":
        scene.note("fault")
        _together((add_many, 0.0), (add_many, 0.0))
    elif scene.is_culprit:
        scene.fault()
        _together((send, 0.0), (add, 0.2))
    else:
        add()
        send()
    scene.keep_calling()
    scene.meet("end")
    scene.end()


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor


def _together(*calls: tuple[object, float]) -> None:
    threads = [threading.Timer(after_s, call) for call, after_s in calls]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def corrupted_ring(scene: Scene) -> None:
    """Another process, here rank 2, writes random bytes over the ring of rank 1, which is killed a while later."""
    scene.start()
    scene.note("ring", path=ring_of(os.getpid()))
    scene.warm()
    if scene.rank == 2:
        time.sleep(0.3 if scene.moment == "during" else 0)
        ring = ring_of(scene.pid_of(scene.spec.culprit))
        if ring:
            size = os.path.getsize(ring)
            with open(ring, "r+b") as file:
                file.write(os.urandom(size))
        scene.tell("corrupted")
    elif scene.moment != "during":
        scene.wait_for("corrupted")
    for _ in range(10):
        scene.add()
        time.sleep(0.05)
    if scene.is_culprit:
        scene.fault()
        os.kill(os.getpid(), signal.SIGKILL)
    scene.wait_for("fault")
    scene.keep_calling()
    scene.end()


def link_down(scene: Scene) -> None:
    """The runner takes the link down when it is asked to."""
    scene.start()
    scene.warm()
    if scene.is_culprit:
        time.sleep(0.3 if scene.moment == "during" else 0)
        scene.tell("cut")
        scene.wait_for("is-cut")
        scene.fault()
    elif scene.moment != "during":
        scene.wait_for("fault")
    scene.keep_calling()
    scene.leave()
