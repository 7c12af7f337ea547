"""The first process of a host: it has imported what ranks import, forks them, and says what is left of them.

It reads one request a line from its input, and writes one answer a line; all of it is JSON. With ``--host`` it is the
first in namespaces of its own, and has /dev/shm, /tmp and a network to itself, so that nothing of another job is taken
for a leftover, and all that is left ends with it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import comm_backend_ccl
import comm_config
import comm_orchestrator.facade
from faults.scene import Scene, Spec

__all__ = ["main"]

# A clone, or its environment, may lie in /tmp, which then stays that of the machine.
_IS_IN_TMP = any(Path(one).is_relative_to("/tmp") for one in (__file__, sys.prefix))
_FOLDERS = ("/dev/shm",) if _IS_IN_TMP else ("/dev/shm", "/tmp")
_LISTENING = "0A"
# Large enough for what shared memory needs, small enough to be filled at once.
_SETUP = (
    "hostname {name}",
    "mount --bind {hosts} /etc/hosts",
    "mount -t sysfs sysfs /sys",
    "mount -t tmpfs -o size=512m tmpfs /dev/shm",
    *(() if _IS_IN_TMP else ("mount -t tmpfs tmpfs /tmp",)),
    "ip link set lo up",
)
#: What a start imports, so that it is there before a rank has no memory left for it.
IMPORTED = (comm_backend_ccl, comm_config, comm_orchestrator)
_SCENES = ("ending", "intruding", "mismatching", "scheduled", "starting", "starving")


class _Template:
    def __init__(self) -> None:
        self._ended: dict[int, int] = {}
        self._ranks: set[int] = set()
        self.at_first = {folder: set(os.listdir(folder)) for folder in _FOLDERS}

    def start(self, environ: dict[str, str], output: str, spec: dict[str, Any]) -> int:
        """Fork a rank; returns 0 in it."""
        pid = os.fork()
        if pid:
            self._ranks.add(pid)
            return pid
        os.setsid()
        os.environ.clear()
        os.environ.update(environ)
        tempfile.tempdir = None
        for descriptor, (path, flags) in enumerate([(os.devnull, os.O_RDONLY), *[(output, os.O_WRONLY)] * 2]):
            opened = os.open(path, flags | os.O_CREAT | (os.O_APPEND if flags else 0), 0o600)
            os.dup2(opened, descriptor)
            os.close(opened)
        return 0

    def poll(self) -> dict[str, Any]:
        """Reap what has ended, orphans too, and return the ranks among it with their exit codes."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                if pid in self._ranks:
                    self._ended[pid] = os.waitstatus_to_exitcode(status)
        return {"ended": self._ended}

    def left(self, mark: str) -> dict[str, Any]:
        """Return processes with this mark in their environment, new files and listening sockets."""
        self.poll()
        found = {pid: command for pid, command in _processes() if _has(pid, mark)}
        files = [f"{folder}/{name}" for folder in _FOLDERS for name in set(os.listdir(folder)) - self.at_first[folder]]
        inside = [str(path) for file in files for path in Path(file).rglob("*")]
        return {"processes": found, "files": sorted({*files, *inside}), "listening": _listening()}

    def clear(self, mark: str) -> dict[str, Any]:
        """End and remove all of that."""
        left = self.left(mark)
        for pid in left["processes"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for file in sorted(left["files"], key=len, reverse=True):
            with contextlib.suppress(OSError):
                os.rmdir(file) if os.path.isdir(file) else os.unlink(file)
        self._ranks.clear()
        self._ended.clear()
        return {}


def _processes() -> list[tuple[int, str]]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if command and int(entry.name) != os.getpid():
                found.append((int(entry.name), command))
    return found


def _has(pid: int, mark: str) -> bool:
    with contextlib.suppress(OSError):
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def _listening() -> list[int]:
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/self/net", name).read_text().splitlines()]
    return sorted({int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENING})


def _signal(pid: int, number: int) -> dict[str, Any]:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    return {}


def _run(arguments: list[str]) -> dict[str, Any]:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    return {"code": done.returncode, "output": done.stdout + done.stderr}


def _serve() -> Spec | None:
    """Answer requests until there are no more; in a rank, return what it is to do."""
    template = _Template()
    answers = {"poll": template.poll, "left": template.left, "clear": template.clear, "signal": _signal, "run": _run}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        if name == "start":
            pid = template.start(*arguments)
            if not pid:
                return Spec(**arguments[2])
            answer: Any = pid
        else:
            answer = answers[name](*arguments)
        print(json.dumps(answer), flush=True)
    return None


def main() -> None:
    """Serve; then be a rank, which ends as any program does, or end."""
    if sys.argv[1:2] == ["--host"]:
        name, hosts = sys.argv[2:]
        for command in _SETUP:
            subprocess.run(command.format(name=name, hosts=hosts).split(), check=True, stdout=sys.stderr)
    for scene in _SCENES:
        importlib.import_module(f"faults.scenes.{scene}")
    torch.set_num_threads(1)
    spec = _serve()
    if spec is not None:
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        module, _, function = spec.scene.partition(":")
        getattr(importlib.import_module(f"faults.scenes.{module}"), function)(Scene(spec))
        return


if __name__ == "__main__":
    main()
