"""Ranks meet where no name server answers: torch's store asks for the name of every address that it connects to."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import comm_orchestrator as dist
from comm_utils.testing import patience, run_ranks

ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
#: Of a network, mounts, and processes of its own: what is in them ends with the process that made them.
UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
PREPARE = 'ip link set lo up && mount --bind "$1" /etc/resolv.conf && shift && exec "$@"'


def cannot_isolate() -> str:
    if os.geteuid() != 0:
        return "network namespaces need root"
    if lacking := [tool for tool in ("unshare", "ip", "mount") if not shutil.which(tool)]:
        return f"network namespaces need {', '.join(lacking)}: apt-get install iproute2 util-linux mount"
    if not Path("/etc/resolv.conf").exists():
        return "this machine has no /etc/resolv.conf"
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        return "this machine does not let root make namespaces"
    return ""


def starts() -> float:
    """Return the seconds that the start took."""
    begin = time.monotonic()
    dist.init_distributed("gloo", timeout=30, verbose=False)
    took = time.monotonic() - begin
    dist.destroy_process_group()
    return took


def main() -> None:
    """Print the questions that the name servers got and the seconds of each rank's start."""
    asked: list[bytes] = []
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("", 53))

    def listen() -> None:
        while True:
            asked.append(server.recv(512))

    threading.Thread(target=listen, daemon=True).start()
    seconds = run_ranks(starts, 2)
    print(json.dumps({"asked": len(asked), "seconds": seconds}))


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_silent_name_servers_delay_the_start_by_seconds_at_most(tmp_path: Path, servers: int) -> None:
    """By default, glibc waits 5 s for each of up to three servers, twice, and torch asks more than once."""
    if reason := cannot_isolate():
        pytest.skip(reason)
    configuration = tmp_path / "resolv.conf"
    configuration.write_text("".join(f"nameserver {address}\n" for address in ADDRESSES[:servers]))
    command = [*UNSHARE, "sh", "-c", PREPARE, "sh", str(configuration), sys.executable, __file__]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["asked"] > 0, "nobody asked a name server, so this shows nothing"
    assert max(found["seconds"]) < (2.5 + servers) * patience(), found


if __name__ == "__main__":
    main()
