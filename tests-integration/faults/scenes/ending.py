"""Rank 1 ends, stops, or comes late."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from faults.expected import LIMIT_S
from faults.scene import Scene

__all__ = ["crashes", "exits", "interrupted", "killed", "raises", "slow", "stopped"]

# Ranks 0 and 1 are in the call by then.
_IN_THE_CALL_S = 0.3


class PlantedError(Exception):
    """Nobody catches it."""


def _signal_itself(number: int) -> None:
    os.kill(os.getpid(), number)


def killed(scene: Scene) -> None:
    """SIGKILL."""
    _from_outside(scene, lambda: _signal_itself(signal.SIGKILL))


def stopped(scene: Scene) -> None:
    """SIGSTOP, until the runner kills it."""
    _from_outside(scene, lambda: _signal_itself(signal.SIGSTOP))


def interrupted(scene: Scene) -> None:
    """SIGINT, which the main thread raises as KeyboardInterrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _from_outside(scene, lambda: _signal_itself(signal.SIGINT))


def crashes(scene: Scene) -> None:
    """A segmentation fault."""
    _from_outside(scene, lambda: ctypes.string_at(0))


def raises(scene: Scene) -> None:
    """An exception that ends the program."""

    def act() -> None:
        raise PlantedError("planted")

    _in_the_program(scene, act)


def exits(scene: Scene) -> None:
    """The program ends and says that all is well."""
    _in_the_program(scene, lambda: sys.exit(0))


def slow(scene: Scene) -> None:
    """Late within the timeout, stopped for a while, or late beyond it."""
    scene.start()
    scene.warm()
    if scene.is_culprit:
        scene.fault()
        if scene.moment == "during":
            _stop_for(LIMIT_S / 4)
        else:
            time.sleep(LIMIT_S / 4 if scene.moment == "before" else LIMIT_S * 1.5)
    elif scene.moment == "during" and scene.rank == 2:
        scene.wait_for("fault")
        time.sleep(_IN_THE_CALL_S * 2)
    scene.keep_calling(15)
    scene.meet("end")
    scene.end()


def _stop_for(seconds: float) -> None:
    """Have a child stop this process when it is in its call, and let it go on."""
    own = os.getpid()
    if os.fork() == 0:
        time.sleep(_IN_THE_CALL_S)
        os.kill(own, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(own, signal.SIGCONT)
        os._exit(0)


def _from_outside(scene: Scene, act: Callable[[], object]) -> None:
    """Do it to rank 1 while it computes, or while it and rank 0 are in a call."""
    scene.start()
    scene.warm()

    def happen() -> None:
        scene.fault()
        act()

    if scene.is_culprit:
        if scene.moment == "during":
            threading.Timer(_IN_THE_CALL_S, happen).start()
            scene.add()
        else:
            happen()
        time.sleep(LIMIT_S * 2)
        scene.note("lost", waited_for="its end")
        return
    _survive(scene)


def _in_the_program(scene: Scene, act: Callable[[], object]) -> None:
    """Do it in the program of rank 1, which may have begun a call."""
    scene.start()
    scene.warm()
    if scene.is_culprit:
        begun = scene.begin_to_add() if scene.moment == "during" else None
        time.sleep(_IN_THE_CALL_S)
        scene.fault()
        act()
        del begun
    _survive(scene)


def _survive(scene: Scene) -> None:
    if scene.moment != "during" or scene.rank == 2:
        scene.wait_for("fault")
    scene.keep_calling()
    scene.end()
