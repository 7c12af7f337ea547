"""A host for ranks: a process that forks them, in namespaces of its own where this machine lets it have them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Host", "cannot_isolate", "two_hosts"]

_UNSHARE = ("unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_TOOLS = ("unshare", "ip", "mount", "hostname")
# Reserved for documentation, so that no real network has these addresses.
_NETWORK = "192.0.2"
_NAMES = ("host-a", "host-b")
_LEFT_OUT = ("COMM_", "CCL_", "FI_", "GLOO_", "MASTER_", "NCCL_", "TORCHELASTIC_", "RANK", "WORLD_", "LOCAL_", "GROUP_")
_MARK = "FAULTS_MARK"


def cannot_isolate() -> str:
    """Return why this machine has no namespaces for us, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if lacking := [tool for tool in _TOOLS if not shutil.which(tool)]:
        return f"network namespaces need {', '.join(lacking)}"
    if subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False).returncode:
        return "this machine does not let root make namespaces"
    return ""


class Host:
    """One host; ``close`` ends whatever is left on it."""

    def __init__(self, name: str = _NAMES[0]) -> None:
        self.name, self.mark = name, uuid.uuid4().hex
        self.isolated = not cannot_isolate()
        # Not below /tmp and /dev/shm, which a host has to itself.
        self.folder = Path(tempfile.mkdtemp(prefix="faults-", dir="/var/tmp"))
        table = self.folder / "hosts"
        names = "".join(f"{_NETWORK}.{number} {one}\n" for number, one in enumerate(_NAMES, 1))
        table.write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
        command = [sys.executable, "-m", "faults.template"]
        if self.isolated:
            command = [*_UNSHARE, *command, "--host", name, str(table)]
        self._process = subprocess.Popen(
            command, env=self.environment({}), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if json.loads(self._line()) != "ready":
            raise RuntimeError(f"{name} did not start")

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """Return what ranks get: nothing of the caller's settings, these, and a mark."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_LEFT_OUT)}
        fixed = {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "CCL_SHARED_MEMORY_PROFILE": "0",
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "TMPDIR": "/tmp" if self.isolated else str(self.folder),
            _MARK: self.mark,
        }
        return {**kept, **fixed, **more}

    def ask(self, request: str, *arguments: Any) -> Any:
        """Return the template's answer.

        Raises:
            RuntimeError: it has gone.
        """
        assert self._process.stdin is not None
        print(json.dumps([request, arguments]), file=self._process.stdin, flush=True)
        return json.loads(self._line())

    def left(self) -> dict[str, Any]:
        """Return processes, files and listening sockets that were not there at first."""
        found: dict[str, Any] = self.ask("left", self.mark)
        if not self.isolated:  # other jobs of this machine listen as well, and have files there
            found = {**found, "listening": [], "files": [one for one in found["files"] if "/comm-" in one]}
        return found

    def clear(self) -> None:
        """End and remove what is left."""
        if self.isolated:
            self.ask("clear", self.mark)

    def pid(self) -> int:
        """Return the template's process id as this process sees it."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0])

    def close(self) -> None:
        """End the template, and with it what is in its namespaces."""
        self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]
        shutil.rmtree(self.folder, ignore_errors=True)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the first process of {self.name} has ended: {self._process.wait()}")
        return line


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a link between them."""
    with contextlib.ExitStack() as stack:
        hosts = []
        for name in _NAMES:
            hosts.append(Host(name))
            stack.callback(hosts[-1].close)
        a, b = hosts
        link = f"ip link add eth0 netns {a.pid()} type veth peer eth0 netns {b.pid()}"
        subprocess.run(link.split(), check=True)
        for number, host in enumerate(hosts, 1):
            host.ask("run", f"ip address add {_NETWORK}.{number}/24 dev eth0".split())
            host.ask("run", ["ip", "link", "set", "eth0", "up"])
        yield a, b
