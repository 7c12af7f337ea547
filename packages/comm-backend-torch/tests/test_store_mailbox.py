"""The watch's connection to the store of a world."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from comm_utils.torch_support.store_mailbox import connect_mailbox

_SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""

_ASKS = """
import os, signal, sys
from pathlib import Path
from torch.distributed import TCPStore
from comm_utils.errors import CommTimeoutError
from comm_utils.torch_support import bounded_store

store = TCPStore("127.0.0.1", int(sys.argv[1]), None, False)
os.kill(int(sys.argv[2]), signal.SIGSTOP)
threads = Path("/proc", sys.argv[2], "task")
while not all(stat.read_text().rpartition(") ")[2].startswith("T") for stat in threads.glob("*/stat")):
    pass  # a thread that still runs answers
try:
    bounded_store.BoundedStore(store, "this process", 0.0).check(["key"])
except CommTimeoutError:
    held = os.pipe()
    before = sorted(os.listdir("/proc/self/fd"))
    bounded_store._end_questions()
    print(before == sorted(os.listdir("/proc/self/fd")), flush=True)
"""


def test_the_end_of_a_process_leaves_no_copies_of_its_descriptors() -> None:
    server = subprocess.Popen([sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        command = [sys.executable, "-c", _ASKS, port, str(server.pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        finally:
            server.kill()
    assert done.stdout == "True\n", done.stderr


def test_messages_arrive_and_a_server_that_has_gone_is_reported_at_once() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with server:
        assert server.stdout is not None
        store = TCPStore("127.0.0.1", int(server.stdout.readline()), None, False)
        mailbox = connect_mailbox(PrefixStore("world", store), "job")
        assert mailbox is not None
        mailbox.set("key", b"value\0")
        assert mailbox.get("key") == b"value\0"
        assert mailbox.get("other") is None
        assert mailbox.add("counter", 2) == 2
        mailbox.close()
        server.kill()
        assert server.stderr is not None
        assert server.stderr.read() == ""
    begin = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        connect_mailbox(store, "job")
    assert time.monotonic() - begin < 1


def test_a_store_without_a_server_has_no_mailbox() -> None:
    assert connect_mailbox(HashStore(), "job") is None
