"""The ranks cannot meet, or what they met at goes away. In ``after``, they met once before."""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta

from torch.distributed import TCPStore

import comm_orchestrator as dist
from faults.expected import LIMIT_S
from faults.scene import Scene

__all__ = ["duplicate_rank", "port_taken", "store_killed", "world_size"]


def duplicate_rank(scene: Scene) -> None:
    """Rank 1 says that it is rank 0."""
    _start_wrongly(scene, {"RANK": "0"} if scene.is_culprit else {})


def world_size(scene: Scene) -> None:
    """Rank 1 says that there are 4."""
    _start_wrongly(scene, {"WORLD_SIZE": "4"} if scene.is_culprit else {})


def port_taken(scene: Scene) -> None:
    """Another program, of which this is the process behind the ranks, listens where rank 0 should."""
    if scene.rank == scene.world_size:
        with socket.create_server(("", scene.spec.ports[1])):
            scene.tell("listening")
            time.sleep(60)
        return
    scene.wait_for("listening")
    _start_wrongly(scene, {})


def _start_wrongly(scene: Scene, environ: dict[str, str]) -> None:
    if scene.moment == "after":
        scene.start()
        scene.add()
        dist.destroy_process_group()
    scene.meet("ready")
    scene.note("ready")
    if scene.is_culprit:
        scene.fault()
    if scene.start(1, LIMIT_S, **environ):
        scene.keep_calling()
    scene.meet("end")
    scene.end()


def store_killed(scene: Scene) -> None:
    """The store is in a process of its own, behind the ranks, as torchrun's is in its agent."""
    if scene.rank == scene.world_size:
        store = TCPStore("127.0.0.1", scene.spec.ports[0], None, True, timedelta(seconds=30), wait_for_workers=False)
        scene.tell("listening")
        time.sleep(60)
        del store
        return
    scene.wait_for("listening")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if scene.moment == "before":
        scene.meet("ready")
        scene.note("ready")
        _kill_the_store(scene)
        scene.start(0, LIMIT_S)
    else:
        scene.start()
        scene.warm()
        if scene.moment == "during" and scene.rank == 2:
            time.sleep(0.3)
            _kill_the_store(scene)
        elif scene.moment == "after":
            _kill_the_store(scene)
        scene.keep_calling(15)
        scene.attempt("new_group", lambda: dist.new_group(list(range(scene.world_size))) and None)
    scene.meet("end")
    scene.end()


def _kill_the_store(scene: Scene) -> None:
    """Let one rank do so, and all of them go on after it."""
    if scene.rank == 2:
        scene.fault()
        os.kill(scene.pid_of(scene.world_size), signal.SIGKILL)
        time.sleep(0.05)
        scene.tell("store-gone")
    scene.wait_for("store-gone")
